"""Reconstruction of a folder of images: matching, shared keypoints, and mapping by pycolmap."""

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualrc.collection.cameras import choose_cameras, describe_cameras, is_known
from dualrc.collection.config import CollectionConfig
from dualrc.collection.export import write_database, write_hloc
from dualrc.collection.figure import draw_reconstruction
from dualrc.collection.keypoints import MergeConfig, Statistics, merge
from dualrc.collection.mapping import MAPPERS, Mapper, largest
from dualrc.collection.matching import LOCK, CollectionResult, match_collection
from dualrc.collection.progress import show_progress
from dualrc.collection.store import MatchStore
from dualrc.collection.verification import VerificationSummary, verify_pairs
from dualrc.colmap import import_pycolmap
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.files import make_folder, one_line, only_run, replacing, replacing_folder, write_json
from dualrc.geometry import Camera
from dualrc.image import find_images
from dualrc.provenance import provenance
from dualrc.toml import to_dict


@dataclass(frozen=True, kw_only=True)
class ReconstructConfig:
    """Settings of a reconstruction."""

    # Settings of matching.
    collection: CollectionConfig = field(default_factory=CollectionConfig)
    # Settings of merging matches into keypoints.
    keypoints: MergeConfig = field(default_factory=MergeConfig)
    # Camera file, cameras.json or COLMAP's cameras.txt; None: focal lengths from EXIF, else unknown.
    cameras: Path | None = None
    # Also write hloc's features.h5, matches.h5 and pairs.txt.
    hloc: bool = False
    # COLMAP's incremental mapping adds one image at a time. Its global mapping (GLOMAP) solves for all of them at once;
    # it needs at least three images that overlap.
    mapper: Mapper = "incremental"

    def __post_init__(self) -> None:
        if self.mapper not in MAPPERS:
            raise ConfigError(f"mapper = {self.mapper!r} is not known; choose {' or '.join(MAPPERS)}.")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a reconstruction."""

    # Number of registered images.
    registered: int
    # Number of images in the folder.
    images: int
    # Number of 3D points.
    points: int
    # Number of keypoints that observe a 3D point.
    observations: int
    # Mean number of images per track.
    track_length: float
    # Mean over all observations.
    reprojection_error_px: float
    # Number of separate models; the largest is kept.
    models: int
    # incremental or global.
    mapper: str
    # Origin of the cameras, in words.
    cameras: str
    # Images that are not registered.
    left_out: tuple[str, ...]
    # Number of pairs that were kept, and of those dropped by each cause.
    verification: VerificationSummary
    # Keypoints that the matches were merged into, and their distance from the matched points.
    merging: Statistics
    # Time of each step in this run.
    seconds: dict[str, float]
    # Matching time of this run and of the runs that it continued.
    matching_seconds_all_runs: float


def reconstruct(
    images: str | Path, out: str | Path, config: ReconstructConfig | None = None, *, quiet: bool = False
) -> Summary:
    """Reconstruct a folder of images.

    Writes model, database.db, points.ply, model.png, summary.json and pairs.json to `out`. Matches are saved to
    `out`/matches.sqlite; a second run continues the first.
    """
    images, out, config = Path(images), Path(out), config or ReconstructConfig()
    # Report a missing package and wrong cameras before the slow steps.
    import_pycolmap()
    cameras = choose_cameras(images, find_images(images), config.cameras)
    with only_run(make_folder(out) / LOCK):
        clock = _Clock()
        matched = match_collection(images, out, config.collection, quiet=quiet)
        clock.lap("matching")
        cameras = {name: camera for name, camera in cameras.items() if name not in matched.broken}
        return _reconstruct(images, out, config, cameras, matched, clock, quiet=quiet)


def _reconstruct(
    images: Path,
    out: Path,
    config: ReconstructConfig,
    cameras: dict[str, Camera],
    matched: CollectionResult,
    clock: "_Clock",
    *,
    quiet: bool,
) -> Summary:
    """Reconstruct from stored matches."""
    with show_progress(quiet) as tell, MatchStore(matched.store) as store:
        # The store may have pairs of images that were deleted since.
        pairs = [names for names in matched.pairs if cameras.keys() >= set(names)]
        verified = verify_pairs(store, store.usable(pairs), cameras, tell)
        write_json(out / "pairs.json", [check.to_dict() for check in verified.checks.values()])
        clock.lap("verification")
        if not verified.kept:
            raise _nothing_to_place(images, out)
        cameras = verified.cameras
        inliers = {check.names: check.inlier_flags() for check in verified.kept}
        merged = merge(store, config.keypoints, tell, pairs=inliers, inliers=inliers)
        merging = merged.statistics()
        clock.lap("keypoints")
        poses = {check.names: check.pose for check in verified.kept if check.pose is not None}
        write_database(out / "database.db", merged, images, cameras, poses, tell)
        clock.lap("database")
        if config.hloc:
            write_hloc(out, merged, images, tell)
            clock.lap("hloc")
        try:
            models = MAPPERS[config.mapper](out, images, cameras, tell, config.collection.threads)
        except RuntimeError as error:
            reason = f"COLMAP stopped ({one_line(error)})"
            raise OutputError(f"{reason}; if the disk is full, free some space or write elsewhere.") from error
        if not models:
            raise _nothing_to_place(images, out)
        model = largest(models, refine=not all(map(is_known, cameras.values())), tell=tell)
        clock.lap("mapping")
        made_with = store.config
    names = {model.images[number].name for number in model.reg_image_ids()}
    summary = Summary(
        registered=len(names),
        images=len(matched.names),
        points=model.num_points3D(),
        observations=model.compute_num_observations(),
        track_length=model.compute_mean_track_length(),
        reprojection_error_px=model.compute_mean_reprojection_error(),
        models=len(models),
        mapper=config.mapper,
        cameras=describe_cameras(cameras),
        left_out=tuple(name for name in matched.names if name not in names),
        verification=verified.summary(),
        merging=merging,
        seconds=clock.seconds,
        matching_seconds_all_runs=round(matched.seconds_all_runs, 2),
    )
    folder = {"image_folder": _relative(images, out)}
    _write(model, out, summary, {**folder, "config": to_dict(config), "matches": made_with})
    return summary


def _relative(images: Path, out: Path) -> str:
    """Return the path of the images relative to `out`, so that both can be moved together."""
    try:
        return Path(os.path.relpath(images.resolve(), out.resolve())).as_posix()
    except ValueError:
        # The folders are on different drives of Windows.
        return images.resolve().as_posix()


def _nothing_to_place(images: Path, out: Path) -> DataError:
    return DataError(
        f"No two images of {images} could be registered; add images that overlap more and are taken from different "
        "places, match more pairs (--pairs exhaustive), or pass the cameras (--cameras). "
        f"{out / 'pairs.json'} has the reason for each pair."
    )


def _write(model: Any, out: Path, summary: Summary, made_with: dict[str, Any]) -> None:
    """Write the model, the points, the drawing and the summary, each atomically."""
    with replacing_folder(out / "model") as folder:
        model.write_binary(folder)
    with replacing(out / "points.ply") as temporary:
        model.export_PLY(temporary)
    title = f"{summary.registered} of {summary.images} images, {summary.points:,} points"
    draw_reconstruction(model, out / "model.png", title)
    write_json(out / "summary.json", {**asdict(summary), **made_with, "versions": provenance("pycolmap", "poselib")})


class _Clock:
    """Measures the time of each step in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def lap(self, step: str) -> None:
        now = time.monotonic()
        self.seconds[step] = round(now - self._start, 2)
        self._start = now
