"""Queries and maps of a rendered town, and a matcher that knows every position."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_network
from PIL import ExifTags, Image

from dualrc import scenes
from dualrc.config import MatcherConfig
from dualrc.geometry import Camera, rotation_error_deg
from dualrc.localize import (
    read_map,
)
from dualrc.matcher import Matcher
from dualrc.matches import Matches

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")


SIZE = (128, 96)
NAMES = ("a.png", "b.png", "c.png")
QUERY = "q.png"
EYES = {"a.png": (-3, -11, 3), "b.png": (0, -11.5, 3.5), "c.png": (3, -11, 2.5), QUERY: (1.2, -10, 3)}
# Upright from stored, for EXIF orientation 6.
TURN = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])


@lru_cache(maxsize=1)
def renderings():
    scene = scenes.make_scene(1, texture_size=64)
    views = {name: scenes.look_at(eye, (0, 2, 1.5), size=SIZE, fov_deg=50) for name, eye in EYES.items()}
    return {name: scenes.render(scene, view, supersample=1) for name, view in views.items()}


def camera_of(name):
    view = renderings()[name].view
    return Camera(width=SIZE[0], height=SIZE[1], K=view.K, cam_from_world=view.cam_from_world)


def seen_points(name, count=150):
    """Return pixels (n, 2) of an image and their 3D positions (n, 3) in the world."""
    rendering, random = renderings()[name], np.random.default_rng(len(name))
    pixels = random.integers(0, SIZE, (count, 2))
    depth = rendering.depth.numpy()[pixels[:, 1], pixels[:, 0]]
    pixels, depth = pixels[depth > 0].astype(float), depth[depth > 0].astype(float)
    camera, pose = camera_of(name), rendering.view.cam_from_world
    return pixels, (camera.rays(pixels) * depth[:, None] - pose[:, 3]) @ pose[:, :3]


class Oracle(Matcher):
    """A matcher that knows the scene; its features are those of a real network for the image of that name."""

    def __init__(self, *, few=None, slip_px=0.0):
        super().__init__(tiny_network(), MatcherConfig(), device="cpu")
        self.few, self.slip_px = few, slip_px
        self.extracted, self._names = [], {}

    def features(self, image, **settings):
        made = super().features(image, **settings)
        self.extracted.append(Path(image).name)
        self._names[id(made)] = (Path(image).name, made)
        return made

    def match_points(self, image0, image1, points0, **settings):
        rendering0, rendering1 = (renderings()[self._names[id(image)][0]] for image in (image0, image1))
        truth = scenes.correspond(rendering0, rendering1, points0)
        points1, scores = truth.points1.numpy() + self.slip_px, truth.visible.numpy().astype(float)
        if self.few is not None:
            scores[self.few :] = 0
        points1 = np.where(scores[:, None] > 0, points1, np.nan)
        return Matches(points0=points0, points1=points1, scores=scores, size0=SIZE, size1=SIZE)

    def match_features(self, features0, features1, **settings):
        points0 = np.random.default_rng(0).uniform((0, 0), np.array(SIZE) - 1, (400, 2))
        found = self.match_points(features0, features1, points0)
        return found[found.scores > 0]


def write_images(folder, *, turned=()):
    folder.mkdir(exist_ok=True)
    for name, rendering in renderings().items():
        image, exif = Image.fromarray(rendering.image.numpy()), Image.Exif()
        if name in turned:
            image, exif[ExifTags.Base.Orientation] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(folder / name, exif=exif)
    return folder


def write_model(folder, *, turned=(), half_px=0.5, distortion=0.0, focals=(), bent=()):
    """Write a COLMAP model of all images but the query, with COLMAP's half pixel added here."""
    folder.mkdir(exist_ok=True)
    made, tracks = pycolmap.Reconstruction(), []
    for number, name in enumerate(NAMES, start=1):
        (points, xyz), camera = seen_points(name), camera_of(name)
        K, pose, size = camera.K, camera.cam_from_world, SIZE
        center = K[:2, 2]
        if name in turned:
            points = np.stack([points[:, 1], SIZE[0] - 1 - points[:, 0]], axis=1)
            center = np.array([center[1], SIZE[0] - 1 - center[0]])
            pose, size = TURN.T @ pose, SIZE[::-1]
        focal = K[0, 0] * dict(focals).get(name, 1)
        params = [focal, *(center + half_px), dict(bent).get(name, distortion)]
        made.add_camera_with_trivial_rig(
            pycolmap.Camera(camera_id=number, model="SIMPLE_RADIAL", width=size[0], height=size[1], params=params)
        )
        image = pycolmap.Image(name=name, keypoints=points + half_px, camera_id=number, image_id=number)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(pose))
        tracks += [(place, number, index) for index, place in enumerate(xyz)]
    for place, number, index in tracks:
        made.add_point3D(place, pycolmap.Track([pycolmap.TrackElement(number, index)]))
    made.write(str(folder))
    return folder


def write_rgbd(folder):
    write_images(folder / "images" if folder.mkdir() is None else folder)
    (folder / "depth").mkdir()
    lines = []
    for name in NAMES:
        depth = np.round(renderings()[name].depth.numpy() * 1000).astype(np.uint16)
        Image.fromarray(depth).save(folder / "depth" / name)
        whole = np.vstack([renderings()[name].view.cam_from_world, [0, 0, 0, 1]])
        lines.append(" ".join([name, *map(str, np.linalg.inv(whole).ravel())]))
    (folder / "world_from_cam.txt").write_text("\n".join(lines))
    np.savetxt(folder / "K.txt", renderings()[NAMES[0]].view.K)
    return folder


def errors(found):
    """Return the errors (degrees, meters) of a pose of the query."""
    true, pose = renderings()[QUERY].view.cam_from_world, found.cam_from_world
    centers = [-p[:, :3].T @ p[:, 3] for p in (true, pose)]
    return rotation_error_deg(true[:, :3], pose[:, :3]), float(np.linalg.norm(centers[0] - centers[1]))


def make_world(tmp_path):
    return read_map(write_model(tmp_path / "model"), write_images(tmp_path / "images"))
