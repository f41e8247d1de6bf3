"""Photographs of rendered scenes through lenses that distort."""

import numpy as np

from dualrc import scenes
from dualrc.geometry import Camera, sample_bilinear
from dualrc.pixels import pixel_grid

# Coefficients of each of COLMAP's models, as strong as lenses have them.
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
WIDE = 1.25  # a pinhole's picture that holds what the lens sees is so many times wider


def photograph(scene: scenes.Scene, camera: Camera) -> np.ndarray:
    """What a camera with a pose sees of a scene, uint8 (h, w, 3)."""
    width, height = (round(WIDE * side) for side in camera.size)
    K = camera.K.copy()
    K[:2, 2] += (width - camera.width) / 2, (height - camera.height) / 2
    view = scenes.View(K=K, cam_from_world=camera.cam_from_world, size=(width, height))
    seen = scenes.render(scene, view, supersample=1).image.numpy()
    places = (camera.rays(pixel_grid(camera.size).reshape(-1, 2)) @ K.T)[:, :2]
    return sample_bilinear(seen, places.reshape(camera.height, camera.width, 2)).round().astype(np.uint8)
