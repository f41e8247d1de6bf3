"""Commands for folders of pictures."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dualrc.cli import common, running
from dualrc.collection.progress import show_progress
from dualrc.files import check_writable
from dualrc.matcher import load
from dualrc.provenance import provenance

if TYPE_CHECKING:
    from dualrc.localize import Localization, Localizer

logger = logging.getLogger(__name__)
_NOTHING_LOCALIZED = 3  # the exit status

ImagesArgument = Annotated[
    Path, typer.Argument(metavar="IMAGES", help="Folder of pictures; subfolders are searched too.")
]
PairsOption = Annotated[
    str,
    typer.Option(
        help="exhaustive, sequential, retrieval, a text file (two names a line), or the folder of a COLMAP model; "
        "auto: exhaustive for few pictures, else retrieval."
    ),
]
NeighborsOption = Annotated[int, typer.Option(help="Retrieval and model: match each picture with so many.")]
OverlapOption = Annotated[int, typer.Option(help="Sequential: match each picture with so many that follow.")]
LoopsOption = Annotated[int, typer.Option(help="Sequential: and with so many that look alike further away.")]
TopOption = Annotated[int, typer.Option(help="Keep the best so many matches of each pair.")]
CacheOption = Annotated[float, typer.Option(help="How many GiB of that are for features kept for later pairs.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Where the Ray cluster is; without it, one is started on this machine.")
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Workers; without it, one per GPU, else one per thread, as far as memory allows.")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        help="GiB for all workers of a machine; without it, three quarters of what it has. Pictures that don't fit are "
        "seen smaller, and a warning says so."
    ),
]
ExecutorOption = Annotated[
    Literal["local", "ray"], typer.Option(help="Match in processes of this machine, or on a Ray cluster.")
]
HlocOption = Annotated[bool, typer.Option("--hloc", help="Also write hloc's features.h5, matches.h5, pairs.txt.")]


def _kept_pairs(options: Mapping[str, Any]) -> str:
    """What a stopped run leaves in its store."""
    from dualrc.collection.store import MatchStore

    with MatchStore(options["out"] / "matches.sqlite") as store:
        return f"{len(store) - len(store.failures()):,} matched pairs are in {store.path}."


@running.command(kept=_kept_pairs)
def collection(
    images: ImagesArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the matches; a second run goes on with it.")],
    pairs: PairsOption = "auto",
    neighbors: NeighborsOption = 20,
    overlap: OverlapOption = 10,
    loops: LoopsOption = 2,
    top: TopOption = 4000,
    min_score: common.MinScoreOption = 0.0,
    size: common.SizeOption = None,
    quality: common.QualityOption = "standard",
    preset: common.PresetOption = "default",
    weights: common.WeightsOption = None,
    device: common.DeviceOption = None,
    executor: ExecutorOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
    max_memory: MemoryOption = None,
    cache: CacheOption = 4.0,
    hloc: HlocOption = False,
    threads: common.ThreadsOption = None,
) -> dict[str, Any]:
    """Match the pictures of a folder with each other, on one machine or many.

    Matches go to OUT/matches.sqlite as they come: run the same command again after a crash, or with more pictures.

    dualrc collection photos --out matched

    dualrc collection frames --out matched --pairs sequential --executor ray --address auto
    """
    from dualrc.collection.config import CollectionConfig
    from dualrc.collection.matching import match_collection

    config = common.settings(CollectionConfig, locals())
    result = match_collection(images, out, config, quiet=common.current.quiet)
    table = common.table(f"{result.matched:,} pairs matched in {result.seconds:.1f} s")
    table.add_row("pictures", f"{len(result.names):,}")
    table.add_row("pairs", f"{len(result.pairs):,}, of which {result.skipped:,} were there")
    if result.broken:
        table.add_row("pictures left out", f"{len(result.broken):,}: {', '.join(list(result.broken)[:5])}")
    if result.failed:
        table.add_row("pairs that failed", f"{len(result.failed):,}; the same command tries them again")
    if result.skipped:
        table.add_row("time of all runs", f"{result.seconds_all_runs:.1f} s")
    common.screen.print(table)
    files = [result.store]
    if hloc:
        from dualrc.collection.export import export_hloc

        with show_progress(common.current.quiet) as tell:
            files += export_hloc(out, images, result, tell)
    common.written(*files)
    return {
        "store": result.store,
        "pictures": len(result.names),
        "pairs": len(result.pairs),
        "matched": result.matched,
        "skipped": result.skipped,
        "left_out": result.broken,
        "failed": result.failed,
        "seconds": result.seconds,
        "seconds_all_runs": result.seconds_all_runs,
    }


@running.command(kept=_kept_pairs, log="colmap.log")
def reconstruct(
    images: ImagesArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model; a second run goes on with it.")],
    cameras: Annotated[
        Path | None,
        typer.Option(
            help="cameras.json or COLMAP's cameras.txt, taken as they are with their lenses; without it, focal lengths "
            "are refined from EXIF, or from a guess for each picture size."
        ),
    ] = None,
    pairs: PairsOption = "auto",
    neighbors: NeighborsOption = 20,
    overlap: OverlapOption = 10,
    loops: LoopsOption = 2,
    top: TopOption = 4000,
    min_score: common.MinScoreOption = 0.0,
    size: common.SizeOption = None,
    quality: common.QualityOption = "standard",
    preset: common.PresetOption = "default",
    weights: common.WeightsOption = None,
    device: common.DeviceOption = None,
    executor: ExecutorOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
    max_memory: MemoryOption = None,
    cache: CacheOption = 4.0,
    hloc: HlocOption = False,
    mapper: Annotated[
        Literal["incremental", "global"],
        typer.Option(
            help="COLMAP's incremental mapping, or its global one (GLOMAP), which solves for all images at once."
        ),
    ] = "incremental",
    undistort: Annotated[
        bool,
        typer.Option(
            "--undistort", help="Also write OUT/dataset for Nerfstudio and gsplat: images, sparse/0, transforms.json."
        ),
    ] = False,
    threads: common.ThreadsOption = None,
) -> dict[str, Any]:
    """Reconstruct cameras and points from a folder of pictures.

    OUT gets model (COLMAP's), points.ply, model.png, summary.json, pairs.json, and COLMAP's database.db. Matches are
    kept in OUT/matches.sqlite: run the same command again after a crash, or with more pictures.

    dualrc reconstruct photos --out town

    dualrc reconstruct photos --out town --cameras cameras.txt --pairs sequential
    """
    from dualrc.collection.config import CollectionConfig
    from dualrc.collection.reconstruct import ReconstructConfig
    from dualrc.collection.reconstruct import reconstruct as run

    matching = common.settings(CollectionConfig, locals())
    config = ReconstructConfig(collection=matching, cameras=cameras, hloc=hloc, mapper=mapper)
    summary = run(images, out, config, quiet=common.current.quiet)
    table = common.table(f"{summary.registered:,} of {summary.pictures:,} pictures placed")
    table.add_row("pairs kept", f"{summary.verification.kept:,} of {summary.verification.pairs:,}")
    for cause, count in summary.verification.dropped.items():
        table.add_row("pairs dropped", f"{count:,}: {cause}")
    table.add_row("points", f"{summary.points:,}")
    table.add_row("track length, mean", f"{summary.track_length:.2f} pictures")
    table.add_row("reprojection error, mean", f"{summary.reprojection_error_px:.2f} px")
    table.add_row("cameras", summary.cameras)
    moved = f"{summary.merging.moved_median_px:.2f} px (median), {summary.merging.moved_95_px:.2f} px (95 %)"
    table.add_row("matches moved to keypoints by", moved)
    if summary.left_out:
        table.add_row("pictures left out", f"{len(summary.left_out):,}: {', '.join(summary.left_out[:5])}")
    if summary.models > 1:
        table.add_row("beware", f"{summary.models} models did not join; this is the largest. Match more pairs.")
    table.add_row("time", ", ".join(f"{step} {seconds:.0f} s" for step, seconds in summary.seconds.items()))
    if summary.matching_seconds_all_runs > summary.seconds["matching"] + 1:
        table.add_row("matching, all runs", f"{summary.matching_seconds_all_runs:.0f} s")
    common.screen.print(table)
    if undistort:
        from dualrc.adapters.radiance import write_dataset

        with common.status("Undistorting images..."):
            write_dataset(out / "model", images, out / "dataset")
        common.written(out / "dataset")
    common.screen.print(f"Written: {out / 'model'}; look at {out / 'model.png'}; {out / 'pairs.json'} has every pair.")
    return {**asdict(summary), "model": out / "model"}


def _kept_poses(options: Mapping[str, Any]) -> str:
    """What a stopped run leaves in its file."""
    import json

    queries = json.loads(options["out"].read_text(encoding="utf-8"))["queries"]
    return f"Results of {len(queries):,} pictures are in {options['out']}."


@running.command(kept=_kept_poses, status=lambda result: 0 if result["localized"] else _NOTHING_LOCALIZED)
def localize(
    queries: Annotated[Path, typer.Argument(metavar="QUERIES", help="Folder of pictures to localize, or one picture.")],
    map: Annotated[
        Path, typer.Option("--map", help="Folder of a COLMAP model, or of RGB-D frames (images, depth, K.txt, poses).")
    ],
    images: Annotated[Path | None, typer.Option(help="Folder of a COLMAP model's pictures.")] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Results: FILE.json, and the poses as name qw qx qy qz tx ty tz: FILE.txt."),
    ] = Path("localization.json"),
    cameras: Annotated[
        Path | None,
        typer.Option(
            help="The queries' cameras.json or cameras.txt, with their lenses; else the map's, where its pictures of "
            "that size share one and EXIF does not tell another; else EXIF's, else estimated."
        ),
    ] = None,
    candidates: Annotated[
        int, typer.Option("--candidates", "--neighbors", help="Pictures of the map to match each query with.")
    ] = 10,
    threshold: Annotated[float, typer.Option(help="Inlier threshold, in pixels of the query.")] = 4.0,
    top: Annotated[int | None, typer.Option(help="Keep the best so many matches of each candidate.")] = None,
    min_score: common.MinScoreOption = 0.0,
    size: common.SizeOption = None,
    quality: common.QualityOption = "standard",
    preset: common.PresetOption = "default",
    weights: common.WeightsOption = None,
    device: common.DeviceOption = None,
    max_memory: common.MaxMemoryOption = None,
) -> dict[str, Any]:
    """Find where pictures were taken in a map; a second run goes on where the first stopped.

    The exit status is 3 where none of the pictures could be localized, 1 after an error.

    dualrc localize queries --map sparse/0 --images images --out poses.json
    """
    from dualrc import colmap
    from dualrc import localize as localization

    check_writable(out)
    config = localization.LocalizeConfig(candidates=candidates, threshold_px=threshold)
    pictures = localization.find_queries(queries)
    known = None
    if cameras is not None:
        by_path = colmap.read_cameras(cameras, [str(path) for path in pictures.values()])
        known = {name: by_path[str(path)] for name, path in pictures.items()}
    with common.status("Reading the map and loading the network..."):
        world = localization.read_map(map, images)
        settings: dict[str, Any] = {"size": size, "top": top, "min_score": min_score, "quality": quality}
        matcher = load(preset, weights=weights, device=device, max_memory=max_memory, **settings)
    localizer = localization.Localizer(matcher, world, config, descriptors=out.with_name(f"{out.stem}-map.npz"))
    made_with = provenance("poselib", "pycolmap", **matcher.info)
    results = localization.ResultsFile(out, localization.results_config(localizer), info=made_with)
    start = time.monotonic()
    with show_progress(common.current.quiet) as tell:
        for name, found in localization.localize_all(localizer, pictures, results, cameras=known, progress=tell):
            what = f"not localized: {found.reason}"
            if found.reason is None and found.camera is not None:
                what = f"{found.inliers:,} inliers, camera: {found.camera.source}"
            logger.info("%s: %s", name, what)
    all_found = {name: results[name] for name in pictures}
    seconds = {"seconds": time.monotonic() - start, "seconds_all_runs": sum(one.seconds for one in all_found.values())}
    _print_localizations(localizer, all_found, **seconds)
    common.written(out, results.poses_path)
    return {
        "results": out,
        "poses": results.poses_path,
        "pictures": len(all_found),
        "localized": sum(one.cam_from_world is not None for one in all_found.values()),
        "not_localized": {name: one.reason for name, one in all_found.items() if one.reason is not None},
        "unusable_in_map": localizer.broken,
        **seconds,
    }


def _print_localizations(
    localizer: "Localizer", found: "dict[str, Localization]", *, seconds: float, seconds_all_runs: float
) -> None:
    good = [one for one in found.values() if one.cam_from_world is not None]
    table = common.table(f"{len(good)} of {len(found)} pictures localized")
    if good:
        for label, values, unit in (
            ("inliers", [float(one.inliers) for one in good], ""),
            ("confidence", [one.confidence for one in good], ""),
            ("deviation of the place", [one.position_deviation for one in good], " units of the map"),
            ("deviation of the rotation", [one.rotation_deviation_deg for one in good], " degrees"),
        ):
            table.add_row(label, f"median {sorted(values)[len(values) // 2]:.3g}{unit}")
    sources = sorted({one.camera.source for one in good if one.camera is not None})
    table.add_row("cameras", ", ".join(sources) or "none")
    for label, failures in (
        ("not localized", {name: one.reason for name, one in found.items() if one.reason is not None}),
        ("unusable in the map", localizer.broken),
    ):
        for name, reason in failures.items():
            table.add_row(label, f"{name}: {reason}")
    table.add_row("time", f"{seconds:.1f} s in this run; {seconds_all_runs:.1f} s for all pictures, in all runs")
    common.screen.print(table)
