"""COLMAP models: images, cameras, poses and points."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.colmap.records import refuse_damaged
from dualrc.colmap.upright import find_rotation, import_pycolmap
from dualrc.errors import DataError
from dualrc.files import first_line, inside
from dualrc.geometry import Camera
from dualrc.pixels import from_colmap
from dualrc.types import FloatArray, IntArray, Size


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelImage:
    """A registered image of a COLMAP model, upright."""

    # (width, height).
    size: Size
    # (n, 2) float64, the observations of 3D points.
    points: FloatArray
    # (n,) Ids of the observed 3D points.
    point_ids: IntArray
    # (3, 4) Pose [R | t].
    cam_from_world: FloatArray
    # None for a camera model without a perspective projection, such as EQUIRECTANGULAR.
    camera: Camera | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A COLMAP model in our pixel convention, with upright images."""

    # Images by name.
    images: dict[str, ModelImage]
    # (m,) Ids of the 3D points, ascending.
    point_ids: IntArray
    # (m, 3) Their world coordinates.
    xyz: FloatArray

    def xyz_of(self, point_ids: npt.ArrayLike) -> FloatArray:
        """Return the 3D points with these ids: (n,) -> (n, 3)."""
        return self.xyz[np.searchsorted(self.point_ids, point_ids)]


def read_model(path: str | Path, images: str | Path | None = None) -> Model:
    """Read a binary or text COLMAP model from its folder; `images` is the folder of its images, for EXIF orientations.

    Counts and lengths in binary files must fit the file sizes, and names must stay inside the image folder.
    """
    pycolmap = import_pycolmap()
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; pass the folder that contains cameras.bin or cameras.txt.")
    refuse_damaged(path)
    try:
        model = pycolmap.Reconstruction(str(path))
    except (ValueError, RuntimeError, IndexError, MemoryError) as error:
        raise DataError(f"{path} has no COLMAP model ({first_line(error)}); pass the folder of cameras.bin.") from error
    if not model.is_valid():
        raise DataError(f"The COLMAP model {path} is damaged; copy or export it again.")
    point_ids = np.array(sorted(model.points3D), dtype=np.int64)
    xyz = np.array([model.points3D[point_id].xyz for point_id in point_ids.tolist()]).reshape(-1, 3)
    for image in model.images.values():
        # Otherwise a model could make this program read any image of the machine.
        inside(images or "the image folder", image.name)
    registered = sorted((model.images[number] for number in model.reg_image_ids()), key=lambda image: image.name)
    folder = None if images is None else Path(images)
    return Model(images={image.name: _model_image(image, folder) for image in registered}, point_ids=point_ids, xyz=xyz)


def posed_reconstruction(cameras: Mapping[str, Camera]) -> Any:
    """Return a pycolmap Reconstruction of upright images with known cameras and poses, for triangulation."""
    pycolmap = import_pycolmap()
    made = pycolmap.Reconstruction()
    for number, (name, camera) in enumerate(cameras.items(), start=1):
        if camera.cam_from_world is None:
            raise DataError(f"The camera of {name} has no pose; add its cam_from_world.")
        kind, params = camera.to_colmap()
        made.add_camera_with_trivial_rig(
            pycolmap.Camera(camera_id=number, model=kind, width=camera.width, height=camera.height, params=params)
        )
        image = pycolmap.Image(name=name, camera_id=number, image_id=number)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(camera.cam_from_world))
    return made


def _model_image(image: Any, folder: Path | None) -> ModelImage:
    """Convert a registered image of pycolmap to an upright image."""
    seen, size = image.get_observation_points2D(), (image.camera.width, image.camera.height)
    points = from_colmap(np.array([point.xy for point in seen], dtype=np.float64).reshape(-1, 2))
    pose = np.array(image.cam_from_world().matrix(), dtype=np.float64)
    rotation = find_rotation("" if folder is None else folder / image.name, size)
    pose = rotation.camera @ pose
    try:
        stored = Camera.from_colmap(image.camera.model_name, size, image.camera.params, source="file")
        camera = replace(rotation.rotate_camera(stored), cam_from_world=pose)
    except DataError:
        camera = None
    return ModelImage(
        size=rotation.rotate_size(size),
        points=rotation.rotate_points(points),
        point_ids=np.array([point.point3D_id for point in seen], dtype=np.int64),
        cam_from_world=pose,
        camera=camera,
    )
