"""Count false pairs that verification keeps, and true pairs that it loses, on scenes with known cameras.

    python benchmarks/verification.py DATA/strecha --work /tmp/reconstruct

A scene is a folder SCENE with SCENE/images and SCENE/cameras.json, whose cameras have poses. All pairs are matched into
the work folder, which `benchmarks/reconstruct.py` shares, and verified with the cameras of the file and without any. A
verified pair is false if fewer than 30 % of its inliers lie within 3 px of the true epipolar geometry.

A pair is true if at least 20 % of each image is visible in the other. Visibility comes from depth: matches of all
pairs that agree with the true cameras are triangulated. The depth of a cell of 32 px is known where most of its matches
agree within 10 %. A cell is visible in the other image if its point projects to a cell with the same depth, within
15 %.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from reconstruct import find_scenes
from rich.console import Console
from rich.table import Table

from dualrc.collection.cameras import choose_cameras
from dualrc.collection.config import CollectionConfig
from dualrc.collection.matching import match_collection
from dualrc.collection.store import MatchStore, Names
from dualrc.collection.two_view_geometry import load_pair
from dualrc.collection.verification import Verification, verify_pairs
from dualrc.geometry import (
    Camera,
    cam1_from_cam0,
    fundamental_from_pose,
    in_image,
    ray_depths,
    sampson_distance_px,
    transform_points,
)
from dualrc.matches import Matches
from dualrc.types import BoolArray, FloatArray

FALSE_SHARE, FALSE_PX = 0.3, 3.0
TRUE_OVERLAP = 0.2
CELL_PX = 32
# Maximum error and minimum triangulation angle of matches that depths come from.
SURE_PX, SURE_ANGLE_DEG = 1.5, 2.0
# Relative tolerances of depth.
SAME_DEPTH, SAME_PLACE = 0.1, 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of scenes, or one scene")
    parser.add_argument("--work", type=Path, required=True, help="folder for matches")
    parser.add_argument("--verbose", action="store_true", help="print each false pair kept and each true pair lost")
    args = parser.parse_args()
    table = Table("scene", "cameras", "pairs", "kept", "false", "false, %", "true", "lost", "lost, %", "CPU, s")
    sums = np.zeros(5, dtype=int)
    for scene, truth in find_scenes(args.root).items():
        config = CollectionConfig(pairs="exhaustive")
        matched = match_collection(scene / "images", args.work / f"{scene.name}-dualrc", config)
        with MatchStore(matched.store) as store:
            overlaps = overlap_of_pairs(store, matched.pairs, truth)
            for known in (True, False):
                start = time.process_time()
                file = scene / "cameras.json" if known else None
                cameras = choose_cameras(scene / "images", matched.names, file)
                found = verify_pairs(store, matched.pairs, cameras)
                seconds = time.process_time() - start
                false, true, lost = judge(store, found, truth, overlaps)
                counts = (len(found.checks), len(found.kept), len(false), len(true), len(lost))
                sums += counts
                table.add_row(scene.name, "file" if known else "none", *figures(counts), f"{seconds:.0f}")
                for names in (false + lost) if args.verbose else []:
                    print("false" if names in false else "lost", *names, found.checks[names].to_dict())
    table.add_row("all", "", *figures(sums), "")
    Console(width=140).print(table)


def figures(counts: np.typing.ArrayLike) -> tuple[str, ...]:
    pairs, kept, false, true, lost = (int(count) for count in np.asarray(counts))
    shares = f"{100 * false / max(kept, 1):.1f}", f"{100 * lost / max(true, 1):.1f}"
    return str(pairs), str(kept), str(false), shares[0], str(true), str(lost), shares[1]


def judge(
    store: MatchStore, found: Verification, truth: dict[str, Camera], overlaps: dict[Names, float]
) -> tuple[list[Names], list[Names], list[Names]]:
    """Return the numbers of false pairs that were kept, of true pairs, and of true pairs that were lost."""
    false = []
    for check in found.kept:
        matches = load_pair(store, check.names)
        assert matches is not None
        if true_matches(matches, check.names, truth, FALSE_PX)[check.inlier_flags()].mean() < FALSE_SHARE:
            false.append(check.names)
    true = [names for names, overlap in overlaps.items() if overlap >= TRUE_OVERLAP and names in found.checks]
    return false, true, [names for names in true if not found.checks[names].kept]


def true_matches(matches: Matches, names: Names, truth: dict[str, Camera], threshold_px: float) -> BoolArray:
    """Return which matches agree with the true cameras."""
    camera0, camera1 = (truth[name] for name in names)
    F = fundamental_from_pose(cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world), camera0, camera1)
    agree: BoolArray = sampson_distance_px(F, matches.points0, matches.points1) < threshold_px
    return agree


def overlap_of_pairs(store: MatchStore, pairs: tuple[Names, ...], truth: dict[str, Camera]) -> dict[Names, float]:
    """Return the overlap of each pair: the smaller share of either image that is visible in the other."""
    # Rows of x, y, depth.
    samples: dict[str, list[FloatArray]] = {name: [np.zeros((0, 3))] for name in truth}
    for names in pairs:
        matches = store.get(*names)
        assert matches is not None
        matches = matches[true_matches(matches, names, truth, SURE_PX)]
        for name, points, depths in zip(
            names, (matches.points0, matches.points1), depths_of(matches, names, truth), strict=True
        ):
            sure = np.isfinite(depths)
            samples[name].append(np.column_stack([points[sure], depths[sure]]))
    maps = {name: depth_map(np.concatenate(parts), truth[name]) for name, parts in samples.items()}
    return {names: min(visible(maps, truth, *names), visible(maps, truth, *names[::-1])) for names in pairs}


def depths_of(matches: Matches, names: Names, truth: dict[str, Camera]) -> tuple[FloatArray, FloatArray]:
    """Return the depths (n,) of matches in both images; NaN behind a camera or at a small triangulation angle."""
    camera0, camera1 = (truth[name] for name in names)
    pose = cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
    depths0, depths1, sine = ray_depths(pose, camera0.rays(matches.points0), camera1.rays(matches.points1))
    sure = (depths0 > 0) & (depths1 > 0) & (sine > np.sin(np.radians(SURE_ANGLE_DEG)))
    return np.where(sure, depths0, np.nan), np.where(sure, depths1, np.nan)


def depth_map(samples: FloatArray, camera: Camera) -> FloatArray:
    """Return the depth of each cell (rows, columns) of an image; NaN where samples (n, 3) are few or disagree."""
    shape = -(-camera.height // CELL_PX), -(-camera.width // CELL_PX)
    column, row = (np.clip(samples[:, axis] // CELL_PX, 0, shape[1 - axis] - 1).astype(int) for axis in (0, 1))
    cells = row * shape[1] + column
    order = np.argsort(cells, kind="stable")
    result = np.full(shape, np.nan)
    for part in np.split(order, np.flatnonzero(np.diff(cells[order])) + 1):
        if len(part) >= 5:
            middle = np.median(samples[part, 2])
            if np.mean(np.abs(samples[part, 2] / middle - 1) < SAME_DEPTH) > 0.5:
                result.flat[cells[part[0]]] = middle
    return result


def visible(maps: dict[str, FloatArray], truth: dict[str, Camera], name0: str, name1: str) -> float:
    """Return the share of image 0's cells that image 1 shows, among cells with known visibility."""
    camera0, camera1 = truth[name0], truth[name1]
    row, column = np.nonzero(np.isfinite(maps[name0]))
    middle = (np.stack([column, row], axis=1) + 0.5) * CELL_PX - 0.5
    points = camera0.rays(middle) * maps[name0][row, column][:, None]
    points = transform_points(cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world), points)
    places = np.nan_to_num(camera1.project(points), nan=-1e9)
    inside = np.asarray(in_image(places, camera1.size), dtype=bool)
    there = np.full(len(places), np.nan)
    cells = (places[inside] // CELL_PX).astype(int).clip(0)
    there[inside] = maps[name1][cells[:, 1], cells[:, 0]]
    same = inside & (np.abs(there / points[:, 2] - 1) < SAME_PLACE)
    known = ~inside | np.isfinite(there)
    return float(same.sum() / max(known.sum(), 1))


if __name__ == "__main__":
    main()
