"""Drawing of a reconstruction: its points and cameras from the front and from above."""

from pathlib import Path
from typing import Any

import numpy as np

from dualrc.files import replacing
from dualrc.types import FloatArray

_MARGIN = 0.06
# As a fraction of the largest extent of the scene.
_CAMERA_SIZE = 0.035
_MOST_POINTS = 200_000


def draw_reconstruction(model: Any, path: str | Path, title: str) -> None:
    """Draw a pycolmap Reconstruction to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    poses = [model.images[number].cam_from_world().matrix() for number in sorted(model.reg_image_ids())]
    shapes = [model.images[number].camera for number in sorted(model.reg_image_ids())]
    points = list(model.points3D.values())[:: 1 + model.num_points3D() // _MOST_POINTS]
    xyz = np.array([point.xyz for point in points]).reshape(-1, 3)
    colors = np.array([point.color for point in points]).reshape(-1, 3) / 255
    centers = np.array([-pose[:, :3].T @ pose[:, 3] for pose in poses])
    axes = _viewing_axes(poses)
    # Axes: right, down, forward.
    xyz, centers = xyz @ axes.T, centers @ axes.T
    low, high = _extent(xyz, centers)
    inside = ((xyz >= low) & (xyz <= high)).all(1)
    xyz, colors = xyz[inside], colors[inside]
    width, height, depth = high - low
    ratios = np.clip([width / height, width / depth], 0.5, 3)
    # The height of both views side by side, plus space for the titles.
    figure = Figure(figsize=(13, 13 / float(ratios.sum()) + 0.9), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 2, width_ratios=ratios)
    reach = _CAMERA_SIZE * float((high - low).max())
    # Draw far points first, so that near points cover them.
    views = (("from the front", (0, 1), np.argsort(-xyz[:, 2])), ("from above", (0, 2), np.argsort(-xyz[:, 1])))
    for column, (name, (across, along), order) in enumerate(views):
        axis = figure.add_subplot(grid[0, column])
        size = np.clip(40_000 / max(len(xyz), 1), 0.4, 6)
        axis.scatter(xyz[order, across], xyz[order, along], s=size, c=colors[order], linewidths=0, rasterized=True)
        for pose, shape in zip(poses, shapes, strict=True):
            corners = _frustum(pose, shape, reach) @ axes.T
            axis.plot(corners[:, across], corners[:, along], color="#d62728", linewidth=0.9)
        axis.plot(centers[:, across], centers[:, along], ".", color="#d62728", markersize=4)
        vertical = (high[along], low[along]) if along == 1 else (low[along], high[along])
        axis.set(xlim=(low[across], high[across]), ylim=vertical, aspect="equal", xticks=[], yticks=[])
        axis.set_title(name, fontsize=15)
    figure.suptitle(title, fontsize=17)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, bbox_inches="tight", pad_inches=0.15)


def _viewing_axes(poses: list[FloatArray]) -> FloatArray:
    """Return the mean viewing frame (3, 3) of the cameras, with rows right, down and forward, and a level horizon."""
    # For cameras that look in all directions, only the mean down direction is meaningful.
    down = _unit(np.mean([pose[1, :3] for pose in poses], axis=0), np.array([0.0, 1.0, 0.0]))
    forward = np.mean([pose[2, :3] for pose in poses], axis=0)
    sideways = np.array(poses[0][2, :3])
    forward, sideways = (vector - down * (down @ vector) for vector in (forward, sideways))
    forward = _unit(forward, _unit(sideways, np.roll(down, 1)))
    return np.stack([np.cross(down, forward), down, forward])


def _unit(vector: FloatArray, otherwise: FloatArray) -> FloatArray:
    length = float(np.linalg.norm(vector))
    return vector / length if length > 1e-6 else otherwise


def _extent(points: FloatArray, centers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the corners of a box around all cameras and all but the most distant points."""
    low, high = (np.percentile(points, share, axis=0) for share in (2, 98)) if len(points) else (centers[0], centers[0])
    low, high = np.minimum(low, centers.min(0)), np.maximum(high, centers.max(0))
    margin = _MARGIN * float((high - low).max()) + 1e-9
    return low - margin, high + margin


def _frustum(pose: FloatArray, camera: Any, reach: float) -> FloatArray:
    """Return the frustum of a camera as a polyline (n, 3) in world coordinates."""
    focal = camera.mean_focal_length()
    x, y = camera.width / focal / 2 * reach, camera.height / focal / 2 * reach
    tip, corners = [0.0, 0.0, 0.0], [[-x, -y, reach], [x, -y, reach], [x, y, reach], [-x, y, reach]]
    a, b, c, d = corners
    line = np.array([tip, a, b, tip, c, b, c, d, tip, d, a])
    return (line - pose[:, 3]) @ pose[:, :3]
