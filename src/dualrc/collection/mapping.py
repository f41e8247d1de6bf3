"""COLMAP's mapping of a database: incremental or global, and the principal points of the result."""

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from dualrc.collection.cameras import is_known
from dualrc.collection.progress import Progress
from dualrc.colmap import import_pycolmap, quiet_colmap
from dualrc.errors import ConfigError
from dualrc.geometry import Camera

Mapper = Literal["incremental", "global"]

_GROWTH, _REFINEMENTS = 1.4, 2  # of the model between two adjustments of all of it, and rounds of each
_TRACKS = 1000  # of each image, that global mapping places cameras by
_FEWEST_VIEWS = 5  # pictures of a camera, to refine its principal point
_LARGEST_SHIFT = 0.05  # of a principal point, in long sides


def map_incremental(
    out: Path, images: Path, cameras: Mapping[str, Camera], tell: Progress, threads: int | None = None
) -> list[Any]:
    """The models that COLMAP makes of `out`/database.db, adding one image at a time."""
    pycolmap = import_pycolmap()
    options = pycolmap.IncrementalPipelineOptions()
    options.min_model_size = 2
    options.random_seed = 0
    options.num_threads = threads or -1  # all
    # A dense matcher gives many times the points of sparse features. Adjusting all of them after every tenth picture
    # more, five times over, takes most of the time and changes nothing that the last adjustment does not.
    options.ba_global_frames_ratio = options.ba_global_points_ratio = _GROWTH
    options.ba_global_max_refinements = _REFINEMENTS
    options.mapper.ba_global_ignore_redundant_points3D = True
    if all(map(is_known, cameras.values())):
        options.ba_refine_focal_length = options.ba_refine_extra_params = False
        options.mapper.abs_pose_refine_focal_length = options.mapper.abs_pose_refine_extra_params = False
    registered = 0

    def count(pictures: int) -> None:
        nonlocal registered
        registered += pictures
        tell("Mapping", min(registered, len(cameras)), len(cameras))

    tell("Mapping", 0, len(cameras))
    with tempfile.TemporaryDirectory(dir=out, prefix=".mapping-") as folder, quiet_colmap(pycolmap):
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
    """The models that COLMAP makes of `out`/database.db, solving for all images at once."""
    pycolmap = import_pycolmap()
    if not hasattr(pycolmap, "global_mapping"):
        raise ConfigError(
            f"pycolmap {pycolmap.__version__} has no global mapping; upgrade it (pip install 'pycolmap>=4'), or choose "
            "the mapper incremental."
        )
    options = pycolmap.GlobalPipelineOptions()
    options.random_seed = options.mapper.random_seed = 0
    options.num_threads = options.mapper.num_threads = threads or -1  # all
    # A dense matcher gives many times the tracks that place cameras. The others become points at the end.
    options.mapper.track_required_tracks_per_view = _TRACKS
    if all(map(is_known, cameras.values())):
        adjustment = options.mapper.bundle_adjustment
        adjustment.refine_focal_length = adjustment.refine_extra_params = False
    tell("Mapping", 0, 1)
    with tempfile.TemporaryDirectory(dir=out, prefix=".mapping-") as folder, quiet_colmap(pycolmap):
        models = pycolmap.global_mapping(out / "database.db", images, folder, options=options)
    tell("Mapping", 1, 1)
    return list(models.values())


MAPPERS: dict[str, Callable[[Path, Path, Mapping[str, Camera], Progress, int | None], list[Any]]] = {
    "incremental": map_incremental,
    "global": map_global,
}


def largest(models: list[Any], *, refine: bool, tell: Progress) -> Any:
    """The model with most images; with `refine`, its principal points are adjusted where enough images share them."""
    best = max(models, key=lambda model: (model.num_reg_images(), model.num_points3D()))
    if refine:
        pycolmap = import_pycolmap()
        tell("Refining", 0, 1)
        with quiet_colmap(pycolmap):
            best = _refine_principal_points(best, pycolmap)
        tell("Refining", 1, 1)
    return best


def _refine_principal_points(model: Any, pycolmap: Any) -> Any:
    """The model with principal points that fit it best, or as it was where pictures don't tell enough of them."""
    users = Counter(model.images[number].camera_id for number in model.reg_image_ids())
    if min(users.values()) < _FEWEST_VIEWS:
        return model
    refined = copy.deepcopy(model)
    options = pycolmap.BundleAdjustmentOptions()
    options.refine_principal_point, options.print_summary = True, False
    pycolmap.bundle_adjustment(refined, options)
    refined.update_point_3d_errors()
    for number in users:
        before, after = model.cameras[number], refined.cameras[number]
        moved = max(
            abs(after.principal_point_x - before.principal_point_x),
            abs(after.principal_point_y - before.principal_point_y),
        )
        # A lens sits nearly straight; what ends far from the middle was not to be seen in these pictures.
        if not moved < _LARGEST_SHIFT * max(before.width, before.height):
            return model
    return refined
