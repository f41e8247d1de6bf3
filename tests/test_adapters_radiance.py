"""The folder for Nerfstudio and gsplat, read back as their tools read it."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from adapter_data import images
from collection_data import make_scene
from PIL import Image

from dualrc.adapters.radiance import write_dataset
from dualrc.errors import DataError, OutputError

pycolmap = pytest.importorskip("pycolmap")
NAMES = ("a.png", "sub/b.png", "sub/c.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model with a strong lens, and the folder that is made of it."""
    folder = tmp_path_factory.mktemp("model")
    scene = make_scene(NAMES, count=40, size=(320, 240))
    model = pycolmap.Reconstruction()
    model.add_camera_with_trivial_rig(
        pycolmap.Camera(model="SIMPLE_RADIAL", width=320, height=240, params=[300.0, 161.0, 119.0, -0.15], camera_id=1)
    )
    (folder / "images" / "sub").mkdir(parents=True)
    for number, (name, camera) in enumerate(scene.cameras.items(), start=1):
        image = pycolmap.Image(name=name, camera_id=1, image_id=number)
        pose = pycolmap.Rigid3d(camera.cam_from_world)
        seen = [model.cameras[1].img_from_cam(pose * point) for point in scene.xyz]
        image.points2D = pycolmap.Point2DList([pycolmap.Point2D(place) for place in seen])
        model.add_image_with_trivial_frame(image, pose)
        Image.fromarray(images()[0]).save(folder / "images" / name)
    for index, point in enumerate(scene.xyz):
        track = pycolmap.Track()
        for number in (1, 2, 3):
            track.add_element(number, index)
        model.add_point3D(point, track)
    (folder / "model").mkdir()
    model.write_binary(folder / "model")
    return folder, write_dataset(folder / "model", folder / "images", folder / "dataset"), scene


def test_sparse_0_holds_pinholes_and_the_images_are_there(made):
    _, out, scene = made
    model = pycolmap.Reconstruction(out / "sparse" / "0")
    assert {camera.model.name for camera in model.cameras.values()} == {"PINHOLE"}
    assert model.num_reg_images() == 3 and model.num_points3D() == len(scene.xyz)
    for image in model.images.values():
        camera = model.cameras[image.camera_id]
        with Image.open(out / "images" / image.name) as file:
            assert file.size == (camera.width, camera.height)
    assert (out / "points.ply").read_bytes().startswith(b"ply\n")
    assert {path.name for path in out.iterdir()} == {"images", "sparse", "points.ply", "transforms.json"}


def test_transforms_project_points_to_where_they_are_seen(made):
    _, out, scene = made
    model = pycolmap.Reconstruction(out / "sparse" / "0")
    content = json.loads((out / "transforms.json").read_text())
    by_name = {image.name: image for image in model.images.values()}
    assert [frame["file_path"] for frame in content["frames"]] == [f"images/{name}" for name in NAMES]
    assert (out / content["ply_file_path"]).is_file() and content["camera_model"] == "PINHOLE"
    for frame in content["frames"]:
        cam_from_world = np.linalg.inv(np.array(frame["transform_matrix"]))
        image = by_name[frame["file_path"].removeprefix("images/")]
        seen = [point for point in image.points2D if point.has_point3D()]
        xyz = np.array([model.points3D[point.point3D_id].xyz for point in seen])
        local = xyz @ cam_from_world[:3, :3].T + cam_from_world[:3, 3]
        # OpenGL: the camera looks along -z, and y points up.
        assert (local[:, 2] < 0).all()
        x = frame["cx"] - frame["fl_x"] * local[:, 0] / local[:, 2]
        y = frame["cy"] + frame["fl_y"] * local[:, 1] / local[:, 2]
        assert len(seen) > 30
        assert np.abs(np.stack([x, y], axis=1) - [point.xy for point in seen]).max() < 0.05
    assert scene.cameras.keys() == by_name.keys()


@pytest.mark.skipif(importlib.util.find_spec("nerfstudio") is None, reason="nerfstudio is not installed")
@pytest.mark.filterwarnings("ignore")
def test_nerfstudio_reads_both_forms(made):
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    _, out, scene = made
    same = {"orientation_method": "none", "center_method": "none", "auto_scale_poses": False, "eval_mode": "all"}
    forms = (
        NerfstudioDataParserConfig(data=out, downscale_factor=1, load_3D_points=False, **same),
        ColmapDataParserConfig(
            data=out,
            downscale_factor=1,
            colmap_path=Path("sparse/0"),
            assume_colmap_world_coordinate_convention=False,
            **same,
        ),
    )
    ours, colmaps = (form.setup().get_dataparser_outputs("train") for form in forms)
    names = [path.relative_to(out / "images").as_posix() for path in colmaps.image_filenames]
    order = [names.index(path.relative_to(out / "images").as_posix()) for path in ours.image_filenames]
    assert sorted(names) == sorted(scene.cameras)
    for key in ("camera_to_worlds", "fx", "fy", "cx", "cy"):
        found, wanted = getattr(ours.cameras, key).numpy(), getattr(colmaps.cameras, key).numpy()[order]
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert len(colmaps.metadata["points3D_xyz"]) == len(scene.xyz)


def test_mistakes_are_explained(made, tmp_path):
    folder, out, _ = made
    before = (out / "transforms.json").read_text()
    assert write_dataset(folder / "model", folder / "images", out) == out
    assert (out / "transforms.json").read_text() == before
    with pytest.raises(OutputError, match="is not a dataset of dualrc"):
        write_dataset(folder / "model", folder / "images", folder / "images")
    with pytest.raises(DataError, match=r"images\.bin"):
        write_dataset(tmp_path, folder / "images", tmp_path / "dataset")
