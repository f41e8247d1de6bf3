"""A small Aachen Day-Night: a rendered square by day and by night, in the published layouts, with lens distortion.

The distortion is implemented here again, without COLMAP, to test its conventions. `python tests/aachen_data.py FOLDER`
writes v1.1, and truth.txt with the true poses of its queries.
"""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dualrc import scenes
from dualrc.geometry import sample_bilinear

SIZE = (320, 240)
# Additional pixels rendered around an image, because a lens may see more than its pinhole camera.
MARGIN = 40
DAY_QUERIES = ("query/day/nexus4/IMG_20140520_182846.jpg",)
NIGHT_QUERIES = ("query/night/nexus5x/IMG_20161227_172439.jpg", "query/night/nexus5x/IMG_20161227_192344.jpg")
# In v1.1 only.
NEW_NIGHT_QUERY = "query/night/nexus5x_additional_night/IMG_20170702_005301.jpg"
DATABASE = tuple(f"db/{number}.jpg" for number in (1, 14, 76, 538, 1023))
# In v1.1 only.
SEQUENCE = ("sequences/nexus4_sequences/sequence_1/aachen_nexus4_seq1_0086.png",)

# Matchers for the command line, FILE.py:function. The oracle knows the points of the square in every image.
MATCHERS = """
import numpy as np

import aachen_data


def _name(path):
    return path.as_posix().split("images_upright/")[1]


def oracle(path0, path1):
    return aachen_data.true_matches(_name(path0), _name(path1))


def broken(path0, path1):
    rng = np.random.default_rng(len(_name(path0)) + sum(_name(path1).encode()))
    return rng.uniform(0, 240, (400, 2)), rng.uniform(0, 240, (400, 2)), rng.random(400)


def blind_at_night(path0, path1):
    return ([], [], []) if "night" in _name(path0) else oracle(path0, path1)


def nothing(path0, path1):
    return [], [], []
"""


@dataclass(frozen=True)
class Shot:
    """A camera in the square."""

    eye: tuple[float, float, float]
    # Radial distortion.
    k: float
    night: bool = False

    @property
    def view(self) -> scenes.View:
        return scenes.look_at(self.eye, (0.4 * self.eye[0], 6.0, 2.0), size=SIZE, fov_deg=62)

    @property
    def intrinsics(self) -> str:
        """Return the intrinsics in COLMAP's pixel convention."""
        K = self.view.K
        return f"SIMPLE_RADIAL {SIZE[0]} {SIZE[1]} {K[0, 0]} {K[0, 2] + 0.5} {K[1, 2] + 0.5} {self.k}"

    def distort(self, points: np.ndarray) -> np.ndarray:
        """Convert pixels of the pinhole image to the distorted image."""
        rays = self._rays(points)
        return self._pixels(rays * (1 + self.k * (rays**2).sum(axis=-1, keepdims=True)))

    def undistort(self, points: np.ndarray) -> np.ndarray:
        """Convert pixels of the distorted image to the pinhole image, by Newton's method on the radius."""
        rays = self._rays(points)
        wanted = np.linalg.norm(rays, axis=-1, keepdims=True)
        radius = wanted.copy()
        for _ in range(20):
            radius -= (radius * (1 + self.k * radius**2) - wanted) / (1 + 3 * self.k * radius**2)
        return self._pixels(rays * radius / np.maximum(wanted, 1e-12))

    def _rays(self, points: np.ndarray) -> np.ndarray:
        K = self.view.K
        return (np.asarray(points, dtype=float) - K[:2, 2]) / K[0, 0]

    def _pixels(self, rays: np.ndarray) -> np.ndarray:
        K = self.view.K
        return rays * K[0, 0] + K[:2, 2]


SHOTS = {
    DATABASE[0]: Shot((-3.2, -9.0, 2.0), -0.08),
    DATABASE[1]: Shot((-1.8, -9.6, 2.3), -0.06),
    DATABASE[2]: Shot((-0.4, -9.2, 1.8), 0.03),
    DATABASE[3]: Shot((1.2, -9.8, 2.2), 0.05),
    DATABASE[4]: Shot((2.8, -9.1, 1.9), -0.1),
    SEQUENCE[0]: Shot((0.3, -8.6, 2.8), 0.0),
    DAY_QUERIES[0]: Shot((-1.5, -9.0, 1.7), -0.07),
    NIGHT_QUERIES[0]: Shot((-0.2, -9.3, 1.9), 0.06, night=True),
    NIGHT_QUERIES[1]: Shot((2.2, -9.0, 2.1), -0.09, night=True),
    NEW_NIGHT_QUERY: Shot((-2.4, -9.2, 2.0), -0.05, night=True),
}


@cache
def _scene() -> scenes.Scene:
    return scenes.make_scene(3, texture_size=128)


@cache
def image(name: str) -> np.ndarray:
    """Render the distorted image: uint8 (h, w, 3)."""
    shot = SHOTS[name]
    K = shot.view.K.copy()
    K[:2, 2] += MARGIN
    wide = scenes.View(K=K, cam_from_world=shot.view.cam_from_world, size=(SIZE[0] + 2 * MARGIN, SIZE[1] + 2 * MARGIN))
    light = scenes.Light()
    if shot.night:
        light = scenes.make_light(np.random.default_rng(5), light, 0.5, night=True)
    rendered = scenes.render(_scene(), wide, light, supersample=1).image.numpy()
    x, y = np.meshgrid(np.arange(SIZE[0]), np.arange(SIZE[1]))
    seen = sample_bilinear(rendered, shot.undistort(np.stack([x, y], axis=-1)) + MARGIN)
    return seen.round().astype(np.uint8)


@cache
def _sightings(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions (n, 2) of points of the square in an image, and their visibility."""
    blank, light, places, visible = torch.empty(0), scenes.Light(), [], []
    x, y = np.meshgrid(np.arange(4, SIZE[0], 16), np.arange(4, SIZE[1], 16))
    grid = np.stack([x, y], axis=-1).reshape(-1, 2).astype(float)

    def glance(of: str) -> scenes.Rendering:
        return scenes.Rendering(image=blank, depth=blank, view=SHOTS[of].view, scene=_scene(), light=light)

    for source in (DATABASE[0], DATABASE[2], DATABASE[4]):
        found = scenes.correspond(glance(source), glance(name), grid)
        places.append(SHOTS[name].distort(found.points1.numpy()))
        visible.append(found.visible.numpy())
    points = np.concatenate(places)
    # The comparison is false for NaN.
    inside = np.all((points >= 0) & (points <= np.array(SIZE) - 1), axis=1)
    return points, np.concatenate(visible) & inside


def true_matches(name0: str, name1: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points0, points1 and scores of all points that both images show."""
    (points0, seen0), (points1, seen1) = _sightings(name0), _sightings(name1)
    both = seen0 & seen1
    return points0[both], points1[both], np.ones(both.sum())


def write_matchers(folder: Path) -> Path:
    path = folder / "matchers.py"
    path.write_text(MATCHERS)
    return path


def write_truth(path: Path, names) -> Path:
    """Write name qw qx qy qz tx ty tz, world to camera, without folders, as the evaluation service expects it."""
    from scipy.spatial.transform import Rotation

    lines = []
    for name in names:
        pose = SHOTS[name].view.cam_from_world
        x, y, z, w = Rotation.from_matrix(pose[:, :3]).as_quat()
        lines.append(" ".join([Path(name).name, *(f"{value:.12g}" for value in (w, x, y, z, *pose[:, 3]))]))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_v1_0(root: Path) -> Path:
    """Write images, the NVM model with its intrinsics, queries, and the list of pairs with night candidates only."""
    _write_images(root / "images" / "images_upright", (*DATABASE, *DAY_QUERIES, *NIGHT_QUERIES))
    (root / "3D-models").mkdir()
    _write_nvm(root / "3D-models" / "aachen_cvpr2018_db.nvm", DATABASE)
    _write_intrinsics(root / "3D-models" / "database_intrinsics.txt", DATABASE)
    _write_queries(root, DAY_QUERIES, NIGHT_QUERIES)
    _write_pairs(root / "image_pairs_to_match.txt", DATABASE, NIGHT_QUERIES)
    return root


def write_v1_1(root: Path) -> Path:
    """Write COLMAP's model, images in both folders of the archives, and a separate list of day candidates."""
    database, night = (*DATABASE, *SEQUENCE), (*NIGHT_QUERIES, NEW_NIGHT_QUERY)
    _write_images(root / "images" / "images_upright", (*DATABASE, *DAY_QUERIES, *NIGHT_QUERIES))
    _write_images(root / "images_upright", (*SEQUENCE, NEW_NIGHT_QUERY))
    _write_model(root / "3D-models" / "aachen_v_1_1", database)
    _write_queries(root, DAY_QUERIES, night)
    _write_pairs(root / "image_pairs_to_match_v1_1.txt", database, night)
    (root / "pairs-query-day.txt").write_text("".join(f"{DAY_QUERIES[0]} {name}\n" for name in database[:5]))
    return root


def _write_images(folder: Path, names) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image(name)).save(path, **({"quality": 95} if path.suffix == ".jpg" else {}))


def _write_intrinsics(path: Path, names) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name} {SHOTS[name].intrinsics}\n" for name in names))


def _write_queries(root: Path, day, night) -> None:
    _write_intrinsics(root / "queries" / "day_time_queries_with_intrinsics.txt", day)
    _write_intrinsics(root / "queries" / "night_time_queries_with_intrinsics.txt", night)


def _write_pairs(path: Path, database, queries) -> None:
    """Write the database pairs in both orders, as published, then each query with its candidates."""
    lines = [f"{a} {b}" for a in database for b in database if a != b]
    lines += [f"{query} {name}" for query in queries for name in database]
    path.write_text("\n".join(lines) + "\n")


def _write_nvm(path: Path, names) -> None:
    from scipy.spatial.transform import Rotation

    lines = ["NVM_V3 ", "", str(len(names))]
    for name in names:
        view = SHOTS[name].view
        R, t = view.cam_from_world[:, :3], view.cam_from_world[:, 3]
        x, y, z, w = Rotation.from_matrix(R).as_quat()
        values = (view.K[0, 0], w, x, y, z, *(-R.T @ t), SHOTS[name].k)
        lines.append(" ".join([name, *(f"{value:.12g}" for value in values), "0"]))
    lines += ["", "1", "0.5 6 2 128 128 128 2 0 0 1.5 2.5 1 0 3.5 4.5 ", "", "0"]
    path.write_text("\n".join(lines) + "\n")


def _write_model(folder: Path, names) -> None:
    import pycolmap

    made = pycolmap.Reconstruction()
    for number, name in enumerate(names, start=1):
        kind, width, height, *params = SHOTS[name].intrinsics.split()
        camera = pycolmap.Camera(
            camera_id=number, model=kind, width=int(width), height=int(height), params=[float(p) for p in params]
        )
        made.add_camera_with_trivial_rig(camera)
        # Points that the reader must skip.
        points = [pycolmap.Point2D(np.array([4.0 + number, 5.0])) for _ in range(number % 3)]
        image = pycolmap.Image(name=name, camera_id=number, image_id=number, points2D=pycolmap.Point2DList(points))
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(SHOTS[name].view.cam_from_world))
    folder.mkdir(parents=True)
    made.write_binary(folder)


def main(folder: str) -> None:
    root = write_v1_1(Path(folder))
    write_truth(root / "truth.txt", (*DAY_QUERIES, *NIGHT_QUERIES, NEW_NIGHT_QUERY))


if __name__ == "__main__":
    main(*sys.argv[1:])
