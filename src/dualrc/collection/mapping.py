"""Mapping of a database by COLMAP, incremental or global, and refinement of the principal points."""

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from dualrc.collection.cameras import is_known
from dualrc.collection.progress import Progress
from dualrc.colmap import import_pycolmap, quiet_colmap
from dualrc.geometry import Camera

Mapper = Literal["incremental", "global"]

# Begin of the names of COLMAP's working folders.
_PREFIX = ".mapping-"
# Growth of the model between two global bundle adjustments, and number of refinements in each.
_GROWTH, _REFINEMENTS = 1.4, 2
# Number of tracks per image from which global mapping computes the camera poses.
_TRACKS = 1000
# Minimum number of images of a camera to refine its principal point.
_FEWEST_VIEWS = 5
# Maximum shift of a refined principal point, as a fraction of the long side.
_LARGEST_SHIFT = 0.05


def map_incremental(
    out: Path, images: Path, cameras: Mapping[str, Camera], tell: Progress, threads: int | None = None
) -> list[Any]:
    """Return the models that COLMAP builds from `out`/database.db, adding one image at a time."""
    pycolmap = import_pycolmap()
    options = pycolmap.IncrementalPipelineOptions()
    options.min_model_size = 2
    options.random_seed = 0
    # The value -1 uses all threads.
    options.num_threads = threads or -1
    # A dense matcher gives many times more points than sparse features. A global bundle adjustment after each 10 %
    # of growth, as is COLMAP's default, takes most of the time and does not change the final result.
    options.ba_global_frames_ratio = options.ba_global_points_ratio = _GROWTH
    options.ba_global_max_refinements = _REFINEMENTS
    options.mapper.ba_global_ignore_redundant_points3D = True
    if all(map(is_known, cameras.values())):
        options.ba_refine_focal_length = options.ba_refine_extra_params = False
        options.mapper.abs_pose_refine_focal_length = options.mapper.abs_pose_refine_extra_params = False
    registered = 0

    def count(added: int) -> None:
        nonlocal registered
        registered += added
        tell("Mapping", min(registered, len(cameras)), len(cameras))

    tell("Mapping", 0, len(cameras))
    with _working_folder(out) as folder, quiet_colmap(pycolmap):
        models = pycolmap.incremental_mapping(
            out / "database.db",
            images,
            folder,
            options=options,
            initial_image_pair_callback=lambda: count(2),
            next_image_callback=lambda: count(1),
        )
    return list(models.values())


def map_global(
    out: Path, images: Path, cameras: Mapping[str, Camera], tell: Progress, threads: int | None = None
) -> list[Any]:
    """Return the models that COLMAP builds from `out`/database.db, solving for all images at once."""
    pycolmap = import_pycolmap()
    options = pycolmap.GlobalPipelineOptions()
    options.random_seed = options.mapper.random_seed = 0
    # The value -1 uses all threads.
    options.num_threads = options.mapper.num_threads = threads or -1
    # A dense matcher gives many more tracks than the camera poses need. The others are triangulated at the end.
    options.mapper.track_required_tracks_per_view = _TRACKS
    if all(map(is_known, cameras.values())):
        adjustment = options.mapper.bundle_adjustment
        adjustment.refine_focal_length = adjustment.refine_extra_params = False
    tell("Mapping", 0, 1)
    with _working_folder(out) as folder, quiet_colmap(pycolmap):
        models = pycolmap.global_mapping(out / "database.db", images, folder, options=options)
    tell("Mapping", 1, 1)
    return list(models.values())


@contextmanager
def _working_folder(out: Path) -> Iterator[str]:
    """Create a folder for one run of COLMAP, and remove those that killed runs have left."""
    for left in out.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=_PREFIX) as folder:
        yield folder


MAPPERS = {"incremental": map_incremental, "global": map_global}


def largest(models: list[Any], *, refine: bool, tell: Progress) -> Any:
    """Return the model with most images; `refine` adjusts its principal points if enough images share them."""
    best = max(models, key=lambda model: (model.num_reg_images(), model.num_points3D()))
    if refine:
        pycolmap = import_pycolmap()
        tell("Refining", 0, 1)
        with quiet_colmap(pycolmap):
            best = _refine_principal_points(best, pycolmap)
        tell("Refining", 1, 1)
    return best


def _refine_principal_points(model: Any, pycolmap: Any) -> Any:
    """Return the model with refined principal points, or unchanged if the images do not constrain them."""
    users = Counter(model.images[number].camera_id for number in model.reg_image_ids())
    if min(users.values()) < _FEWEST_VIEWS:
        return model
    refined = copy.deepcopy(model)
    options = pycolmap.BundleAdjustmentOptions()
    options.refine_principal_point, options.print_summary = True, False
    # pycolmap.bundle_adjustment does the same, but resets the log level and logs to the terminal.
    config = pycolmap.BundleAdjustmentConfig()
    for number in refined.reg_image_ids():
        config.add_image(number)
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    pycolmap.create_default_bundle_adjuster(options, config, refined).solve()
    refined.update_point_3d_errors()
    for number in users:
        before, after = model.cameras[number], refined.cameras[number]
        moved = max(
            abs(after.principal_point_x - before.principal_point_x),
            abs(after.principal_point_y - before.principal_point_y),
        )
        # Real principal points are near the image center; a large shift means that the images do not constrain it.
        if not moved < _LARGEST_SHIFT * max(before.width, before.height):
            return model
    return refined
