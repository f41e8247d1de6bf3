"""Matching of the images of an existing COLMAP database, with its keypoints or with new ones."""

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from dualrc.collection import pairs as pair_lists
from dualrc.collection.config import CollectionConfig
from dualrc.collection.keypoints import merge
from dualrc.collection.matching import match_collection
from dualrc.collection.progress import Progress, show_progress
from dualrc.collection.store import MatchStore, Names
from dualrc.colmap import (
    colmap_points,
    from_colmap_points,
    import_pycolmap,
    quiet_colmap,
    refuse_mirrored,
    writing_database,
)
from dualrc.config import check_bounds
from dualrc.errors import ConfigError, DataError, ImageError, OutputError
from dualrc.extras import require
from dualrc.files import inside, make_folder, one_line, only_run, replacing
from dualrc.matcher import Matcher, load
from dualrc.matcher.cache import LruCache
from dualrc.matcher.features import ImageFeatures
from dualrc.types import FloatArray, IntArray

# Default minimum score of kept keypoints. A keypoint without a counterpart often has an unrelated keypoint within the
# radius of its match, and a pair of keypoints has no score that COLMAP could rank it by.
_KEYPOINT_SCORE = 0.5


@dataclass(frozen=True, kw_only=True)
class MatchDatabaseConfig:
    """Settings of `match_database`."""

    # Text file with two image names per line; None matches all pairs of images in the database.
    pairs: Path | None = None
    # Match the existing keypoints of the database instead of writing new ones.
    keep_keypoints: bool = False
    # Delete the existing keypoints, descriptors and matches of the database.
    replace_keypoints: bool = False
    # Match pairs again that already have matches; only with keep_keypoints.
    overwrite: bool = False
    # Let COLMAP estimate the two-view geometry of the pairs, which mapping requires.
    verify: bool = True
    # Maximum distance of a match from a keypoint, in pixels of the network input; only with keep_keypoints.
    radius: float = 2.0
    # Minimum score of a match, in both directions with keep_keypoints. None: that of `collection`, but at least 0.5
    # with keep_keypoints if the scores are calibrated.
    min_score: float | None = None
    # Settings of the matching; `pairs` in it is ignored.
    collection: CollectionConfig = field(default_factory=CollectionConfig)

    def __post_init__(self) -> None:
        if self.keep_keypoints and self.replace_keypoints:
            raise ConfigError("Keypoints can't be both kept and replaced; choose one.")
        if not self.radius > 0:
            raise ConfigError(f"radius = {self.radius} must be above 0.")
        check_bounds(self, "min_score", at_least=0)
        if self.min_score is not None:
            object.__setattr__(self, "collection", replace(self.collection, min_score=self.min_score))


@dataclass(frozen=True, kw_only=True)
class MatchDatabaseSummary:
    """Summary of the pairs that were written into a database."""

    images: int
    # Number of requested pairs.
    pairs: int
    # Number of pairs that this run matched.
    matched: int
    # Number of pairs that already had matches.
    skipped: int
    # Pairs with an unusable image, and the reasons.
    failed: dict[Names, str]
    # Number of matches of all requested pairs.
    matches: int = 0
    # Number of pairs in the whole database that have a two-view geometry.
    verified: int = 0


def match_database(
    database: str | Path, images: str | Path, config: MatchDatabaseConfig | None = None, *, quiet: bool = False
) -> MatchDatabaseSummary:
    """Match the images of a COLMAP database and write the matches into it; an interrupted run can be resumed."""
    path, images, config = Path(database), Path(images), config or MatchDatabaseConfig()
    pycolmap = import_pycolmap()
    require("scipy", "colmap", "Keypoints of a database")
    if not images.is_dir():
        raise DataError(f"{images} is not a folder; give the folder that the database's image names are relative to.")
    _check(path)
    with only_run(path.with_name(f".{path.name}.lock")), quiet_colmap(pycolmap), show_progress(quiet) as tell:
        with pycolmap.Database.open(path) as opened:
            numbers = {image.name: image.image_id for image in opened.read_all_images()}
            keypoints = sum(opened.exists_keypoints(number) for number in numbers.values())
        if len(numbers) < 2:
            raise DataError(f"{path} has {len(numbers)} images; import at least two first.")
        listed = config.pairs
        wanted = pair_lists.exhaustive([*numbers]) if listed is None else pair_lists.from_file(numbers, listed)
        for name in {name for names in wanted for name in names}:
            refuse_mirrored(inside(images, name))
        if config.keep_keypoints:
            if keypoints < len(numbers):
                raise DataError(
                    f"{path} has keypoints of {keypoints} of its {len(numbers)} images; extract the others first, or "
                    "leave out --keep-keypoints."
                )
            done = _match_keypoints(path, images, numbers, wanted, config, tell)
        else:
            if keypoints and not config.replace_keypoints:
                raise DataError(
                    f"{path} has keypoints of {keypoints} images; give --keep-keypoints to match these, or "
                    "--replace-keypoints to delete them, their descriptors and all matches."
                )
            done = _match_densely(path, images, numbers, wanted, config, tell, quiet=quiet)
        if config.verify:
            tell("Verifying pairs", 0, 1)
            options = pycolmap.TwoViewGeometryOptions()
            options.ransac.random_seed = 0
            with _changing(path):
                pycolmap.geometric_verification(path, two_view_geometry_options=options)
            tell("Verifying pairs", 1, 1)
        with pycolmap.Database.open(path) as opened:
            ids = [(numbers[name0], numbers[name1]) for name0, name1 in wanted]
            matches = sum(len(opened.read_matches(*pair)) for pair in ids if opened.exists_matches(*pair))
            return replace(done, matches=matches, verified=opened.num_verified_image_pairs())


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Raise OutputError if COLMAP cannot change the database; SQLite restores it when it is opened again."""
    try:
        yield
    except (RuntimeError, sqlite3.Error) as error:
        message = f"Cannot write {path} ({one_line(error)}); free disk space, then run the same command again."
        raise OutputError(message) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database to delete rows: after a deletion, pycolmap needs free disk space to close it, or aborts."""
    return sqlite3.connect(path, timeout=10, isolation_level=None)


def _check(path: Path) -> None:
    """Raise DataError unless this is a COLMAP database that can be written to."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; make it with COLMAP (`colmap feature_extractor`), or check the path.")
    try:
        with sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=10) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        connection.close()
    except sqlite3.Error as error:
        remedies = {"locked": "close the program that uses it", "disk": "check the disk, and whether it is full"}
        remedy = next((remedy for word, remedy in remedies.items() if word in str(error)), "give COLMAP's database.db")
        raise DataError(f"{path} can't be used as a database ({error}); {remedy}.") from error
    if not {"images", "keypoints", "matches"} <= tables:
        raise DataError(f"{path} is a database, but not one of COLMAP's; give COLMAP's database.db.")


def _match_keypoints(
    path: Path,
    images: Path,
    numbers: dict[str, int],
    pairs: Sequence[Names],
    config: MatchDatabaseConfig,
    tell: Progress,
) -> MatchDatabaseSummary:
    """Match the existing keypoints pair by pair; each pair is written when it is finished."""
    pycolmap, settings = import_pycolmap(), config.collection
    options = {name: getattr(settings, name) for name in ("weights", "device", "threads", "size", "max_memory")}
    matcher = load(settings.preset, **options)
    least = settings.min_score
    if config.min_score is None and matcher.calibration is not None:
        least = max(least, _KEYPOINT_SCORE)
    kept: LruCache[str, ImageFeatures] = LruCache(settings.cache * 2**30)
    failed: dict[Names, str] = {}
    matched = skipped = 0
    with _changing(path), closing(_connect(path)) as rows, pycolmap.Database.open(path) as database:
        for count, names in enumerate(pairs, start=1):
            tell("Matching", count - 1, len(pairs))
            ids = [numbers[name] for name in names]
            if database.exists_matches(*ids) and not config.overwrite:
                skipped += 1
            else:
                try:
                    features = [kept.get(name, partial(matcher.features, images / name)) for name in names]
                except ImageError as error:
                    failed[names] = str(error)
                    continue
                places = [
                    from_colmap_points(np.asarray(database.read_keypoints(number))[:, :2], images / name)
                    for number, name in zip(ids, names, strict=True)
                ]
                found = mutual_keypoints(matcher, features, places, config.radius, min_score=least)
                # In this order, a run that is killed here leaves a pair without matches, which the next run matches.
                for table in ("two_view_geometries", "matches"):
                    rows.execute(f"DELETE FROM {table} WHERE pair_id = ?", (pycolmap.image_pair_to_pair_id(*ids),))
                database.write_matches(*ids, found.astype(np.uint32))
                matched += 1
        tell("Matching", len(pairs), len(pairs))
    return MatchDatabaseSummary(images=len(numbers), pairs=len(pairs), matched=matched, skipped=skipped, failed=failed)


def mutual_keypoints(
    matcher: Matcher,
    features: Sequence[ImageFeatures],
    points: Sequence[FloatArray],
    radius: float,
    *,
    min_score: float = 0.0,
) -> IntArray:
    """Return the index pairs (n, 2) of keypoints that are mutual nearest neighbors of their matches.

    `radius` is the maximum distance of a match from a keypoint, in pixels of the network input. `min_score` is the
    minimum score of a match, in both directions.
    """
    from scipy.spatial import cKDTree

    nearest = []
    for here, there in ((0, 1), (1, 0)):
        answer = np.full(len(points[here]), -1)
        found = matcher.match_points(features[here], features[there], points[here], min_score=min_score)
        rows = np.flatnonzero(np.isfinite(found.points1).all(axis=1))
        if len(rows) and len(points[there]):
            scale = features[there].scale
            limit = radius * max(own / seen for own, seen in zip(scale.image_size, scale.input_size, strict=True))
            _, index = cKDTree(points[there]).query(found.points1[rows], distance_upper_bound=limit)
            answer[rows] = np.where(index < len(points[there]), index, -1)
        nearest.append(answer)
    index0 = np.flatnonzero(nearest[0] >= 0)
    index0 = index0[nearest[1][nearest[0][index0]] == index0]
    return np.stack([index0, nearest[0][index0]], axis=1)


def _match_densely(
    path: Path,
    images: Path,
    numbers: dict[str, int],
    pairs: Sequence[Names],
    config: MatchDatabaseConfig,
    tell: Progress,
    *,
    quiet: bool,
) -> MatchDatabaseSummary:
    """Match the images as a collection and write shared keypoints; finished pairs are stored next to the database."""
    absent = sorted({name for names in pairs for name in names if not (images / name).is_file()})
    if absent:
        raise DataError(
            f"{path} lists {absent[0]!r}, which is not in {images}; check the folder, or give a list of other pairs."
        )
    pycolmap = import_pycolmap()
    beside = make_folder(path.with_name(f"{path.name}.dualrc"))
    pair_lists.write_pairs(beside / "pairs.txt", pairs)
    settings = replace(config.collection, pairs=str(beside / "pairs.txt"))
    done = match_collection(images, beside, settings, quiet=quiet)
    failed = {**done.failed, **{names: done.broken[name] for names in pairs for name in names if name in done.broken}}
    with MatchStore(done.store) as store:
        merged = merge(store, progress=tell, pairs=done.pairs)
        with replacing(path.resolve()) as temporary:
            shutil.copyfile(path, temporary)
            with _changing(path), closing(_connect(temporary)) as rows:
                for table in ("two_view_geometries", "matches", "descriptors", "keypoints"):
                    rows.execute(f"DELETE FROM {table}")
            with writing_database(path, temporary), pycolmap.Database.open(temporary) as database:
                for name, number in numbers.items():
                    points = merged.keypoints[name].points if name in merged.keypoints else np.zeros((0, 2))
                    database.write_keypoints(number, colmap_points(points, images / name).astype(np.float32))
                for name0, name1 in merged.pairs:
                    indices = merged.indexed(name0, name1).indices
                    database.write_matches(numbers[name0], numbers[name1], indices.astype(np.uint32))
    return MatchDatabaseSummary(
        images=len(numbers), pairs=len(pairs), matched=done.matched, skipped=done.skipped, failed=failed
    )
