"""The path of `dualrc evaluate aachen` on multi-view scenes: every camera left out in turn and localized.

    python benchmarks/aachen.py DATA/strecha --work /tmp/aachen

A scene is a folder with images and cameras.json. All pairs of a scene are matched once, into the work folder.
Then each camera is a query and all others are the database with its known poses: their matches are merged into
keypoints and triangulated, and the query's give its pose. A second run goes on where the first stopped.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dualrc.collection.store import MatchStore
from dualrc.evaluation.aachen import Aachen
from dualrc.evaluation.aachen_layout import AachenData, Lens, Query
from dualrc.evaluation.aachen_scores import Scores
from dualrc.evaluation.export import Pair, export
from dualrc.evaluation.matchers import MatcherSettings, make_matchers
from dualrc.geometry import Camera, read_cameras_json
from dualrc.matches import Matches

RECALL = ((0.05, 0.5), (0.5, 2.0))  # metres and degrees
TOP = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of scenes")
    parser.add_argument("--work", type=Path, required=True, help="folder for matches and poses")
    parser.add_argument("--size", type=int, help="long side that the network sees; without it, the preset's")
    parser.add_argument("--scene", help="only this one")
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
        exported = export(pairs_of(scene, cameras), matcher, args.work, config=config, top=TOP, console=console)
        with MatchStore(exported.store) as store:
            scores = [leave_out(scene, cameras, name, store, args.work, console) for name in cameras]
        add_row(table, scene.name, scores)
    console.print(table)
    limits = " and ".join(f"{metres:g} m, {degrees:g} deg" for metres, degrees in RECALL)
    console.print(f"Medians; recall within {limits}.")


def pairs_of(scene: Path, cameras: dict[str, Camera], query: str | None = None) -> list[Pair]:
    """All pairs, by names that hold in all scenes; those of the query have it as picture 0."""
    pairs = []
    names = list(cameras)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            a, b = (other, name) if other == query else (name, other)
            pairs.append(
                Pair(
                    name0=f"{scene.name}/{a}",
                    name1=f"{scene.name}/{b}",
                    path0=scene / "images" / a,
                    path1=scene / "images" / b,
                    group=scene.name,
                )
            )
    return pairs


def leave_out(
    scene: Path, cameras: dict[str, Camera], query: str, store: MatchStore, work: Path, console: Console
) -> Scores:
    """Localize one camera in a map of the others."""
    lenses = {f"{scene.name}/{name}": Lens.pinhole(camera) for name, camera in cameras.items()}
    asked = f"{scene.name}/{query}"
    database = {name: lens for name, lens in lenses.items() if name != asked}
    candidate = Query(
        condition="left out", path=scene / "images" / query, lens=lenses[asked], candidates=tuple(database)
    )
    data = AachenData(
        version=f"{scene.name}-{Path(query).stem}",
        database=database,
        queries={asked: candidate},
        pairs=pairs_of(scene, cameras, query),
        notes=[],
    )
    truth = cameras[query].cam_from_world
    assert truth is not None

    def get(pair: Pair) -> Matches:
        found, turned = store.get(pair.name0, pair.name1), store.get(pair.name1, pair.name0)
        if found is not None:
            return found
        assert turned is not None  # every pair was exported
        info = {**turned.info, "seen0": turned.info["seen1"], "seen1": turned.info["seen0"]}
        matches = turned.swapped()
        return Matches(
            points0=matches.points0,
            points1=matches.points1,
            scores=matches.scores,
            size0=matches.size0,
            size1=matches.size1,
            info=info,
        )

    scores: Scores = Aachen(data, out=work / "poses", truth={asked: truth}, top=TOP).score(query, get).figures
    console.print(f"{scene.name}: {scores.queries[0]}")
    return scores


def add_row(table: Table, name: str, scores: list[Scores]) -> None:
    queries = [score.queries[0] for score in scores]
    metres, degrees = (np.array([getattr(query, key) for query in queries]) for key in ("error_m", "error_deg"))
    recall = [np.mean((metres <= most_m) & (degrees <= most_deg)) for most_m, most_deg in RECALL]
    table.add_row(
        name,
        str(len(queries)),
        str(sum(query.reason is None for query in queries)),
        f"{np.median(degrees):.4f}",
        f"{np.median(metres):.4f}",
        f"{degrees.max():.3f}, {metres.max():.3f}",
        f"{np.median([query.inliers for query in queries]):.0f}",
        f"{np.median([score.map.points for score in scores]):.0f}",
        " / ".join(f"{share:.1%}" for share in recall),
    )


if __name__ == "__main__":
    main()
