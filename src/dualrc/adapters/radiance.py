"""Export for Nerfstudio and gsplat: undistorted images with poses."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap import import_pycolmap, quiet_colmap
from dualrc.errors import DataError, OutputError
from dualrc.files import make_folder, replacing_folder, write_json

# Cameras of Nerfstudio and OpenGL look along -z with y up; cameras of COLMAP look along z with y down.
_OPENGL_FROM_OPENCV = np.diag([1.0, -1.0, -1.0, 1.0])


def write_dataset(model: str | Path, images: str | Path, out: str | Path) -> Path:
    """Write `out`/images, `out`/sparse/0, `out`/points.ply and `out`/transforms.json from a COLMAP model.

    The images are undistorted, so that all cameras are pinhole cameras. gsplat, the original Gaussian Splatting and the
    colmap reader of Nerfstudio read `sparse/0`; `transforms.json` is the native format of Nerfstudio.
    """
    model, images, out = Path(model), Path(images), Path(out)
    if out.exists() and not (out / "transforms.json").is_file():
        raise OutputError(f"{out} exists and is not a dataset of dualrc; delete it, or write to another folder.")
    if not (model / "images.bin").is_file() and not (model / "images.txt").is_file():
        raise DataError(f"{model} holds no COLMAP model; give the folder with images.bin.")
    pycolmap = import_pycolmap()
    make_folder(out.parent)
    with (
        replacing_folder(out) as ready,
        tempfile.TemporaryDirectory(dir=ready.parent) as temporary,
        quiet_colmap(pycolmap),
    ):
        made = Path(temporary)
        pycolmap.undistort_images(made, model, images)
        (ready / "sparse").mkdir()
        (made / "images").rename(ready / "images")
        (made / "sparse").rename(ready / "sparse" / "0")
        undistorted = pycolmap.Reconstruction(ready / "sparse" / "0")
        undistorted.export_PLY(ready / "points.ply")
        write_json(ready / "transforms.json", _transforms(undistorted))
    return out


def _transforms(model: Any) -> dict[str, Any]:
    """Return the content of transforms.json; its pixel convention is that of COLMAP."""
    frames = []
    for number in sorted(model.reg_image_ids(), key=lambda number: model.images[number].name):
        image = model.images[number]
        camera = model.cameras[image.camera_id]
        world_from_cam = np.eye(4)
        world_from_cam[:3] = image.cam_from_world().inverse().matrix()
        frames.append(
            {
                "file_path": f"images/{image.name}",
                "w": camera.width,
                "h": camera.height,
                "fl_x": camera.focal_length_x,
                "fl_y": camera.focal_length_y,
                "cx": camera.principal_point_x,
                "cy": camera.principal_point_y,
                "transform_matrix": (world_from_cam @ _OPENGL_FROM_OPENCV).tolist(),
            }
        )
    return {"camera_model": "PINHOLE", "ply_file_path": "points.ply", "frames": frames}
