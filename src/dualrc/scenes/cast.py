"""Cameras, and intersections of their rays with a scene."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualrc.errors import ConfigError
from dualrc.pixels import image_center
from dualrc.scenes.world import ROUND, Array, Scene, Solid


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """A pinhole camera with a pose; the center of the first pixel is (0, 0)."""

    # (3, 3)
    K: Array
    # (3, 4)
    cam_from_world: Array
    # (width, height)
    size: tuple[int, int]


def look_at(eye: Any, target: Any, *, size: tuple[int, int], fov_deg: float = 55.0, roll_deg: float = 0.0) -> View:
    """Create a camera at `eye` with `target` in the center; `fov_deg` is the field of view of the longer side."""
    eye, forward = np.asarray(eye, dtype=float), np.asarray(target, dtype=float) - np.asarray(eye, dtype=float)
    if min(size) < 1 or not 0 < fov_deg < 180 or not np.linalg.norm(forward) > 0:
        raise ConfigError("Give a size of at least 1 x 1, 0 < fov_deg < 180, and a target different from the eye.")
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, [0, 1, 0] if abs(forward[2]) > 0.999 else [0, 0, 1])
    right /= np.linalg.norm(right)
    cos, sin = np.cos(np.radians(roll_deg)), np.sin(np.radians(roll_deg))
    rotation = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]) @ [right, np.cross(forward, right), forward]
    focal = 0.5 * max(size) / np.tan(np.radians(fov_deg) / 2)
    cx, cy = image_center(size)
    K = np.array([[focal, 0, cx], [0, focal, cy], [0, 0, 1]])
    return View(K=K, cam_from_world=np.c_[rotation, -rotation @ eye], size=size)


def as_like(array: npt.ArrayLike, example: Tensor) -> Tensor:
    return torch.as_tensor(np.asarray(array, dtype=float)).to(example)


def eye_of(view: View) -> Array:
    # (3, 1)
    return np.asarray(-view.cam_from_world[:, :3].T @ view.cam_from_world[:, 3:])


def rays_through(view: View, x: Tensor, y: Tensor) -> Tensor:
    """Return directions (3, ...) in the world through image positions, of length 1 along the optical axis."""
    a, b, c = as_like(view.cam_from_world[:, :3].T @ np.linalg.inv(view.K), x).T.reshape(
        3, 3, *[1] * max(x.ndim, y.ndim)
    )
    return a * x + b * y + c


def cross_solid(solid: Solid, origins: Tensor, rays: Tensor) -> tuple[Tensor, Tensor]:
    """Return where rays enter and leave a solid, in ray lengths (n,); a ray hits it if 0 < enter < leave.

    Either all rays (3, n) start at one origin (3, 1), or all rays have one direction (3, 1).
    """
    planes = as_like(solid.planes, rays)
    speeds = planes[:, :3] @ rays
    # (m, n)
    times = (planes[:, 3:] - planes[:, :3] @ origins) / speeds
    enter = torch.where(speeds < 0, times, 0).amax(dim=0)
    leave = torch.where(speeds < 0, torch.inf, times).amin(dim=0)
    if solid.shape in ROUND:
        matrix = as_like(solid.local_from_world * np.sqrt(ROUND[solid.shape]), rays)
        start, run = matrix[:, :3] @ origins + matrix[:, 3:], matrix[:, :3] @ rays
        a, b, c = (run * run).sum(dim=0), (start * run).sum(dim=0), (start * start).sum(dim=0) - 1
        square = b * b - a * c
        root = square.clamp(min=0).sqrt()
        enter = torch.where(square > 0, torch.maximum(enter, (-b - root) / a), torch.inf)
        leave = torch.minimum(leave, (-b + root) / a)
    return enter, leave


def _bounds(scene: Scene, view: View) -> tuple[Array, Array]:
    """Return the smallest and the largest image position (x, y) that each solid can cover, each (n, 2)."""
    # (n, 8, 3)
    corners = np.stack([solid.corners for solid in scene.solids])
    corners = (corners @ view.cam_from_world[:, :3].T + view.cam_from_world[:, 3]) @ view.K.T
    depth = corners[..., 2:]
    in_front = depth.min(axis=1, keepdims=True) > 0.05
    places = np.where(in_front, corners[..., :2] / np.where(in_front, depth, 1), [[-np.inf], [np.inf]] * 4)
    return places.min(axis=1), places.max(axis=1)


def grid_windows(scene: Scene, view: View, x: Array, y: Array) -> list[tuple[slice, slice]]:
    """Return the rows and columns of a grid of image positions that each solid can cover."""
    low, high = _bounds(scene, view)
    ranges = [np.searchsorted(grid, (low[:, i], high[:, i])).T.tolist() for i, grid in ((1, y), (0, x))]
    return [(slice(*rows), slice(*columns)) for rows, columns in zip(*ranges, strict=True)]


def point_windows(scene: Scene, view: View, points: Tensor) -> list[tuple[slice, Tensor]]:
    """Return the points (n, 2), as columns of a grid with one row, that each solid can cover."""
    bounds = zip(*(as_like(bound, points) for bound in _bounds(scene, view)), strict=True)
    return [(slice(None), ((points >= low) & (points <= high)).all(dim=1).nonzero()[:, 0]) for low, high in bounds]


def first_hit(scene: Scene, view: View, rays: Tensor, windows: Any) -> tuple[Tensor, Tensor]:
    """Return depth and index of the first solid along rays (3, h, w), each (h, w); infinite depth for none."""
    depth, eye = torch.full_like(rays[0], torch.inf), as_like(eye_of(view), rays)
    owner = torch.full_like(depth, -1, dtype=torch.long)
    for number, (solid, window) in enumerate(zip(scene.solids, windows, strict=True)):
        part = rays[:, *window]
        if part.numel():
            enter, leave = cross_solid(solid, eye, part.flatten(1))
            enter = torch.where((enter > 0) & (enter < leave), enter, torch.inf).view(part.shape[1:])
            owner[window] = torch.where(enter < depth[window], number, owner[window])
            depth[window] = torch.minimum(depth[window], enter)
    return depth, owner
