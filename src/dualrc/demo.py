"""The demo: two pairs with exact ground truth, one rendered and one from a photograph, matched, checked and drawn."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dualrc import draw, geometry
from dualrc.files import make_folder, write_json
from dualrc.image import read
from dualrc.matcher import Matcher, load
from dualrc.matches import Matches
from dualrc.pixels import image_center
from dualrc.scenes import correspond, make_pair
from dualrc.stitch import warp_image
from dualrc.types import FloatArray, ImageArray

THRESHOLDS_PX = (1, 3, 5, 10)
_SEED = 1
_TOP = 2000
_PHOTO_SIZE = (512, 608)

Tell = Callable[[str], None]


def run(out: str | Path, *, device: str | None = None, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Match both pairs; write drawings, matches and summary.json to `out`. `tell` receives each step."""
    out = make_folder(out)
    tell("Loading the network")
    matcher = load(device=device)
    tell("Rendering two views of a synthetic town")
    pair = make_pair(_SEED, size=(800, 608))
    image0, image1 = (rendering.image.cpu().numpy() for rendering in pair)
    tell("Matching them twice; the first run warms up")
    matcher.match(image0, image1)
    matches, seconds = _timed(matcher, image0, image1)

    tell("Comparing the matches with the ground truth")
    truth = correspond(*pair, matches.points0)
    points1, visible = truth.points1.cpu().numpy(), truth.visible.cpu().numpy()
    # A point that is occluded in image 1 has no correspondence, so any match of it is wrong.
    error_px = np.where(visible, np.linalg.norm(points1 - matches.points1, axis=1), np.inf)
    tell("Drawing the results")
    _save(out, "", image0, image1, matches, error_px)
    warp = matcher.warp(image0, image1)
    draw.save(draw.draw_flow(image0, image1, warp.points1, warp.certainty), out / "warp.png")
    matches.save(out / "matches.npz")
    summary = {
        **_figures(matches, error_px, seconds),
        "photograph": _run_photograph(matcher, out, tell),
        "device": str(matcher.device),
        "info": matcher.info,
    }
    write_json(out / "summary.json", summary)
    return summary


def _run_photograph(matcher: Matcher, out: Path, tell: Tell) -> dict[str, Any] | None:
    """Match a photograph with a warped copy of itself; None if this installation of matplotlib has no photograph."""
    photo = find_photograph()
    if photo is None:
        tell("Skipping the photograph: this installation of matplotlib comes without its sample data")
        return None
    tell("Matching a photograph with a copy that is turned, tilted, darker and noisy")
    image0 = read(photo)
    image1, H = warped_copy(image0)
    matches, seconds = _timed(matcher, image0, image1)
    error_px = np.linalg.norm(geometry.apply_homography(H, matches.points0) - matches.points1, axis=1)
    _save(out, "photo-", image0, image1, matches, error_px)
    return {"source": "matplotlib's sample image grace_hopper.jpg", **_figures(matches, error_px, seconds)}


def find_photograph() -> Path | None:
    """Return the path of a public-domain photograph that matplotlib installs, or None."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
    return path if path.is_file() else None


def warped_copy(image: ImageArray) -> tuple[ImageArray, FloatArray]:
    """Return a copy of an image under a homography, with other lighting and noise, and the homography (3, 3)."""
    size = (image.shape[1], image.shape[0])
    (x, y), (target_x, target_y) = image_center(size), image_center(_PHOTO_SIZE)
    turn = np.radians(18)
    scale = 0.95 * min(_PHOTO_SIZE[0] / size[0], _PHOTO_SIZE[1] / size[1])
    similarity = np.array(
        [[scale * np.cos(turn), -scale * np.sin(turn), 0], [scale * np.sin(turn), scale * np.cos(turn), 0], [0, 0, 1]]
    )
    tilt = np.array([[1, 0, 0], [0, 1, 0], [5e-4, -3e-4, 1]])
    H = geometry.crop_homography(-target_x, -target_y) @ tilt @ similarity @ geometry.crop_homography(x, y)
    H /= H[2, 2]
    warped = np.asarray(warp_image(image, H, _PHOTO_SIZE)).astype(np.float64)
    color, alpha = warped[..., :3] / 255, warped[..., 3:] / 255
    color = 0.75 * color**1.4 * (1.0, 0.95, 0.85)
    noise = np.random.default_rng(_SEED).normal(0, 4, color.shape)
    # Fill empty parts with gray, because black would look like content.
    result = np.where(alpha > 0, 255 * color + noise, 128)
    return result.round().clip(0, 255).astype(np.uint8), H


def _timed(matcher: Matcher, image0: ImageArray, image1: ImageArray) -> tuple[Matches, float]:
    start = time.perf_counter()
    matches = matcher.match(image0, image1, top=_TOP)
    return matches, time.perf_counter() - start


def _save(
    out: Path, prefix: str, image0: ImageArray, image1: ImageArray, matches: Matches, error_px: FloatArray
) -> None:
    """Write both images and the drawings of their matches."""
    for name, image in (("a.png", image0), ("b.png", image1)):
        draw.save(image, out / f"{prefix}{name}")
    draw.save(draw.draw_matches(image0, image1, matches), out / f"{prefix}matches.png")
    draw.save(draw.draw_dots(image0, image1, matches, error_px <= 3), out / f"{prefix}correct.png")


def _figures(matches: Matches, error_px: FloatArray, seconds: float) -> dict[str, Any]:
    return {
        "matches": len(matches),
        "correct_within_px": {px: float((error_px <= px).mean()) if len(error_px) else 0.0 for px in THRESHOLDS_PX},
        "seconds": seconds,
    }
