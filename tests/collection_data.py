"""Collections with known answers: views of 3D points, and stores of their matches."""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from dualrc.collection.store import MatchStore
from dualrc.geometry import Camera, transform_points
from dualrc.matches import Matches
from dualrc.scenes import look_at


@dataclass(frozen=True)
class Scene:
    """3D points, cameras by name, and the projections of the points."""

    xyz: np.ndarray  # (n, 3)
    cameras: dict[str, Camera]

    @property
    def pixels(self) -> dict[str, np.ndarray]:
        return {
            name: camera.project(transform_points(camera.cam_from_world, self.xyz))
            for name, camera in self.cameras.items()
        }


def make_scene(names, count=300, size=(320, 240), seed=0) -> Scene:
    """Return points in a box, and cameras on an arc around it with off-center principal points."""
    rng = np.random.default_rng(seed)
    cameras = {}
    for name, angle in zip(names, np.radians(np.linspace(-25, 25, len(names))), strict=True):
        view = look_at((12 * np.sin(angle), -12 * np.cos(angle), 2), (0, 0, 0), size=size)
        K = view.K + np.array([[0, 0, 3.3], [0, 0, -2.2], [0, 0, 0]])
        cameras[name] = Camera(width=size[0], height=size[1], K=K, cam_from_world=view.cam_from_world)
    return Scene(rng.uniform((-4, -3, -2.5), (4, 3, 2.5), (count, 3)), cameras)


def apart(scene: Scene, distance: float) -> Scene:
    """Keep only points with this minimum distance from all earlier ones, in every image."""
    kept: list[int] = []
    pixels = list(scene.pixels.values())
    for number in range(len(scene.xyz)):
        if all(np.linalg.norm(view[kept] - view[number], axis=1).min(initial=np.inf) > distance for view in pixels):
            kept.append(number)
    return Scene(scene.xyz[kept], scene.cameras)


def make_matches(points0, points1, scores=None, size=(320, 240), **info) -> Matches:
    if scores is None:
        scores = np.linspace(1, 0.5, len(points0))
    return Matches(points0=points0, points1=points1, scores=scores, size0=size, size1=size, info=info)


def fill_store(path, scene: Scene, noise=0.0, seed=0, config=None) -> MatchStore:
    """Fill a store with the matches of all pairs; each pair has its own noise."""
    rng = np.random.default_rng(seed)
    store = MatchStore(path, config or {})
    pixels = scene.pixels
    for name0, name1 in combinations(scene.cameras, 2):
        seen = [pixels[name] + noise * rng.standard_normal((len(scene.xyz), 2)) for name in (name0, name1)]
        store.put(name0, name1, make_matches(*seen, size=scene.cameras[name0].size))
    return store


def run_on_a_full_disk(code: str, folder: Path, limit: int) -> str:
    """Run code that limits the size of files, with a folder and the limit as arguments; return what it prints.

    Nothing may be written to standard error, and the process may not be aborted.
    """
    command = [sys.executable, "-c", code, str(folder), str(limit)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
