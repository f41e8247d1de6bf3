"""The demo: matches a rendered pair with exact ground truth, checks it and draws it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dualrc import draw
from dualrc.files import make_folder, write_json
from dualrc.matcher import load
from dualrc.scenes import correspond, make_pair

THRESHOLDS_PX = (1, 3, 5, 10)
_SEED = 1
_TOP = 2000

Tell = Callable[[str], None]


def run(out: str | Path, *, device: str | None = None, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Match a rendered pair; write drawings, matches and summary.json to `out`. `tell` receives each step."""
    out = make_folder(out)
    tell("Loading the network")
    matcher = load(device=device)
    tell("Rendering two views of a synthetic town")
    pair = make_pair(_SEED, size=(800, 608))
    image0, image1 = (rendering.image.cpu().numpy() for rendering in pair)
    tell("Matching them twice; the first run warms up")
    matcher.match(image0, image1)
    start = time.perf_counter()
    matches = matcher.match(image0, image1, top=_TOP)
    seconds = time.perf_counter() - start

    tell("Comparing the matches with the ground truth")
    truth = correspond(*pair, matches.points0)
    points1, visible = truth.points1.cpu().numpy(), truth.visible.cpu().numpy()
    # A point that is occluded in image 1 has no correspondence, so any match of it is wrong.
    error_px = np.where(visible, np.linalg.norm(points1 - matches.points1, axis=1), np.inf)
    tell("Drawing the results")
    for name, image in (("a.png", image0), ("b.png", image1)):
        draw.save(image, out / name)
    draw.save(draw.draw_matches(image0, image1, matches), out / "matches.png")
    draw.save(draw.draw_dots(image0, image1, matches, error_px <= 3), out / "correct.png")
    warp = matcher.warp(image0, image1)
    draw.save(draw.draw_flow(image0, image1, warp.points1, warp.certainty), out / "warp.png")
    matches.save(out / "matches.npz")
    summary = {
        "matches": len(matches),
        "correct_within_px": {px: float((error_px <= px).mean()) if len(error_px) else 0.0 for px in THRESHOLDS_PX},
        "seconds": seconds,
        "device": str(matcher.device),
        "info": matcher.info,
    }
    write_json(out / "summary.json", summary)
    return summary
