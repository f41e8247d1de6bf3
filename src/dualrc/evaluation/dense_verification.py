"""Dense pose verification: compares a photo with the scan, rendered from the estimated pose."""

import math

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from dualrc.geometry import Camera
from dualrc.types import BoolArray, FloatArray, ImageArray

# One eighth of a photo of 4032 pixels, as in InLoc's protocol.
_LONG_SIDE = 504
_NEAREST_M = 0.05
# RootSIFT descriptors of 4 x 4 cells: side of a cell, and distance between descriptors, in pixels.
_CELL, _STEP = 8, 4
_ORIENTATIONS = 8
# Threshold of the mean gradient, in standard deviations of the image.
_LOWEST_CONTRAST = 0.02


def verify(
    photograph: ImageArray,
    camera: Camera,
    cam_from_scan: FloatArray,
    xyz: npt.NDArray[np.float32],
    rgb: npt.NDArray[np.uint8],
) -> float:
    """Return the similarity of a photo and the rendered points (n, 3) of a scan: 1 / median descriptor distance.

    The similarity is 0 if no point of the scan is visible from the pose.
    """
    longest = max(camera.size)
    scale = min(_LONG_SIDE / longest, 1.0)
    small = camera.resized((max(round(camera.width * scale), 1), max(round(camera.height * scale), 1)))
    query = Image.fromarray(photograph).resize(small.size, Image.Resampling.BOX)
    seen_image, seen = render_points(xyz, rgb, small, cam_from_scan)
    return similarity(np.asarray(query), seen_image, seen)


def render_points(
    xyz: npt.NDArray[np.float32], rgb: npt.NDArray[np.uint8], camera: Camera, cam_from_points: FloatArray
) -> tuple[ImageArray, BoolArray]:
    """Render colored points to an image (h, w, 3), the nearest one per pixel, with a mask (h, w) of covered pixels."""
    pose = cam_from_points.astype(np.float32)
    places = xyz @ pose[:, :3].T + pose[:, 3]
    in_front = places[:, 2] > _NEAREST_M
    places, colors = places[in_front], rgb[in_front]
    rays, K = places[:, :2] / places[:, 2:], camera.K.astype(np.float32)
    if camera.lens.distorts:
        # Points outside of the field of view are moved out of the image.
        rays = np.nan_to_num(camera.lens.distort(rays), nan=-1e6).astype(np.float32)
    column, row = np.floor(rays @ K[:2, :2].T + K[:2, 2] + 0.5).clip(-1, 1e6).astype(np.int64).T
    inside = (column >= 0) & (row >= 0) & (column < camera.width) & (row < camera.height)
    order = np.argsort(-places[inside, 2], kind="stable")
    index = (row * camera.width + column)[inside][order]
    image = np.zeros((camera.height * camera.width, 3), dtype=np.uint8)
    seen = np.zeros(len(image), dtype=np.bool_)
    # Ordered from far to near; the last write per pixel remains.
    image[index] = colors[inside][order]
    seen[index] = True
    shape = (camera.height, camera.width)
    return image.reshape(*shape, 3), seen.reshape(shape)


def similarity(image0: ImageArray, image1: ImageArray, seen1: BoolArray) -> float:
    """Return 1 / median distance of dense descriptors where image 1 is covered; 0 if it is not covered at all."""
    margin = 3 * _CELL // 2
    known = torch.from_numpy(seen1)[margin : margin + seen1.shape[0] - 3 * _CELL : _STEP]
    known = known[:, margin : margin + seen1.shape[1] - 3 * _CELL : _STEP]
    if min(seen1.shape) <= 3 * _CELL or not known.any():
        return 0.0
    mask = torch.from_numpy(seen1)
    grays = (_normalized(_gray(image0), mask), _normalized(_filled(_gray(image1), mask), mask))
    descriptors0, descriptors1 = (_descriptors(gray) for gray in grays)
    distances = (descriptors0 - descriptors1).norm(dim=0)[known]
    return 1 / max(float(distances.median()), 1e-6)


def _gray(image: ImageArray) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114])
    return torch.from_numpy(np.array(image)).float() @ weights


def _filled(gray: Tensor, mask: Tensor) -> Tensor:
    """Fill holes with the mean of the known values around them."""
    if mask.all() or min(gray.shape) < 2:
        return gray
    known = mask.float()[None, None]
    weight = functional.avg_pool2d(known, 2, ceil_mode=True)
    mean = functional.avg_pool2d(gray[None, None] * known, 2, ceil_mode=True) / weight.clamp(min=1e-6)
    coarse = _filled(mean[0, 0], weight[0, 0] > 0)
    wide = functional.interpolate(coarse[None, None], size=tuple(gray.shape), mode="bilinear", align_corners=False)
    return torch.where(mask, gray, wide[0, 0])


def _normalized(gray: Tensor, mask: Tensor) -> Tensor:
    """Normalize to mean 0 and deviation 1 over the known pixels, because exposures differ."""
    values = gray[mask]
    deviation = values.std() if len(values) > 1 else torch.tensor(1.0)
    return (gray - values.mean()) / deviation.clamp(min=1e-6)


def _descriptors(gray: Tensor) -> Tensor:
    """Compute RootSIFT (128, h, w) at every fourth pixel whose cells are all inside the image."""
    # Three standard deviations.
    radius = math.ceil(_CELL / 2)
    gaussian = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / (_CELL / 6)) ** 2)
    smooth = _separable(gray[None, None], gaussian / gaussian.sum())
    dy, dx = torch.gradient(smooth[0, 0])
    position = torch.atan2(dy, dx) * (_ORIENTATIONS / (2 * math.pi))
    away = (position - torch.arange(_ORIENTATIONS)[:, None, None]).abs() % _ORIENTATIONS
    shares = (1 - torch.minimum(away, _ORIENTATIONS - away)).clamp(min=0)
    # (8, 1, h, w).
    maps = (shares * torch.hypot(dx, dy))[:, None]
    triangle = 1 - torch.arange(1 - _CELL, _CELL).abs() / _CELL
    cells = _separable(maps, triangle / triangle.sum())[:, 0]
    height, width = (length - 3 * _CELL for length in gray.shape)
    starts = [(row * _CELL, column * _CELL) for row in range(4) for column in range(4)]
    stacked = torch.cat([cells[:, y : y + height : _STEP, x : x + width : _STEP] for y, x in starts])
    total = stacked.sum(dim=0)
    # On blank walls there is only noise to compare, which all looks alike.
    contrast = total / (16 * _LOWEST_CONTRAST)
    return torch.where(contrast < 1, 0.0, (stacked / total.clamp(min=1e-9)).sqrt())


def _separable(maps: Tensor, kernel: Tensor) -> Tensor:
    """Convolve maps (b, 1, h, w) along both axes, with replicated borders."""
    radius = len(kernel) // 2
    maps = functional.pad(maps, (radius, radius, radius, radius), mode="replicate")
    return functional.conv2d(functional.conv2d(maps, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))
