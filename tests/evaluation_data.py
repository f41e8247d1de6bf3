"""Small datasets in the layouts of the benchmarks, with exact ground truth, an oracle and a broken matcher."""

import io
import json
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from dualrc import scenes
from dualrc.evaluation import evaluate
from dualrc.geometry import cam1_from_cam0, homography_grid, resize_homography, sample_bilinear

SHARED = Path(__file__).parents[2] / "shared" / "data"
SIZE = (320, 240)

# Both are passed to the command line as FILE.py:function. The oracle reads the truth from files beside the images.
MATCHERS = """
from pathlib import Path

import numpy as np


def grid(size, step=8):
    x, y = np.meshgrid(np.arange(4, size[0], step), np.arange(4, size[1], step))
    return np.stack([x, y], axis=-1).reshape(-1, 2).astype(float)


def homography_oracle(path0, path1):
    H = np.loadtxt(Path(path1).parent / f"H_1_{Path(path1).stem}")
    points0 = grid((320, 240))
    there = np.c_[points0, np.ones(len(points0))] @ H.T
    return points0, there[:, :2] / there[:, 2:], np.ones(len(points0))


def pose_oracle(path0, path1):
    truth0, truth1 = (np.load(Path(path).with_suffix(".truth.npz")) for path in (path0, path1))
    points0 = grid((320, 240), step=6)
    depth = truth0["depth"][points0[:, 1].astype(int), points0[:, 0].astype(int)]
    rays = np.c_[points0, np.ones(len(points0))] @ np.linalg.inv(truth0["K"]).T * depth[:, None]
    pose0, pose1 = truth0["cam_from_world"], truth1["cam_from_world"]
    there = ((rays - pose0[:, 3]) @ pose0[:, :3]) @ pose1[:, :3].T + pose1[:, 3]
    points1 = (there @ truth1["K"].T)[:, :2] / there[:, 2:]
    column, row = np.clip(np.round(points1), 0, (319, 239)).astype(int).T
    seen = (depth > 0) & (np.abs(points1 - np.c_[column, row]).max(axis=1) < 0.6)
    seen &= np.abs(truth1["depth"][row, column] - there[:, 2]) < 0.02 * there[:, 2]
    return points0[seen], points1[seen], np.ones(seen.sum())


def broken(path0, path1):
    rng = np.random.default_rng(len(str(path1)))
    return rng.uniform(0, 240, (300, 2)), rng.uniform(0, 240, (300, 2)), rng.random(300)


def nothing(path0, path1):
    return [], [], []


def same_grid(path0, path1):
    points = grid((320, 240))
    return points, points, np.ones(len(points))


def failing(path0, path1):
    raise RuntimeError("no luck today")


def wrong_shape(path0, path1):
    return np.zeros((3, 2)), np.zeros((4, 2)), np.zeros(3)
"""


def write_matchers(folder: Path) -> Path:
    path = folder / "matchers.py"
    path.write_text(MATCHERS)
    return path


def run_evaluation(benchmark, roots, out, matchers_folder, names, **settings):
    """Return the results and all output; names are "sift...", "dualrc", or functions in the file above."""
    file = matchers_folder / "matchers.py"
    matchers = tuple(name if name.startswith(("sift", "dualrc")) else f"{file}:{name}" for name in names)
    printed = io.StringIO()
    console = Console(width=100, file=printed)
    options = {"roots": tuple(roots), "matchers": matchers, "out": out, **settings}
    content = evaluate(benchmark, screen=console, messages=console, **options)
    return content, " ".join(printed.getvalue().split())


@cache
def _scene() -> scenes.Scene:
    return scenes.make_scene(3, texture_size=128)


@cache
def _views() -> tuple[scenes.Rendering, ...]:
    eyes = ((-3.0, -9.0, 2.0), (-1.0, -9.5, 2.2), (1.0, -9.0, 1.8), (2.5, -8.5, 2.4))
    views = [scenes.look_at(eye, (0.5 * eye[0], 6.0, 2.0), size=SIZE, fov_deg=60) for eye in eyes]
    threads = torch.get_num_threads()
    # More threads do not speed up such small steps, and are much slower on a busy machine.
    torch.set_num_threads(1)
    try:
        return tuple(scenes.render(_scene(), view, supersample=1) for view in views)
    finally:
        torch.set_num_threads(threads)


def _write_image(path: Path, rendering: scenes.Rendering) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rendering.image.numpy()).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))
    truth = {"depth": rendering.depth.numpy(), "K": rendering.view.K, "cam_from_world": rendering.view.cam_from_world}
    np.savez(path.with_suffix(".truth.npz"), **truth)


def _pairs() -> list[tuple[int, int]]:
    return [(0, 1), (1, 2), (0, 2), (2, 3)]


def write_cameras_json(root: Path) -> Path:
    """Write ROOT/scene/cameras.json with ROOT/scene/images."""
    cameras = {}
    for number, rendering in enumerate(_views()):
        _write_image(root / "town" / "images" / f"{number:04d}.png", rendering)
        view = rendering.view
        cameras[f"{number:04d}.png"] = {
            "width": SIZE[0],
            "height": SIZE[1],
            "K": view.K.tolist(),
            "cam_from_world": view.cam_from_world.tolist(),
        }
    (root / "town" / "cameras.json").write_text(json.dumps(cameras))
    return root


def megadepth_index() -> dict:
    """Return the dictionary of a scene: lists with gaps, because no pair uses some of its images."""
    count = len(_views())
    paths, intrinsics, poses = (np.empty(count + 1, dtype=object) for _ in range(3))
    for number, rendering in enumerate(_views()):
        paths[number] = f"Undistorted_SfM/0015/images/{number:04d}.jpg"
        intrinsics[number] = rendering.view.K.astype(np.float32)
        poses[number] = np.vstack([rendering.view.cam_from_world, [0, 0, 0, 1]])
    pairs = [((np.int64(a), np.int64(b)), np.float64(0.4), np.zeros((0, 4), np.float32)) for a, b in _pairs()]
    return {
        "image_paths": paths,
        "depth_paths": paths,
        "intrinsics": intrinsics,
        "poses": poses,
        "pair_infos": pairs,
    }


def write_megadepth(root: Path, *, protocol: int = 4) -> Path:
    """Write ROOT/scene_info/0015_0.3_0.5.npz, a bare pickle, with ROOT/Undistorted_SfM/0015/images."""
    for number, rendering in enumerate(_views()):
        _write_image(root / "Undistorted_SfM" / "0015" / "images" / f"{number:04d}.jpg", rendering)
    folder = root / "megadepth_test_1500_scene_info"
    folder.mkdir()
    (folder / "0015_0.3_0.5.npz").write_bytes(pickle.dumps(megadepth_index(), protocol=protocol))
    (folder / "megadepth_test_1500.txt").write_text("0015_0.3_0.5\n")
    return root


def write_scannet(root: Path, *, rel_pose: bool = True) -> Path:
    """Write ROOT/test.npz, ROOT/intrinsics.npz (for 640 x 480), ROOT/sceneSSSS_TT/color/N.jpg and pose/N.txt."""
    scene, frames = "scene0707_00", (15, 150, 585, 600)
    for frame, rendering in zip(frames, _views(), strict=True):
        _write_image(root / scene / "color" / f"{frame}.jpg", rendering)
        (root / scene / "pose").mkdir(exist_ok=True)
        world_from_cam = np.linalg.inv(np.vstack([rendering.view.cam_from_world, [0, 0, 0, 1]]))
        np.savetxt(root / scene / "pose" / f"{frame}.txt", world_from_cam)
    poses = [rendering.view.cam_from_world for rendering in _views()]
    arrays = {"name": np.array([(707, 0, frames[a], frames[b]) for a, b in _pairs()])}
    if rel_pose:
        arrays["rel_pose"] = np.array([cam1_from_cam0(poses[a], poses[b]).ravel() for a, b in _pairs()])
    np.savez(root / "test.npz", **arrays)
    np.savez(root / "intrinsics.npz", **{scene: resize_homography(SIZE, (640, 480)) @ _views()[0].view.K})
    return root


def write_hpatches(root: Path, names=("i_day", "v_wall"), *, suffix: str = ".png") -> Path:
    """Write sequences of a rendered image and five warped copies of it."""
    image = _views()[0].image.numpy()
    rng = np.random.default_rng(0)
    for name in names:
        folder = root / name
        folder.mkdir(parents=True)
        Image.fromarray(image).save(folder / f"1{suffix}")
        for k in range(2, 7):
            H = np.eye(3)
            if name.startswith("v_"):
                H[:2, :2] += rng.uniform(-0.05, 0.05, (2, 2)) * k / 3
                H[:2, 2] = rng.uniform(-10, 10, 2)
                H[2, :2] = rng.uniform(-1e-4, 1e-4, 2)
            warped = sample_bilinear(image, homography_grid(H, SIZE, SIZE))
            warped = warped * (1 - 0.05 * k) if name.startswith("i_") else warped
            Image.fromarray(warped.round().astype(np.uint8)).save(folder / f"{k}{suffix}")
            np.savetxt(folder / f"H_1_{k}", H)
    return root
