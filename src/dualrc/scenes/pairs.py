"""Rendered image pairs with exact ground truth."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualrc.errors import ConfigError, DataError
from dualrc.pixels import in_image
from dualrc.scenes.cast import as_like, eye_of, first_hit, look_at, point_windows, rays_through
from dualrc.scenes.render import Light, Rendering, render
from dualrc.scenes.world import SceneKind, make_scene


class ScenePair(NamedTuple):
    """Two images of one scene."""

    rendering0: Rendering
    rendering1: Rendering


class Correspondences(NamedTuple):
    """Positions in image 1 of points in image 0."""

    # (..., 2) float64; NaN where image 0 shows nothing, or the point is behind camera 1
    points1: Tensor
    # (...) Whether the point is inside image 1 and not occluded there.
    visible: Tensor


def correspond(rendering0: Rendering, rendering1: Rendering, points0: Any) -> Correspondences:
    """Locate points (..., 2) of image 0 in image 1, by casting rays in both; points may lie between pixels."""
    scene, view0, view1 = rendering0.scene, rendering0.view, rendering1.view
    points = torch.as_tensor(points0, dtype=torch.float64, device=scene.texels.device)
    if points.shape[-1:] != (2,):
        raise DataError(f"points0 has shape {tuple(points.shape)}; give (x, y) along its last axis.")
    if rendering1.scene is not scene:
        raise DataError("The two images show different scenes; render both from one Scene.")
    places = points.reshape(-1, 2)
    # (3, n)
    rays = rays_through(view0, *places.T)
    depth, _ = first_hit(scene, view0, rays[:, None], point_windows(scene, view0, places))
    world, pose = as_like(eye_of(view0), rays) + rays * depth, as_like(view1.cam_from_world, rays)
    cam1 = pose[:, :3] @ world + pose[:, 3:]
    depth1 = torch.where((cam1[2] > 0) & depth[0].isfinite(), cam1[2], torch.nan)
    points1 = (as_like(view1.K, rays) @ (cam1 / depth1))[:2].T
    rays1 = (world - as_like(eye_of(view1), rays)) / depth1
    first, _ = first_hit(scene, view1, rays1[:, None], point_windows(scene, view1, points1))
    # An occluder is closer by more than the rounding of the point's own depth.
    visible = (first[0] > depth1 * (1 - 1e-9)) & in_image(points1, view1.size)
    return Correspondences(points1.reshape(points.shape), visible.reshape(points.shape[:-1]))


def make_light(rng: np.random.Generator, base: Light, change: float, *, night: bool = False) -> Light:
    """Vary light and camera response: `change` 0 keeps the light, 1 is the largest difference between days."""
    sun = np.array(base.to_sun) + change * rng.uniform((-1.2, -0.6, -0.3), (1.2, 0.6, 0.5))
    strength = np.exp(change * rng.uniform(-0.9, 0.2))
    light = replace(
        base,
        to_sun=tuple(sun.tolist()),
        sun=tuple((np.array(base.sun) * strength).tolist()),
        exposure=base.exposure * float(np.exp(change * rng.uniform(-0.4, 0.4)) * strength**-0.5),
        gamma=float(np.exp(change * rng.uniform(-0.25, 0.25))),
        cast=tuple(np.exp(change * rng.uniform(-0.15, 0.15, 3)).tolist()),
        noise=4.0 * change,
        noise_seed=int(rng.integers(1 << 31)),
    )
    if night:
        light = replace(light, sun=(0.1, 0.13, 0.2), sky=(0.05, 0.07, 0.13), windows=1.0, noise=light.noise + 3)
    return light


def make_pair(
    seed: int,
    *,
    kind: SceneKind = "square",
    size: tuple[int, int] = (640, 480),
    angle_deg: float = 20.0,
    roll_deg: float = 5.0,
    zoom: float = 1.2,
    light_change: float = 0.5,
    night: bool = False,
    min_overlap: float = 0.4,
    supersample: int = 2,
    texture_size: int = 512,
    device: Any = "cpu",
) -> ScenePair:
    """Render two images of a random scene; at least `min_overlap` of image 0 is visible in image 1.

    angle_deg: angle between the cameras, as seen from the scene, varied by a third.
    roll_deg, zoom: largest rotation of a camera about its axis, and largest factor of its focal length.
    light_change: difference of light and exposure of image 1, from 0 to 1.
    """
    if angle_deg < 0 or zoom < 1 or not 0 <= light_change <= 1 or not 0 <= min_overlap < 1:
        raise ConfigError("Give angle_deg >= 0, zoom >= 1, light_change from 0 to 1 and min_overlap below 1.")
    scene = make_scene(seed, kind=kind, texture_size=texture_size, device=device)
    rng = np.random.default_rng([seed, 2])
    light0 = make_light(rng, Light(), 0.3 if light_change else 0.0)
    light1 = make_light(rng, light0, light_change, night=night) if light_change or night else light0
    for _ in range(60):
        middle, apart = rng.uniform(-100, -80), angle_deg * rng.uniform(0.67, 1.33) * rng.choice([-0.5, 0.5])
        views = []
        for azimuth in np.radians([middle - apart, middle + apart]):
            elevation, distance = np.radians(rng.uniform(7, 22)), rng.uniform(10.5, 13.5)
            target = np.array([0, 2.5, 1.8]) + rng.uniform(-0.7, 0.7, 3)
            outward = [np.cos(azimuth) * np.cos(elevation), np.sin(azimuth) * np.cos(elevation), np.sin(elevation)]
            fov_deg = 2 * np.degrees(np.arctan(np.tan(np.radians(32)) / zoom ** rng.uniform(0, 1)))
            roll = roll_deg * rng.uniform(-1, 1)
            eye = target + distance * np.array(outward)
            views.append(look_at(eye, target, size=size, fov_deg=fov_deg, roll_deg=roll))
        # A coarse grid of points without rendering measures the overlap, and that nothing blocks the view.
        blank = torch.empty(0)
        glances = [Rendering(image=blank, depth=blank, view=v, scene=scene, light=light0) for v in views]
        grid = np.stack(np.meshgrid(*(np.linspace(0, n - 1, 16) for n in size)), axis=-1)
        if correspond(glances[0], glances[1], grid).visible.double().mean() >= min_overlap:
            first = render(scene, views[0], light0, supersample=supersample)
            return ScenePair(first, render(scene, views[1], light1, supersample=supersample))
    raise ConfigError(f"No two views overlap by {min_overlap:.0%}; lower min_overlap, angle_deg or zoom.")
