"""Rendering of a scene."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dualrc.errors import ConfigError
from dualrc.pixels import pixel_to_cell
from dualrc.scenes.cast import View, as_like, cross_solid, eye_of, first_hit, grid_windows, rays_through
from dualrc.scenes.textures import ramp
from dualrc.scenes.world import ROUND, Array, Scene, Solid, Triple

# A CPU renders tiles of this size, which fit into its cache. Other devices render the whole image.
_TILE_PX = 256


@dataclass(frozen=True, kw_only=True)
class Light:
    """Illumination and exposure of an image."""

    # Direction to the sun, of any length, from above.
    to_sun: Triple = (-0.5, -0.6, 0.8)
    sun: Triple = (2.6, 2.3, 1.9)
    sky: Triple = (0.55, 0.65, 0.85)
    # Brightness of the lit windows.
    windows: float = 0.0
    exposure: float = 0.7
    gamma: float = 1.0
    # Gain of the camera for red, green and blue.
    cast: Triple = (1.0, 1.0, 1.0)
    # Standard deviation of the noise, in levels of 255.
    noise: float = 0.0
    noise_seed: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Rendering:
    """An image of a scene with its depth."""

    # (h, w, 3) uint8
    image: Tensor
    # (h, w) float32 along the optical axis, at pixel centers; 0 where there is nothing
    depth: Tensor
    view: View
    scene: Scene
    light: Light


def _cover(solid: Solid, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return normals (3, n), texture coordinates (2, n) and textures (n,) of points (3, n) on a solid."""
    planes, uv_axes = as_like(solid.planes, points), as_like(solid.uv_axes, points)
    # 0 on the face that contains a point, negative on the others.
    outside = planes[:, :3] @ points - planes[:, 3:]
    order = torch.arange(len(planes), device=points.device)[:, None]
    # This argmax is fast on a CPU.
    face = torch.where(outside == outside.amax(dim=0), order, 0).amax(dim=0)
    normals = planes[face, :3].T
    uv = (uv_axes[..., :3] @ points + uv_axes[..., 3:]).gather(0, face.expand(1, 2, -1))[0]
    textures = torch.tensor(solid.textures, device=points.device)[(normals[2].abs() > 0.95).long()]
    if solid.shape in ROUND:
        matrix, weights = as_like(solid.local_from_world, points), as_like(ROUND[solid.shape], points)
        local = matrix[:, :3] @ points + matrix[:, 3:]
        curved = ((weights * local * local).sum(dim=0) - 1).abs() < 1e-3
        height = torch.asin(local[2].clamp(-1, 1)) / np.pi if solid.shape == "sphere" else local[2] / 2
        angle = torch.atan2(local[1], local[0]) / (2 * np.pi)
        uv = torch.where(curved, torch.stack([angle * solid.wraps[0], -height * solid.wraps[1]]), uv)
        normals = torch.where(curved, functional.normalize(matrix[:, :3].T @ (weights * local), dim=0), normals)
        textures = torch.where(curved, solid.textures[0], textures)
    return normals, uv, textures


def _sample(scene: Scene, textures: Tensor, uv: Tensor, level: Tensor) -> Tensor:
    """Sample texels (n, 4) at texture coordinates (2, n), trilinear."""
    last = scene.texture_size.bit_length() - 1
    level = level.clamp(0, last)
    low = level.clamp(max=last - 1).floor()
    indices, weights = [], []
    for step in (0, 1):
        size = torch.exp2(last - low - step).int()
        # A level follows all larger levels, whose sizes form a geometric series.
        base = scene.texture_count * 4 * (scene.texture_size**2 - size * size) // 3 + textures.int() * size * size
        share = 1 - (level - low - step).abs()
        x, y = uv * size - 0.5
        column, row = x.floor(), y.floor()
        right, down = x - column, y - row
        columns = [(column.int() + d) & (size - 1) for d in (0, 1)]
        rows = [base + ((row.int() + d) & (size - 1)) * size for d in (0, 1)]
        indices += [r + c for r in rows for c in columns]
        weights += [share * v * h for v in (1 - down, down) for h in (1 - right, right)]
    index, weight = torch.stack(indices, dim=1), torch.stack(weights, dim=1)
    return functional.embedding_bag(index, scene.texels, per_sample_weights=weight, mode="sum")


def _shadow(scene: Scene, points: Tensor, towards: Array, soft_m: float) -> Tensor:
    """Return the share of a distant light that reaches points (3, n); less than `soft_m` of a solid lets some pass."""
    towards = towards / np.linalg.norm(towards)
    across = np.linalg.svd(towards[None])[2][1:]
    # Positions in a plane perpendicular to the light.
    flat = as_like(across, points) @ points
    corners = np.stack([solid.corners for solid in scene.solids])
    low, high = (corners @ across.T).min(axis=1), (corners @ across.T).max(axis=1)
    near = (high > flat.amin(dim=1).tolist()) & (low < flat.amax(dim=1).tolist())
    # Light comes from above, so only higher solids can cast a shadow.
    near &= corners[..., 2].max(axis=1, keepdims=True) > float(points[2].min()) + 1e-3
    passed = torch.ones_like(points[0])
    for number in near.all(axis=1).nonzero()[0].tolist():
        (x0, y0), (x1, y1) = low[number].tolist(), high[number].tolist()
        behind = (flat[0] > x0) & (flat[0] < x1) & (flat[1] > y0) & (flat[1] < y1)
        index = behind.nonzero()[:, 0]
        if len(index):
            enter, leave = cross_solid(scene.solids[number], points[:, index], as_like(towards, points)[:, None])
            passed[index] *= 1 - ((leave - enter.clamp(min=0)) / soft_m).clamp(0, 1)
    return passed


def _radiance(scene: Scene, view: View, light: Light, x: Array, y: Array, step: float) -> Tensor:
    """Return linear RGB (h, w, 3) for a grid of image positions, `step` pixels apart."""
    rays = rays_through(view, as_like(x, scene.texels)[None], as_like(y, scene.texels)[:, None])
    depth, owner = (t.flatten() for t in first_hit(scene, view, rays, grid_windows(scene, view, x, y)))
    rays = rays.flatten(1)
    lengths = (rays * rays).sum(dim=0).sqrt()
    zenith = ramp(rays[2] / lengths, -0.05, 0.6)[:, None]
    image = as_like(light.sky, rays) * torch.lerp(
        as_like([1.5, 1.4, 1.3], rays), as_like([0.35, 0.6, 1.0], rays), zenith
    )
    seen = (owner >= 0).nonzero()[:, 0]
    if len(seen):
        rays, depth, owner, lengths = rays[:, seen], depth[seen], owner[seen], lengths[seen]
        points = as_like(eye_of(view), rays) + rays * depth
        normals, uv = torch.zeros_like(points), torch.zeros_like(points[:2])
        textures = torch.zeros_like(owner)
        for number in owner.bincount().nonzero()[:, 0].tolist():
            index = (owner == number).nonzero()[:, 0]
            normals[:, index], uv[:, index], textures[index] = _cover(scene.solids[number], points[:, index])
        tile_m = as_like([solid.tile_m for solid in scene.solids], rays)[owner]
        tints = as_like([solid.tint for solid in scene.solids], rays)[owner]
        # The texel is as wide as the footprint of the ray. Neighboring rays help to cover its long side.
        slant = ((normals * rays).sum(dim=0).abs() / lengths).clamp(min=1e-3)
        footprint_m = depth * (step / view.K[0, 0]) * torch.maximum(slant.rsqrt(), 0.5 / slant)
        level = torch.log2(footprint_m * scene.texture_size / tile_m)
        texels = _sample(scene, textures, uv, level)
        where = ((points[:2] + 0.6 * points[2]) / 9).T[None, None]
        dirt = functional.grid_sample(scene.dirt, where, padding_mode="reflection", align_corners=False).view(-1, 1)
        to_sun = np.array(light.to_sun)
        facing = (as_like(to_sun / np.linalg.norm(to_sun), rays) @ normals).clamp(min=0)
        lit = facing.nonzero()[:, 0]
        if len(lit):
            facing[lit] *= _shadow(scene, points[:, lit], to_sun, 0.2)
        sky = 0.65 + 0.35 * normals[2] - 0.3 * (1 - ramp(points[2], -0.6, 0.8)) * (1 - normals[2])
        incoming = facing[:, None] * as_like(light.sun, rays) + sky[:, None] * as_like(light.sky, rays)
        glow = light.windows * texels[:, 3:] * as_like([2.0, 1.3, 0.5], rays)
        image[seen] = texels[:, :3] * tints * dirt * incoming + glow
    return image.view(len(y), len(x), 3)


def render(scene: Scene, view: View, light: Light | None = None, *, supersample: int = 2) -> Rendering:
    """Render the scene; every pixel is the mean of supersample x supersample rays."""
    if supersample < 1:
        raise ConfigError(f"supersample is {supersample}; give 1 or more.")
    light, texels, (width, height) = light or Light(), scene.texels, view.size
    x, y = np.arange(width, dtype=float), np.arange(height, dtype=float)
    rays = rays_through(view, as_like(x, texels)[None], as_like(y, texels)[:, None])
    depth, _ = first_hit(scene, view, rays, grid_windows(scene, view, x, y))
    tile = _TILE_PX if texels.device.type == "cpu" else max(view.size)
    x, y = (pixel_to_cell(np.arange(n * supersample), supersample) for n in (width, height))
    xs, ys = (np.split(grid, range(tile, len(grid), tile)) for grid in (x, y))
    rows = [torch.cat([_radiance(scene, view, light, x, y, 1 / supersample) for x in xs], dim=1) for y in ys]
    image = functional.avg_pool2d(torch.cat(rows).movedim(-1, 0), supersample).movedim(0, -1)
    image = image * light.exposure * as_like(light.cast, image)
    # Tone mapping with the ACES film curve.
    image = image * (2.51 * image + 0.03) / (image * (2.43 * image + 0.59) + 0.14)
    image = 255 * image.clamp(0, 1) ** (light.gamma / 2.2)
    if light.noise:
        image = image + light.noise * as_like(np.random.default_rng(light.noise_seed).normal(size=image.shape), image)
    image = image.round().clamp(0, 255).byte()
    return Rendering(image=image, depth=depth.nan_to_num(posinf=0), view=view, scene=scene, light=light)
