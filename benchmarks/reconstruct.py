"""Compare reconstructions of scenes with known cameras with COLMAP's own SIFT pipeline.

    python benchmarks/reconstruct.py DATA/strecha --work /tmp/reconstruct

A scene is a folder SCENE with SCENE/images and SCENE/cameras.json, whose cameras have poses. Each scene is
reconstructed with the cameras of the file and without any. A similarity aligns the model to the ground truth. Its
rotation is fitted to the camera rotations, because the centers of cameras in a row do not determine it. Matches are
saved in the work folder, and a second run continues there: its time and CPU time do not include matching.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dualrc.collection.config import CollectionConfig
from dualrc.collection.reconstruct import ReconstructConfig, reconstruct
from dualrc.colmap import colmap_camera, import_pycolmap, quiet_colmap, read_model
from dualrc.geometry import Camera, read_cameras_json, rotation_error_deg
from dualrc.image import find_images
from dualrc.types import FloatArray

pycolmap = import_pycolmap()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reconstruction compared with the ground truth."""

    registered: int
    points: int
    track_length: float
    reprojection_px: float
    # Median.
    rotation_deg: float
    # Median, relative to the largest distance between cameras.
    position: float
    seconds: float
    # CPU time of this process and its threads.
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of scenes")
    parser.add_argument("--work", type=Path, required=True, help="folder for matches and models")
    parser.add_argument("--top", type=int, default=CollectionConfig().top, help="maximum number of matches per pair")
    args = parser.parse_args()
    table = Table(
        "scene", "cameras", "method", "registered", "points", "track", "error, px", "rotation, deg", "position, %"
    )
    table.add_column("time, s")
    table.add_column("CPU, s")
    for scene, truth in find_scenes(args.root).items():
        for cameras in ("file", "none"):
            for method, run in (("dualrc", run_dualrc), ("SIFT", run_sift)):
                work = args.work / f"{scene.name}-{method}"
                row = run(scene, work, truth, known=cameras == "file", top=args.top)
                figures = (
                    f"{row.registered} of {len(truth)}",
                    f"{row.points:,}",
                    f"{row.track_length:.2f}",
                    f"{row.reprojection_px:.2f}",
                    f"{row.rotation_deg:.3f}",
                    f"{row.position:.3%}".rstrip("%"),
                    f"{row.seconds:.0f}",
                    f"{row.cpu_seconds:.0f}",
                )
                table.add_row(scene.name, cameras, method, *figures)
    Console(width=140).print(table)


def find_scenes(root: Path) -> dict[Path, dict[str, Camera]]:
    """Return the scenes of a folder with their true cameras; exit with a message if there are none."""
    layout = f"{root} must have scenes as SCENE/images/*.jpg with SCENE/cameras.json (or be such a SCENE itself)"
    folders = (
        [root] if (root / "cameras.json").is_file() else sorted(path.parent for path in root.glob("*/cameras.json"))
    )
    if not folders:
        sys.exit(f"No scene was found: {layout}.")
    scenes = {}
    for folder in folders:
        if not (folder / "images").is_dir():
            sys.exit(f"{folder} has no folder named images: {layout}.")
        scenes[folder] = read_cameras_json(folder / "cameras.json")
        images = find_images(folder / "images")
        unlisted = [name for name in images if name not in scenes[folder]]
        unposed = [name for name, camera in scenes[folder].items() if camera.cam_from_world is None]
        if unlisted or unposed:
            sys.exit(f"{folder / 'cameras.json'} has no camera with cam_from_world for {(unlisted + unposed)[0]}.")
    return scenes


def run_dualrc(scene: Path, work: Path, truth: dict[str, Camera], *, known: bool, top: int) -> Row:
    start = time.monotonic(), time.process_time()
    config = ReconstructConfig(
        collection=CollectionConfig(pairs="exhaustive", top=top), cameras=scene / "cameras.json" if known else None
    )
    reconstruct(scene / "images", work, config)
    return score(work / "model", truth, start)


def run_sift(scene: Path, work: Path, truth: dict[str, Camera], *, known: bool, top: int) -> Row:
    """Run COLMAP with its own features, and one camera for all images as in our pipeline; `top` is unused."""
    start = time.monotonic(), time.process_time()
    images, options = scene / "images", pycolmap.IncrementalPipelineOptions()
    options.min_model_size, options.random_seed = 2, 0
    reader = pycolmap.ImageReaderOptions()
    if known:
        name, camera = next(iter(truth.items()))
        made = colmap_camera(camera, images / name, known=True)
        reader.camera_model, reader.camera_params = made.model_name, made.params_to_string()
        options.ba_refine_focal_length = options.ba_refine_extra_params = False
        options.mapper.abs_pose_refine_focal_length = options.mapper.abs_pose_refine_extra_params = False
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, quiet_colmap(pycolmap):
        database = Path(folder, "database.db")
        pycolmap.extract_features(database, images, camera_mode=pycolmap.CameraMode.SINGLE, reader_options=reader)
        pycolmap.match_exhaustive(database)
        models = pycolmap.incremental_mapping(database, images, folder, options=options)
    max(models.values(), key=lambda model: model.num_reg_images()).write_binary(work)
    return score(work, truth, start)


def score(folder: Path, truth: dict[str, Camera], start: tuple[float, float]) -> Row:
    """Score a model after a similarity alignment to the true cameras; `start` is the time and the CPU time."""
    seconds, cpu_seconds = time.monotonic() - start[0], time.process_time() - start[1]
    model: Any = pycolmap.Reconstruction(folder)
    found = {name: image.cam_from_world for name, image in read_model(folder).images.items()}
    wanted = {name: truth[name].cam_from_world for name in found}
    rotation = nearest_rotation(sum(wanted[name][:, :3].T @ found[name][:, :3] for name in found))
    ours = np.array([center_of(found[name]) @ rotation.T for name in found])
    true = np.array([center_of(wanted[name]) for name in found])
    ours, true_moved = ours - ours.mean(0), true - true.mean(0)
    scale = float((ours * true_moved).sum() / (ours**2).sum())
    extent = max(float(np.linalg.norm(a - b)) for a in true for b in true)
    turned = [rotation_error_deg(found[name][:, :3] @ rotation.T, wanted[name][:, :3]) for name in found]
    return Row(
        registered=len(found),
        points=model.num_points3D(),
        track_length=model.compute_mean_track_length(),
        reprojection_px=model.compute_mean_reprojection_error(),
        rotation_deg=float(np.median(turned)),
        position=float(np.median(np.linalg.norm(scale * ours - true_moved, axis=1))) / extent,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
    )


def nearest_rotation(matrix: FloatArray) -> FloatArray:
    u, _, vt = np.linalg.svd(matrix)
    return u @ np.diag([1, 1, np.linalg.det(u @ vt)]) @ vt


def center_of(cam_from_world: FloatArray) -> FloatArray:
    return -cam_from_world[:, :3].T @ cam_from_world[:, 3]


if __name__ == "__main__":
    main()
