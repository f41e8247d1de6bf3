"""Rendered images with distortion."""

import numpy as np

from dualrc import scenes
from dualrc.geometry import Camera, sample_bilinear
from dualrc.pixels import pixel_grid

# Realistic, strong coefficients for each of COLMAP's models.
COEFFICIENTS = {
    "SIMPLE_PINHOLE": (),
    "PINHOLE": (),
    "SIMPLE_RADIAL": (-0.2,),
    "RADIAL": (-0.2, 0.05),
    "OPENCV": (-0.3, 0.1, 0.01, -0.005),
    "OPENCV_FISHEYE": (0.05, -0.01, 0.003, -0.001),
    "FULL_OPENCV": (-0.3, 0.1, 0.01, -0.005, 0.02, 0.05, -0.01, 0.003),
    "FOV": (0.9,),
    "SIMPLE_RADIAL_FISHEYE": (-0.05,),
    "RADIAL_FISHEYE": (0.05, -0.01),
    "THIN_PRISM_FISHEYE": (0.05, -0.01, 0.002, -0.003, 0.001, -0.0005, 0.001, -0.002),
    "RAD_TAN_THIN_PRISM_FISHEYE": (
        *(0.05, -0.01, 0.003, -0.001, 0.0002, -0.0001),
        *(0.002, -0.003, 0.001, 0.0005, -0.002, 0.0004),
    ),
    "SIMPLE_DIVISION": (-0.2,),
    "DIVISION": (-0.15,),
    "SIMPLE_FISHEYE": (),
    "FISHEYE": (),
    "EUCM": (0.6, 1.1),
}
# A pinhole image that covers the field of view of the lens is wider by this factor.
WIDE = 1.25


def photograph(scene: scenes.Scene, camera: Camera) -> np.ndarray:
    """Render the view of a camera with a pose, uint8 (h, w, 3)."""
    width, height = (round(WIDE * side) for side in camera.size)
    K = camera.K.copy()
    K[:2, 2] += (width - camera.width) / 2, (height - camera.height) / 2
    view = scenes.View(K=K, cam_from_world=camera.cam_from_world, size=(width, height))
    seen = scenes.render(scene, view, supersample=1).image.numpy()
    places = (camera.rays(pixel_grid(camera.size).reshape(-1, 2)) @ K.T)[:, :2]
    return sample_bilinear(seen, places.reshape(camera.height, camera.width, 2)).round().astype(np.uint8)
