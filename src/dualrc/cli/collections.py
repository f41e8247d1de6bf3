"""Commands for folders of images."""

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualrc.cli import common, running
from dualrc.collection import reconstruct as reconstruction
from dualrc.collection.config import CollectionConfig
from dualrc.collection.progress import show_progress
from dualrc.collection.reconstruct import ReconstructConfig
from dualrc.files import check_writable
from dualrc.provenance import provenance

if TYPE_CHECKING:
    from dualrc.localize import Localization, Localizer

logger = logging.getLogger(__name__)
# Exit status of `localize`.
_NOTHING_LOCALIZED = 3

ImagesArgument = Annotated[
    Path, typer.Argument(metavar="IMAGES", help="Folder of images; subfolders are searched too.")
]
# Options by field of CollectionConfig, which has their types and defaults.
MATCHING: dict[str, Any] = {
    "pairs": common.pairs_option(
        help="Pairs to match: exhaustive, sequential, retrieval, a text file with two image names per line, or the "
        "folder of a COLMAP model. auto: exhaustive for small collections, else retrieval."
    ),
    "neighbors": common.pairs_option(
        help="Number of images to match each image with, by retrieval or from a COLMAP model."
    ),
    "overlap": common.pairs_option(help="Number of subsequent images to match each image with, for sequential pairs."),
    "loops": common.pairs_option(
        help="Number of similar images from elsewhere in the sequence to match each image with, for loop closure."
    ),
    "top": common.matches_option(help="Maximum number of matches per pair; those with the highest scores are kept."),
    **common.shared("min_score", "size", "quality", "preset", "weights", "device"),
    "executor": common.workers_option(help="Where to match: local (processes on this machine) or ray (a Ray cluster)."),
    "address": common.workers_option(help="Address of the Ray cluster. Default: start a cluster on this machine."),
    "workers": common.workers_option(
        help="Number of workers. Default: one per GPU, or one per CPU thread, limited by memory."
    ),
    "max_memory": common.workers_option(
        help="Memory of all workers of a machine together, in GiB. Images that need more are scaled down, with a "
        "warning. Default: three quarters of the memory of the machine."
    ),
    "cache": common.workers_option(help="Part of --max-memory that caches features for later pairs, in GiB."),
    "threads": common.ThreadsOption,
}
_TOP = common.matches_option(
    help="Maximum number of matches per candidate; those with the highest scores are kept. Default: all."
)
HlocOption = Annotated[bool, typer.Option("--hloc", help="Also write features.h5, matches.h5 and pairs.txt for hloc.")]
# Options by field of ReconstructConfig.
_RECONSTRUCTION: dict[str, Any] = {
    "cameras": typer.Option(
        help="Camera file, cameras.json or COLMAP's cameras.txt, whose values are kept fixed. Default: start from the "
        "focal length in EXIF, or from a guess per image size, and refine it."
    ),
    "hloc": HlocOption,
    "mapper": typer.Option(
        help="COLMAP's incremental mapping, or its global one (GLOMAP), which solves for all images at once."
    ),
}


def _kept_pairs(options: Mapping[str, Any]) -> str:
    """Describe the pairs that a stopped run leaves in its store."""
    from dualrc.collection.store import MatchStore

    with MatchStore(options["out"] / "matches.sqlite") as store:
        return f"{len(store) - len(store.failures()):,} matched pairs are in {store.path}."


@running.command(kept=_kept_pairs)
def collection(
    images: ImagesArgument,
    out: Annotated[Path, common.out_option(help="Folder for the matches; a second run continues there.")],
    matching: Annotated[CollectionConfig, MATCHING],
    hloc: HlocOption = False,
) -> dict[str, Any]:
    """Match the images of a folder, on one machine or on a Ray cluster.

    Matches are saved to OUT/matches.sqlite, pair by pair.

    Run the same command again to continue after a crash, or to match images that you have added.

    Examples:
      dualrc collection photos --out matched
      dualrc collection frames --out matched --pairs sequential --executor ray --address auto
    """
    from dualrc.collection.matching import match_collection

    result = match_collection(images, out, matching, quiet=common.quiet)
    pairs = "1 pair" if result.matched == 1 else f"{result.matched:,} pairs"
    table = common.table(f"{pairs} matched in {result.seconds:.1f} s")
    table.add_row("images", f"{len(result.names):,}")
    table.add_row("pairs", f"{len(result.pairs):,}, {result.skipped:,} of them matched before")
    if result.broken:
        table.add_row("images left out", f"{len(result.broken):,}: {', '.join(list(result.broken)[:5])}")
    if result.failed:
        table.add_row("pairs that failed", f"{len(result.failed):,}; run the same command again to retry them")
    if result.skipped:
        table.add_row("time of all runs", f"{result.seconds_all_runs:.1f} s")
    common.screen.print(table)
    files = [result.store]
    if hloc:
        from dualrc.collection.export import export_hloc

        with show_progress(common.quiet) as tell:
            files += export_hloc(out, images, result, tell)
    common.written(*files)
    return {
        "store": result.store,
        "images": len(result.names),
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
    out: Annotated[Path, common.out_option(help="Folder for the model; a second run continues there.")],
    matching: Annotated[CollectionConfig, MATCHING],
    config: Annotated[ReconstructConfig, _RECONSTRUCTION],
    undistort: Annotated[
        bool,
        typer.Option(
            "--undistort", help="Also write OUT/dataset for Nerfstudio and gsplat: images, sparse/0, transforms.json."
        ),
    ] = False,
) -> dict[str, Any]:
    """Reconstruct camera poses and 3D points from a folder of images.

    Writes a COLMAP model and database (model, database.db), points.ply, model.png, summary.json and pairs.json to OUT.

    Matches are saved to OUT/matches.sqlite. Run the same command again to continue after a crash, or to add images.

    Examples:
      dualrc reconstruct photos --out town
      dualrc reconstruct photos --out town --cameras cameras.txt --pairs sequential
    """
    summary = reconstruction.reconstruct(images, out, replace(config, collection=matching), quiet=common.quiet)
    table = common.table(f"{summary.registered:,} of {summary.images:,} images registered")
    table.add_row("pairs kept", f"{summary.verification.kept:,} of {summary.verification.pairs:,}")
    for cause, count in summary.verification.dropped.items():
        table.add_row("pairs dropped", f"{count:,}: {cause}")
    if summary.verification.look_alikes:
        copies = (
            f"{summary.verification.look_alikes:,} clear pairs contradict other pairs: the images may show copies of "
            "the same thing. Check the model, or give --pairs."
        )
        table.add_row("warning", copies)
    table.add_row("points", f"{summary.points:,}")
    table.add_row("track length, mean", f"{summary.track_length:.2f} images")
    table.add_row("reprojection error, mean", f"{summary.reprojection_error_px:.2f} px")
    table.add_row("cameras", summary.cameras)
    moved = f"{summary.merging.moved_median_px:.2f} px (median), {summary.merging.moved_95_px:.2f} px (95 %)"
    table.add_row("matches moved to keypoints by", moved)
    if summary.left_out:
        table.add_row("images left out", f"{len(summary.left_out):,}: {', '.join(summary.left_out[:5])}")
    if summary.models > 1:
        split = f"{summary.models} separate models; this is the largest. Match more pairs to connect them."
        table.add_row("warning", split)
    table.add_row("time", ", ".join(f"{step} {seconds:.0f} s" for step, seconds in summary.seconds.items()))
    if summary.matching_seconds_all_runs > summary.seconds["matching"] + 1:
        table.add_row("matching, all runs", f"{summary.matching_seconds_all_runs:.0f} s")
    common.screen.print(table)
    files = f"{out / 'model'}, {out / 'model.png'} (overview), {out / 'pairs.json'} (all pairs)"
    if undistort:
        from dualrc.adapters.radiance import write_dataset

        with common.status("Undistorting images..."):
            write_dataset(out / "model", images, out / "dataset")
        common.written(out / "dataset")
    common.screen.print(f"Written: {files}")
    return {**asdict(summary), "model": out / "model"}


def _kept_poses(options: Mapping[str, Any]) -> str:
    """Describe the poses that a stopped run leaves in its file."""
    import json

    queries = json.loads(options["out"].read_text(encoding="utf-8"))["queries"]
    return f"Results for {len(queries):,} image{'s' * (len(queries) != 1)} are in {options['out']}."


@running.command(kept=_kept_poses, status=lambda result: 0 if result["localized"] else _NOTHING_LOCALIZED)
def localize(
    queries: Annotated[Path, typer.Argument(metavar="QUERIES", help="Folder of images to localize, or one image.")],
    map: Annotated[
        Path, typer.Option("--map", help="Folder of a COLMAP model, or of RGB-D frames (images, depth, K.txt, poses).")
    ],
    *,
    images: Annotated[Path | None, typer.Option(help="Folder with the images of a COLMAP model.")] = None,
    out: Annotated[
        Path,
        common.out_option(help="File for the results, FILE.json; FILE.txt gets poses as name qw qx qy qz tx ty tz."),
    ] = Path("localization.json"),
    cameras: Annotated[
        Path | None,
        typer.Option(
            help="Camera file of the queries: cameras.json or COLMAP's cameras.txt. Default: the camera of the map, if "
            "its images of the same size share one and EXIF does not contradict it; else EXIF; else estimated."
        ),
    ] = None,
    candidates: Annotated[
        int, common.pairs_option("--candidates", "--neighbors", help="Number of map images to match each query with.")
    ] = 10,
    threshold: Annotated[float, typer.Option(help="Inlier threshold of the pose, in pixels of the query.")] = 4.0,
    network: Annotated[common.LoadOptions, {"top": _TOP, **common.SHARED}],
) -> dict[str, Any]:
    """Estimate camera poses of images relative to a map.

    The map is a COLMAP model or a folder of RGB-D frames. Run the same command again to continue after a crash.

    The exit status is 3 if no image could be localized, and 1 after an error.

    Examples:
      dualrc localize queries --map sparse/0 --images images --out poses.json
      dualrc localize query.jpg --map kitchen --candidates 20
    """
    from dualrc import colmap
    from dualrc import localize as localization

    check_writable(out)
    config = localization.LocalizeConfig(candidates=candidates, threshold_px=threshold)
    paths = localization.find_queries(queries)
    known = None
    if cameras is not None:
        by_path = colmap.read_cameras(cameras, [str(path) for path in paths.values()])
        known = {name: by_path[str(path)] for name, path in paths.items()}
    with common.status("Reading the map and loading the network..."):
        world = localization.read_map(map, images)
        matcher = network.load()
    localizer = localization.Localizer(matcher, world, config, descriptors=out.with_name(f"{out.stem}-map.npz"))
    made_with = provenance("poselib", "pycolmap", **matcher.info)
    results = localization.ResultsFile(out, localization.results_config(localizer), info=made_with)
    start = time.monotonic()
    with show_progress(common.quiet) as tell:
        for name, found in localization.localize_all(localizer, paths, results, cameras=known, progress=tell):
            what = f"not localized: {found.reason}"
            if found.reason is None and found.camera is not None:
                what = f"{found.inliers:,} inliers, camera: {found.camera.source}"
            logger.info("%s: %s", name, what)
    all_found = {name: results[name] for name in paths}
    seconds = {"seconds": time.monotonic() - start, "seconds_all_runs": sum(one.seconds for one in all_found.values())}
    _print_localizations(localizer, all_found, **seconds)
    common.written(out, results.poses_path)
    return {
        "results": out,
        "poses": results.poses_path,
        "images": len(all_found),
        "localized": sum(one.cam_from_world is not None for one in all_found.values()),
        "not_localized": {name: one.reason for name, one in all_found.items() if one.reason is not None},
        "unusable_in_map": localizer.broken,
        **seconds,
    }


def _print_localizations(
    localizer: "Localizer", found: "dict[str, Localization]", *, seconds: float, seconds_all_runs: float
) -> None:
    good = [one for one in found.values() if one.cam_from_world is not None]
    table = common.table(f"{len(good)} of {len(found)} images localized")
    if good:
        table.add_row("inliers", f"median {statistics.median(one.inliers for one in good):,.0f}")
        for label, values, unit in (
            ("confidence", [one.confidence for one in good], ""),
            ("position uncertainty", [one.position_deviation for one in good], " units of the map"),
            ("rotation uncertainty", [one.rotation_deviation_deg for one in good], " degrees"),
        ):
            table.add_row(label, f"median {statistics.median(values):.3g}{unit}")
    sources = sorted({one.camera.source for one in good if one.camera is not None})
    table.add_row("cameras", ", ".join(sources) or "none")
    for label, failures in (
        ("not localized", {name: one.reason for name, one in found.items() if one.reason is not None}),
        ("unusable in the map", localizer.broken),
    ):
        for name, reason in failures.items():
            table.add_row(label, f"{name}: {reason}")
    table.add_row("time", f"{seconds:.1f} s in this run; {seconds_all_runs:.1f} s for all images, in all runs")
    common.screen.print(table)
