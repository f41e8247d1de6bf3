"""Homographies, cameras and two-view geometry."""

from dualrc.geometry.absolute import AbsolutePose, absolute_pose
from dualrc.geometry.camera import (
    Camera,
    cam1_from_cam0,
    camera_from_exif,
    direction_error_deg,
    lacks_sensor_size,
    pose_from_quaternion,
    quaternion_from_rotation,
    read_cameras_json,
    rotation_error_deg,
    rotation_from_quaternion,
    transform_points,
)
from dualrc.geometry.dense import homography_grid, sample_bilinear
from dualrc.geometry.depth import (
    Reprojection,
    RgbdFrame,
    read_depth_m,
    read_rgbd,
    reproject,
    sample_depth,
    unproject,
)
from dualrc.geometry.direction import estimate_direction
from dualrc.geometry.epipolar import (
    epipolar_distance_px,
    essential_from_pose,
    fundamental_from_pose,
    pose_distance_px,
    ray_depths,
    sampson_distance_px,
)
from dualrc.geometry.focal import shared_focal_px
from dualrc.geometry.homography import apply_homography, corner_error_px, crop_homography, resize_homography
from dualrc.geometry.lens import PINHOLE, Lens
from dualrc.geometry.twoview import estimate, relative_pose
from dualrc.matches import RelativePose
from dualrc.pixels import in_image

__all__ = [
    "PINHOLE",
    "AbsolutePose",
    "Camera",
    "Lens",
    "RelativePose",
    "Reprojection",
    "RgbdFrame",
    "absolute_pose",
    "apply_homography",
    "cam1_from_cam0",
    "camera_from_exif",
    "corner_error_px",
    "crop_homography",
    "direction_error_deg",
    "epipolar_distance_px",
    "essential_from_pose",
    "estimate",
    "estimate_direction",
    "fundamental_from_pose",
    "homography_grid",
    "in_image",
    "lacks_sensor_size",
    "pose_distance_px",
    "pose_from_quaternion",
    "quaternion_from_rotation",
    "ray_depths",
    "read_cameras_json",
    "read_depth_m",
    "read_rgbd",
    "relative_pose",
    "reproject",
    "resize_homography",
    "rotation_error_deg",
    "rotation_from_quaternion",
    "sample_bilinear",
    "sample_depth",
    "sampson_distance_px",
    "shared_focal_px",
    "transform_points",
    "unproject",
]
