"""The demo: two photographs of one place and two rendered images, matched, checked and drawn."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualrc import draw, geometry
from dualrc.files import make_folder, write_json
from dualrc.image import read
from dualrc.matcher import Matcher, load
from dualrc.matches import Matches
from dualrc.scenes import correspond, make_pair
from dualrc.types import FloatArray, ImageArray

THRESHOLDS_PX = (1, 3, 5, 10)
PHOTOS = Path(__file__).parent / "photos"
PHOTO_NAMES = ("leuven-0.jpg", "leuven-1.jpg")
_SEED = 1
_TOP = 2000

Tell = Callable[[str], None]


def run(out: str | Path, *, device: str | None = None, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Match both pairs; write drawings, matches and summary.json to `out`. `tell` receives each step."""
    out = make_folder(out)
    tell("Loading the network")
    matcher = load(device=device)
    summary = {
        "photographs": _run_photographs(matcher, out, tell),
        **_run_rendered(matcher, out, tell),
        "device": str(matcher.device),
        "info": matcher.info,
    }
    write_json(out / "summary.json", summary)
    return summary


def photo_distance_px(matches: Matches) -> FloatArray:
    """Return how far each match of the two photographs is from the epipolar geometry of their cameras: (n,)."""
    camera0, camera1 = _photo_cameras()
    assert camera0.cam_from_world is not None and camera1.cam_from_world is not None
    pose = geometry.cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
    return geometry.pose_distance_px(pose, camera0, camera1, matches.points0, matches.points1, in_image1=True)


def _photo_cameras() -> tuple[geometry.Camera, geometry.Camera]:
    cameras = geometry.read_cameras_json(PHOTOS / "cameras.json")
    return cameras[PHOTO_NAMES[0]], cameras[PHOTO_NAMES[1]]


def _run_photographs(matcher: Matcher, out: Path, tell: Tell) -> dict[str, Any]:
    """Match two photographs, estimate their relative pose, and compare with the pose in cameras.json."""
    paths = [out / "photo-a.jpg", out / "photo-b.jpg"]
    for name, path in zip(PHOTO_NAMES, paths, strict=True):
        shutil.copyfile(PHOTOS / name, path)
    image0, image1 = (read(path) for path in paths)
    tell("Matching two photographs of a street in Leuven twice; the first run warms up")
    matches, seconds = _timed(matcher, image0, image1)
    tell("Estimating their relative pose")
    camera0, camera1 = _photo_cameras()
    model = geometry.estimate(matches, "essential", camera0=camera0, camera1=camera1)
    matches = replace(matches, estimate=model)
    tell("Drawing their matches")
    draw.save(draw.draw_matches(image0, image1, matches, colors="inliers"), out / "photo-matches.png")
    matches.save(out / "photo-matches.npz")
    return {
        "source": "OpenCV's samples leuvenA.jpg and leuvenB.jpg, Apache-2.0",
        "matches": len(matches),
        # A match near its epipolar line can still be wrong along the line.
        "near_epipolar_line_within_px": _shares(photo_distance_px(matches)),
        "pair_score": matches.pair_score,
        "inliers": int(model.inliers.sum()),
        "seconds": seconds,
    }


def _run_rendered(matcher: Matcher, out: Path, tell: Tell) -> dict[str, Any]:
    """Match two rendered images and compare with the exact ground truth."""
    tell("Rendering two views of a synthetic town")
    pair = make_pair(_SEED, size=(800, 608))
    image0, image1 = (rendering.image.cpu().numpy() for rendering in pair)
    for name, image in (("a.png", image0), ("b.png", image1)):
        draw.save(image, out / name)
    tell("Matching them twice; the first run warms up")
    matches, seconds = _timed(matcher, image0, image1)
    tell("Comparing the matches with the ground truth")
    truth = correspond(*pair, matches.points0)
    points1, visible = truth.points1.cpu().numpy(), truth.visible.cpu().numpy()
    # A point that is occluded in image 1 has no correspondence, so any match of it is wrong.
    error_px = np.where(visible, np.linalg.norm(points1 - matches.points1, axis=1), np.inf)
    tell("Drawing their matches")
    draw.save(draw.draw_matches(image0, image1, matches), out / "matches.png")
    draw.save(draw.draw_dots(image0, image1, matches, error_px <= 3), out / "correct.png")
    warp = matcher.warp(image0, image1)
    draw.save(draw.draw_flow(image0, image1, warp.points1, warp.certainty), out / "warp.png")
    matches.save(out / "matches.npz")
    return {"matches": len(matches), "correct_within_px": _shares(error_px), "seconds": seconds}


def _timed(matcher: Matcher, image0: ImageArray, image1: ImageArray) -> tuple[Matches, float]:
    matcher.match(image0, image1)
    start = time.perf_counter()
    matches = matcher.match(image0, image1, top=_TOP)
    return matches, time.perf_counter() - start


def _shares(error_px: FloatArray) -> dict[int, float]:
    return {px: float((error_px <= px).mean()) if len(error_px) else 0.0 for px in THRESHOLDS_PX}
