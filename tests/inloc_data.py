"""A small dataset in InLoc's layout and file formats: scanned rooms on two floors, with exact poses."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dualrc import scenes
from dualrc.evaluation.inloc_data import CandidatePose, write_result_list
from dualrc.scenes.world import Builder

SIZE = (320, 240)
FLOORS = ("DUC1", "DUC2")
# Positions of the rooms, far enough apart that they share no points.
_X = {"DUC1": 0.0, "DUC2": 100.0}
YAWS = range(0, 360, 60)
# Field of view for the focal length that InLoc assumes.
_QUERY_FOV = 2 * np.degrees(np.arctan(0.5 / (28 / 36)))
# Scans and queries are in a room of 8 x 6 x 3 m; names of queries include their viewing direction in degrees.
_SCANS = {"DUC1": {"001": (-2.0, -1.0, 1.5), "002": (2.0, 0.5, 1.5)}, "DUC2": {"011": (0.3, -1.0, 1.5)}}
_QUERIES = ((-1.2, -0.8, 1.4, 20), (1.3, 0.2, 1.6, 140), (0.2, -0.6, 1.5, 320))


@cache
def _room(seed: int, x: float) -> scenes.Scene:
    """Build walls, a floor, a ceiling and furniture around (x, 0, 0)."""
    builder = Builder(np.random.default_rng([seed, 0]))
    # Only for its textures, which depend on the seed of the scene.
    builder.square()
    textures = scenes.make_scene(seed, texture_size=128)
    builder.solids, here = [], np.array([x, 0, 0])
    for place, half, sides, level, tile_m in (
        ((0, 0, -0.1), (4.2, 3.2, 0.1), "planks", "planks", 1.5),
        ((0, 0, 3.1), (4.2, 3.2, 0.1), "plaster", "tiles", 1.2),
        ((0, 3.1, 1.5), (4.2, 0.1, 1.5), "posters", "", -1.1),
        ((0, -3.1, 1.5), (4.2, 0.1, 1.5), "bricks", "", 1.5),
        ((4.1, 0, 1.5), (0.1, 3.2, 1.5), "posters", "", -0.9),
        ((-4.1, 0, 1.5), (0.1, 3.2, 1.5), "marble", "", 1.6),
        ((-0.5, 2.2, 0.5), (0.8, 0.4, 0.5), "posters", "tiles", -0.5),
        ((2.8, -2.2, 0.8), (0.4, 0.4, 0.8), "stripes", "marble", 0.8),
        ((-3.2, 1.8, 1.0), (0.3, 0.5, 1.0), "bricks", "tiles", 0.7),
    ):
        builder.add(("", "box", place, half, sides, level, tile_m), here, np.ones(3), 0.0)
    return replace(textures, solids=tuple(builder.solids))


@cache
def _rendered(floor: str, eye: tuple[float, ...], yaw: float, fov_deg: float, change: float) -> scenes.Rendering:
    x, seed = _X[floor], FLOORS.index(floor)
    direction = (np.cos(np.radians(yaw)), np.sin(np.radians(yaw)), -0.05)
    place = np.array([eye[0] + x, *eye[1:]])
    view = scenes.look_at(place, place + direction, size=SIZE, fov_deg=fov_deg)
    light = scenes.make_light(np.random.default_rng(seed), scenes.Light(sky=(1.4, 1.4, 1.4)), change)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return scenes.render(_room(seed, x), view, light, supersample=1)
    finally:
        torch.set_num_threads(threads)


def write_inloc(root: Path, *, scans: bool = True) -> Path:
    """Write query/iphone7, database/cutouts, alignments and scans, the candidates, and the reference poses."""
    from scipy.io import savemat

    queries, listed, references = root / "query" / "iphone7", {}, {}
    queries.mkdir(parents=True)
    cutouts = {}
    for floor in FLOORS:
        for scan, eye in _SCANS[floor].items():
            cutouts |= _write_scan(root / "database", floor, scan, eye, whole=scans)
    for number, floor in enumerate(FLOORS):
        entries = []
        for index, (*eye, yaw) in enumerate(_QUERIES):
            name = f"IMG_{731 + 10 * number + index:04d}.JPG"
            rendering = _rendered(floor, tuple(eye), yaw, _QUERY_FOV, 0.4)
            _write_image(queries / name, rendering)
            entries.append((name, f"{floor}/DUC_scan.ptx", rendering.view.cam_from_world, "Good", 1.0))
            nearest = _nearest(rendering, floor, cutouts)
            listed[name] = [CandidatePose(candidate=candidate) for candidate in nearest]
        columns = [(key, object) for key in ("queryname", "reldbname", "P", "label", "med_reproj_err")]
        references[f"{floor}_RefList"] = np.array(entries, dtype=columns)[None]
    savemat(root / "DUC_refposes_all.mat", references)
    write_result_list(root / "densePE_top100_shortlist_cvpr18.mat", listed)
    return root


def _write_scan(database: Path, floor: str, scan: str, eye: tuple[float, ...], *, whole: bool) -> dict:
    """Write the cutouts of a scan with their points, its alignment, and all its points; return the views by name."""
    from scipy.io import savemat

    folder, views, columns = database / "cutouts" / floor / scan, {}, []
    folder.mkdir(parents=True)
    floor_from_scan = _alignment(floor, scan, eye)
    for yaw in YAWS:
        rendering = _rendered(floor, eye, yaw, 75.0, 0.0)
        name = f"DUC_cutout_{scan}_{yaw}_0.jpg"
        _write_image(folder / name, rendering)
        xyz = _local(rendering, floor_from_scan)
        # Real scans have missing points.
        xyz[:6] = np.nan
        savemat(folder / f"{name}.mat", {"XYZcut": xyz, "RGBcut": rendering.image.numpy()})
        views[f"{floor}/{scan}/{name}"] = rendering.view
        columns.append(np.c_[xyz.reshape(-1, 3), rendering.image.numpy().reshape(-1, 3)])
    transformations = database / "alignments" / floor / "transformations"
    transformations.mkdir(parents=True, exist_ok=True)
    rows = "\n".join(" ".join(f"{value:.12g}" for value in row) for row in floor_from_scan)
    identity = "\n".join(" ".join(row) for row in np.eye(4).astype(str))
    (transformations / f"DUC_trans_{scan}.txt").write_text(f"Before\n{identity}\n\nAfter\n{rows}\n")
    if whole:
        (database / "scans" / floor).mkdir(parents=True, exist_ok=True)
        points = np.concatenate(columns)
        points = points[np.isfinite(points).all(axis=1)]
        cells = np.empty((1, 7), dtype=object)
        cells[0] = [column[:, None] for column in (*points[:, :3].T, np.zeros(len(points)), *points[:, 3:].T)]
        savemat(database / "scans" / floor / f"DUC_scan_{scan}.ptx.mat", {"A": cells})
    return views


def _alignment(floor: str, scan: str, eye: tuple[float, ...]) -> np.ndarray:
    """Return floor_from_scan (4, 4) with a random rotation; the scanner is at its own origin."""
    rng = np.random.default_rng(int(scan) + 10 * FLOORS.index(floor))
    R = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    R *= np.linalg.det(R)
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = R, (eye[0] + _X[floor], *eye[1:])
    return matrix


def _local(rendering: scenes.Rendering, floor_from_scan: np.ndarray) -> np.ndarray:
    """Return the 3D points of every pixel (h, w, 3) in the scanner's frame."""
    view, depth = rendering.view, rendering.depth.numpy().astype(np.float64)
    x, y = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    rays = np.stack([x, y, np.ones_like(x)], axis=-1) @ np.linalg.inv(view.K).T
    pose = view.cam_from_world
    world = (rays * depth[..., None] - pose[:, 3]) @ pose[:, :3]
    return ((world - floor_from_scan[:3, 3]) @ floor_from_scan[:3, :3]).astype(np.float32)


def _write_image(path: Path, rendering: scenes.Rendering) -> None:
    """Write the image, and the oracle's data beside it."""
    Image.fromarray(rendering.image.numpy()).save(path, "JPEG", quality=95)
    truth = {"depth": rendering.depth.numpy(), "K": rendering.view.K, "cam_from_world": rendering.view.cam_from_world}
    np.savez(path.with_suffix(".truth.npz"), **truth)


def _nearest(rendering: scenes.Rendering, floor: str, cutouts: dict) -> tuple[str, ...]:
    """Return candidates: those of the same floor with a similar direction, and some of the other floor."""
    forward = rendering.view.cam_from_world[2, :3]
    alike = {name: view.cam_from_world[2, :3] @ forward for name, view in cutouts.items()}
    own = sorted((name for name in alike if name.startswith(floor)), key=lambda name: -alike[name])
    others = sorted(name for name in alike if not name.startswith(floor))
    return (*others[:1], *own[:5], *others[1:2])
