"""Run the pipeline of `dualrc evaluate aachen` on multi-view scenes; every camera is left out in turn and localized.

    python benchmarks/aachen.py DATA/strecha --work /tmp/aachen

A scene is a folder with images and cameras.json. All pairs of a scene are matched once, into the work folder, and
merged into keypoints. Then each camera in turn is the query, and all others are the database with known poses. The
database is triangulated, and the matches of the query give its pose. A second run continues the first.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dualrc.collection.keypoints import merge
from dualrc.collection.store import MatchStore
from dualrc.evaluation.aachen import Aachen, AachenSettings, QueryScore
from dualrc.evaluation.aachen_data import AachenData, Query
from dualrc.evaluation.export import Pair, export
from dualrc.evaluation.matchers import MatcherSettings, make_matchers
from dualrc.evaluation.triangulation import PosedMap
from dualrc.geometry import Camera, read_cameras_json
from dualrc.matches import Matches

# In meters and degrees.
RECALL = ((0.05, 0.5), (0.5, 2.0))
TOP = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of scenes")
    parser.add_argument("--work", type=Path, required=True, help="folder for matches and poses")
    parser.add_argument(
        "--size", type=int, help="long side of the network input, in pixels; default: that of the preset"
    )
    parser.add_argument("--scene", help="name of the only scene to run")
    parser.add_argument("--matcher", default="dualrc", help="dualrc, sift-ratio or sift-mutual")
    args = parser.parse_args()
    console = Console(width=150)
    settings = MatcherSettings(size=args.size, top=TOP, sift_features=8000)
    (matcher,) = make_matchers((args.matcher,), settings)
    table = Table(
        "scene", "queries", "localized", "rotation, deg", "position, m", "worst deg, m", "inliers", "points", "recall"
    )
    for scene in sorted(path.parent for path in args.root.glob("*/cameras.json")):
        if args.scene not in (None, scene.name):
            continue
        cameras = dict(sorted(read_cameras_json(scene / "cameras.json").items()))
        config = {"benchmark": "aachen", "scenes": str(args.root.resolve())}
        path = export(pairs_of(scene, cameras), matcher, args.work, config=config, top=TOP, console=console)
        add_row(table, scene.name, localize(scene, cameras, path, args.work, console))
    console.print(table)
    limits = " and ".join(f"{meters:g} m, {degrees:g} deg" for meters, degrees in RECALL)
    console.print(f"Medians; recall within {limits}.")


def pairs_of(scene: Path, cameras: dict[str, Camera]) -> list[Pair]:
    """Return all pairs, with names that are unique across scenes."""
    images, names = scene / "images", list(cameras)
    return [
        Pair(
            name0=f"{scene.name}/{name}",
            name1=f"{scene.name}/{other}",
            path0=images / name,
            path1=images / other,
            group=scene.name,
        )
        for index, name in enumerate(names)
        for other in names[index + 1 :]
    ]


def leave_out(scene: Path, cameras: dict[str, Camera], query: str, work: Path) -> Aachen:
    """Return the benchmark with one camera as the query and the others as the database."""
    database = {f"{scene.name}/{name}": camera for name, camera in cameras.items()}
    asked = f"{scene.name}/{query}"
    camera = database.pop(asked)
    entry = Query(condition="left out", camera=camera, candidates=tuple(database))
    pairs = pairs_of(scene, cameras)
    data = AachenData(version=scene.name, database=database, queries={asked: entry}, pairs=pairs, notes=[])
    benchmark = Aachen(AachenSettings(roots=(scene,), out=work, top=TOP), data=data)
    truth = cameras[query].cam_from_world
    assert truth is not None
    benchmark.truth = {asked: truth}
    return benchmark


def localize(
    scene: Path, cameras: dict[str, Camera], exported: Path, work: Path, console: Console
) -> list[tuple[QueryScore, PosedMap]]:
    """Localize every camera in a map of the others; keypoints do not depend on the camera that is left out."""
    benchmarks = [leave_out(scene, cameras, name, work) for name in cameras]
    found = []
    with (
        tempfile.TemporaryDirectory(dir=work) as folder,
        MatchStore(exported) as store,
        MatchStore(Path(folder, "matches.sqlite"), {}) as undistorted,
    ):

        def get(pair: Pair) -> Matches:
            matches = store.get(pair.name0, pair.name1)
            # The store has every pair.
            assert matches is not None
            return matches

        benchmarks[0].store_undistorted(get, undistorted)
        merged = merge(undistorted)
        for benchmark in benchmarks:
            with tempfile.TemporaryDirectory(dir=work) as own:
                world, (score,), _ = benchmark.localize(merged, Path(own))
            console.print(f"{score.name}: {score.describe()}")
            found.append((score, world))
    return found


def add_row(table: Table, name: str, found: list[tuple[QueryScore, PosedMap]]) -> None:
    queries = [query for query, _ in found]
    meters, degrees = (np.array([getattr(query, key) for query in queries]) for key in ("error_m", "error_deg"))
    recall = [np.mean((meters <= most_m) & (degrees <= most_deg)) for most_m, most_deg in RECALL]
    table.add_row(
        name,
        str(len(queries)),
        str(sum(query.reason is None for query in queries)),
        f"{np.median(degrees):.4f}",
        f"{np.median(meters):.4f}",
        f"{degrees.max():.3f}, {meters.max():.3f}",
        f"{np.median([query.inliers for query in queries]):.0f}",
        f"{np.median([len(world.xyz) for _, world in found]):.0f}",
        " / ".join(f"{share:.1%}" for share in recall),
    )


if __name__ == "__main__":
    main()
