"""Localize on data with ground truth: cameras of multi-view scenes, left out in turn, and RGB-D frames.

    python benchmarks/localize.py --strecha DATA/strecha --rgbd DATA/rgbd/hololens --work /tmp/localize

A scene is a folder with images and cameras.json. COLMAP triangulates the map for a camera from SIFT matches between
the other images with their true cameras, so that results do not depend on the quality of a reconstruction. Of RGB-D
frames, every fifth is a query and the others are the map. Results are saved in the work folder, and a second run
continues there.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import dualrc
from dualrc.colmap import import_pycolmap, posed_reconstruction
from dualrc.geometry import Camera, read_cameras_json, read_rgbd, rotation_error_deg
from dualrc.localize import (
    Localization,
    LocalizeConfig,
    Localizer,
    ResultsFile,
    RgbdMap,
    localize_all,
    read_map,
    results_config,
)

# After Pillow: see docs/troubleshooting.md.
pycolmap = import_pycolmap()
THRESHOLDS_M = (0.25, 0.5, 1.0)
WITHIN_DEG = 10.0
# Degrees and meters by query; infinite for failures.
Errors = dict[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strecha", type=Path, help="folder of scenes")
    parser.add_argument("--rgbd", type=Path, help="folder of RGB-D frames")
    parser.add_argument("--work", type=Path, required=True, help="folder for maps and results")
    parser.add_argument("--candidates", type=int, default=10)
    args = parser.parse_args()
    console = Console(width=150)
    matcher, config = dualrc.load(), LocalizeConfig(candidates=args.candidates)
    table = Table(
        "data", "queries", "localized", "rotation, deg", "position, m", "of the extent", "worst deg, m", "recall"
    )
    if args.strecha is not None:
        for scene in sorted(path.parent for path in args.strecha.glob("*/cameras.json")):
            cameras = dict(sorted(read_cameras_json(scene / "cameras.json").items()))
            errors = strecha(scene, cameras, args.work / scene.name, matcher, config, console)
            centers = np.array([center_of(camera.cam_from_world) for camera in cameras.values()])
            extent = max(float(np.linalg.norm(a - b)) for a in centers for b in centers)
            add_row(table, scene.name, errors, extent)
    if args.rgbd is not None:
        errors = rgbd(args.rgbd, args.work, matcher, config, console)
        add_row(table, args.rgbd.name, errors, None)
    console.print(table)
    console.print(f"Medians; recall within {WITHIN_DEG:g} degrees and {', '.join(f'{t:g}' for t in THRESHOLDS_M)} m.")


def strecha(
    scene: Path,
    cameras: dict[str, Camera],
    work: Path,
    matcher: dualrc.Matcher,
    config: LocalizeConfig,
    console: Console,
) -> Errors:
    """Localize every camera in a map of the others."""
    work.mkdir(parents=True, exist_ok=True)
    errors: Errors = {}
    for name, camera in cameras.items():
        world = read_map(make_map(scene / "images", cameras, name, work), scene / "images")
        localizer = Localizer(matcher, world, config)
        results = ResultsFile(work / f"{Path(name).stem}.json", results_config(localizer))
        for _, found in localize_all(localizer, {name: scene / "images" / name}, results, cameras={name: camera}):
            console.print(f"{scene.name} {name}: {found.inliers} inliers, {found.seconds:.0f} s")
        errors[name] = errors_of(results[name], camera)
    return errors


def make_map(images: Path, cameras: dict[str, Camera], without: str, work: Path) -> Path:
    """Make a model of all images but one, with true cameras and points triangulated from SIFT."""
    folder, database = work / f"without-{Path(without).stem}", work / "sift.db"
    if (folder / "points3D.bin").is_file():
        return folder
    made = posed_reconstruction(cameras)
    if not (work / "matched").is_file():
        database.unlink(missing_ok=True)
        # One thread: several threads would number the images in random order, but ids must follow the cameras.
        single = pycolmap.FeatureExtractionOptions(num_threads=1)
        mode = pycolmap.CameraMode.PER_IMAGE
        pycolmap.extract_features(database, images, list(cameras), camera_mode=mode, extraction_options=single)
        with pycolmap.Database.open(database) as opened:
            for camera in made.cameras.values():
                camera.has_prior_focal_length = True
                opened.update_camera(camera)
        pycolmap.match_exhaustive(database)
        (work / "matched").touch()
    made.deregister_frame(made.find_image_with_name(without).frame_id)
    folder.mkdir(exist_ok=True)
    pycolmap.triangulate_points(made, database, images, folder)
    return folder


def rgbd(root: Path, work: Path, matcher: dualrc.Matcher, config: LocalizeConfig, console: Console) -> Errors:
    """Localize every fifth frame in a map of the others."""
    work.mkdir(parents=True, exist_ok=True)
    frames = read_rgbd(root)
    queries = {frame.name: frame for frame in frames[::5]}
    localizer = Localizer(matcher, RgbdMap([frame for frame in frames if frame.name not in queries]), config)
    results = ResultsFile(work / f"{root.name}.json", results_config(localizer))
    cameras = {name: frame.camera for name, frame in queries.items()}
    paths = {name: frame.image for name, frame in queries.items()}
    for name, found in localize_all(localizer, paths, results, cameras=cameras):
        console.print(f"{root.name} {name}: {found.inliers} inliers, {found.seconds:.0f} s")
    return {name: errors_of(results[name], frame.camera) for name, frame in queries.items()}


def errors_of(found: Localization, camera: Camera) -> tuple[float, float]:
    pose, true = found.cam_from_world, camera.cam_from_world
    if pose is None or true is None:
        return float("inf"), float("inf")
    return rotation_error_deg(pose[:, :3], true[:, :3]), float(np.linalg.norm(center_of(pose) - center_of(true)))


def center_of(pose: np.ndarray | None) -> np.ndarray:
    assert pose is not None
    return -pose[:, :3].T @ pose[:, 3]


def add_row(table: Table, name: str, errors: Errors, extent: float | None) -> None:
    degrees, meters = np.array(list(errors.values())).T
    recall = [np.mean((meters <= within) & (degrees <= WITHIN_DEG)) for within in THRESHOLDS_M]
    table.add_row(
        name,
        str(len(errors)),
        str(int(np.isfinite(degrees).sum())),
        f"{np.median(degrees):.4f}",
        f"{np.median(meters):.4f}",
        "" if extent is None else f"{np.median(meters) / extent:.3%}",
        f"{degrees.max():.3f}, {meters.max():.3f}",
        " / ".join(f"{share:.1%}" for share in recall),
    )


if __name__ == "__main__":
    main()
