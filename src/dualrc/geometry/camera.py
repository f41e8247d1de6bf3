"""Cameras with lenses and poses, in pixels; the center of the first pixel is (0, 0)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags

from dualrc.errors import DataError, ImageError
from dualrc.files import is_file, parse_json, read_text
from dualrc.geometry.homography import resize_homography, to_homogeneous
from dualrc.geometry.lens import PINHOLE, Lens
from dualrc.image import read_header
from dualrc.pixels import from_colmap, image_center, to_colmap
from dualrc.types import FloatArray, Size

_FILM_DIAGONAL_MM = float(np.hypot(36, 24))
# Millimeters per unit of EXIF's FocalPlaneResolutionUnit.
_MM_PER_UNIT = {2: 25.4, 3: 10.0, 4: 1.0, 5: 0.001}
# A focal length outside this range, in units of the long side, comes from a broken tag.
_PLAUSIBLE_FOCAL = (0.1, 100.0)
# Default focal length in units of the long side, as in COLMAP: a field of view of about 45 degrees.
_GUESSED_FOCAL = 1.2
_GUESSED = "guessed"


@dataclass(frozen=True, kw_only=True, eq=False)
class Camera:
    """A camera of the upright image."""

    # Size of the image, in pixels.
    width: int
    height: int
    # (3, 3) Camera matrix; the center of the first pixel is (0, 0).
    K: FloatArray
    # Lens distortion, applied before K: none, or one of COLMAP's camera models.
    lens: Lens = PINHOLE
    # Origin of the parameters, as reported to the user: "file", "exif", ...
    source: str = "given"
    # (3, 4) [R | t], if known.
    cam_from_world: FloatArray | None = None

    def __post_init__(self) -> None:
        K = np.array(self.K, dtype=np.float64)
        if K.shape != (3, 3) or not np.isfinite(K).all() or K[0, 0] <= 0 or K[1, 1] <= 0:
            raise DataError("K is not a 3x3 matrix with positive focal lengths; write [[fx, 0, cx], [0, fy, cy], ...].")
        if not np.array_equal(K[[1, 2, 2, 2], [0, 0, 1, 2]], [0, 0, 0, 1]):
            raise DataError("K is not upper triangular with a 1 in its corner; divide it by its last element.")
        if self.width <= 0 or self.height <= 0:
            raise DataError(
                f"A camera of {self.width} x {self.height} pixels has no image; give the size of its image."
            )
        object.__setattr__(self, "K", K)
        if self.cam_from_world is not None:
            object.__setattr__(self, "cam_from_world", _as_pose(self.cam_from_world))

    @staticmethod
    def from_focal(size: Size, focal_px: float, *, source: str = "given") -> "Camera":
        """Create a camera for an image of `size` (width, height) with its principal point in the center."""
        cx, cy = image_center(size)
        K = np.array([[focal_px, 0, cx], [0, focal_px, cy], [0, 0, 1]])
        return Camera(width=size[0], height=size[1], K=K, source=source)

    @staticmethod
    def guessed(size: Size) -> "Camera":
        """Create a camera for an image of `size` with a typical focal length."""
        return Camera.from_focal(size, _GUESSED_FOCAL * max(size), source=_GUESSED)

    @property
    def is_guessed(self) -> bool:
        """Whether the focal length is a guess."""
        return self.source == _GUESSED

    @staticmethod
    def from_colmap(model: str, size: Size, params: Sequence[float], *, source: str = "given") -> "Camera":
        """Create a camera for an image of `size` (width, height) from a COLMAP model and all its parameters."""
        focals, coefficients = Lens.layout(model)
        values = [float(value) for value in params]
        if len(values) != (expected := focals + 2 + coefficients):
            raise DataError(f"{model} has {expected} parameters, not {len(values)}; correct them.")
        lens = Lens(model, tuple(values[focals + 2 :]))
        K = np.diag([values[0], values[focals - 1], 1.0])
        K[:2, 2] = from_colmap(np.array(values[focals : focals + 2]))
        return Camera(width=size[0], height=size[1], K=K, lens=lens, source=source)

    def to_colmap(self) -> tuple[str, list[float]]:
        """Return COLMAP's model and its parameters; a skew in K is dropped, because no COLMAP model has one."""
        fx, fy = float(self.K[0, 0]), float(self.K[1, 1])
        lens = self.lens if np.isclose(fx, fy, rtol=1e-9) else self.lens.with_two_focals()
        focals = [fx, fy][: Lens.layout(lens.model)[0]]
        return lens.model, [*focals, *to_colmap(self.K[:2, 2]).tolist(), *lens.distortion]

    @property
    def size(self) -> Size:
        """(width, height)."""
        return self.width, self.height

    @property
    def pinhole(self) -> "Camera":
        """The camera without lens distortion, to which `undistort` maps pixels."""
        return replace(self, lens=PINHOLE)

    @property
    def focal_px(self) -> float:
        """Mean of the focal lengths along x and y."""
        return float(self.K[0, 0] + self.K[1, 1]) / 2

    def centered_pinhole(self) -> dict[str, Any]:
        """Return PoseLib's description of a camera for `rays` times `focal_px`: centered pixels with one focal length.

        PoseLib has no pixel convention; it subtracts the given principal point. Centered pixels also support a K with
        skew, which PoseLib's models lack.
        """
        params = [self.focal_px, 0.0, 0.0]
        return {"model": "SIMPLE_PINHOLE", "width": self.width, "height": self.height, "params": params}

    def resized(self, size: Size) -> "Camera":
        """Return the camera of the same image resized to `size` (width, height)."""
        return replace(self, width=size[0], height=size[1], K=resize_homography(self.size, size) @ self.K)

    def project(self, points_cam: npt.ArrayLike) -> FloatArray:
        """Project points in camera coordinates to pixels, (n, 3) -> (n, 2); NaN for points outside the view."""
        points = np.asarray(points_cam, dtype=np.float64).reshape(-1, 3)
        depths = np.where(points[:, 2:] > 0, points[:, 2:], np.nan)
        places: FloatArray = points / depths
        if self.lens.distorts:
            places = to_homogeneous(self.lens.distort(places[:, :2]))
        return (places @ self.K.T)[:, :2]

    def rays(self, points: npt.ArrayLike) -> FloatArray:
        """Return viewing directions of pixels, with depth 1: (n, 2) -> (n, 3); NaN outside the range of the lens."""
        rays = np.linalg.solve(self.K, to_homogeneous(points).T).T
        return to_homogeneous(self.lens.undistort(rays[:, :2])) if self.lens.distorts else rays

    def undistort(self, points: npt.ArrayLike) -> FloatArray:
        """Map pixels to those of `pinhole`, (n, 2) -> (n, 2); NaN as for `rays`."""
        return (self.rays(points) @ self.K.T)[:, :2]

    def pixels_by_rays(self, rays: npt.ArrayLike) -> FloatArray:
        """Return derivatives of pixels by the first two coordinates of rays of depth 1: (n, 3) -> (n, 2, 2)."""
        return self.K[:2, :2] @ self.lens.jacobian(np.asarray(rays)[:, :2])


def read_cameras_json(path: str | Path) -> dict[str, Camera]:
    """Read a JSON file {name: {width, height, K, model?, distortion?, cam_from_world?}}.

    `model` is the name of a COLMAP model, and `distortion` its coefficients after focal lengths and principal point.
    """
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not a JSON file ({error}); correct it or write it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} contains no cameras; write {{name: {{width, height, K}}}}.")
    return {name: camera_from_json(entry, f"{path}, {name}") for name, entry in content.items()}


def camera_from_exif(path: str | Path) -> Camera | None:
    """Return the camera of the upright image from EXIF data; None if EXIF has no focal length in pixels."""
    header = read_header(path)
    if header is None:
        if is_file(path):
            raise ImageError(f"Cannot read {path} as an image; convert it to PNG or JPEG.")
        raise ImageError(f"{path} does not exist; check the path.")
    focal_px = _focal_from_tags(header.tags, header.stored_size)
    low, high = _PLAUSIBLE_FOCAL
    if focal_px is None or not low <= focal_px / max(header.stored_size) <= high:
        return None
    return Camera.from_focal(header.upright_size, focal_px, source="exif")


def lacks_sensor_size(path: str | Path) -> str | None:
    """Return a message if EXIF has a focal length in millimeters but no sensor size; None otherwise."""
    header = read_header(path)
    focal_mm = None if header is None else _number(header.tags, ExifTags.Base.FocalLength)
    if header is None or focal_mm is None or _focal_from_tags(header.tags, header.stored_size) is not None:
        return None
    return f"EXIF has a focal length of {focal_mm:g} mm but no sensor size, so it is unknown in pixels"


def cam1_from_cam0(cam0_from_world: npt.ArrayLike, cam1_from_world: npt.ArrayLike) -> FloatArray:
    """Return the relative pose (3, 4) of two cameras with poses (3, 4)."""
    pose0, pose1 = _as_pose(cam0_from_world), _as_pose(cam1_from_world)
    R = pose1[:, :3] @ pose0[:, :3].T
    return np.column_stack([R, pose1[:, 3] - R @ pose0[:, 3]])


def transform_points(target_from_source: npt.ArrayLike, points: npt.ArrayLike) -> FloatArray:
    """Transform points (n, 3) by a pose (3, 4)."""
    pose = _as_pose(target_from_source)
    return np.asarray(points, dtype=np.float64).reshape(-1, 3) @ pose[:, :3].T + pose[:, 3]


def rotation_error_deg(R_a: npt.ArrayLike, R_b: npt.ArrayLike) -> float:
    """Return the angle between two rotations (3, 3), from 0 to 180 degrees."""
    # |R_a - R_b| = 2 sqrt(2) sin(angle / 2). The common arccos of the trace loses small angles to rounding.
    distance = float(np.linalg.norm(np.asarray(R_a, dtype=np.float64) - np.asarray(R_b, dtype=np.float64)))
    return float(np.degrees(2 * np.arcsin(min(distance / np.sqrt(8), 1.0))))


def direction_error_deg(t_a: npt.ArrayLike, t_b: npt.ArrayLike, *, either_sign: bool = False) -> float:
    """Return the angle between two directions (3,), from 0 to 180 degrees; NaN if one is zero.

    `either_sign` treats t and -t as equal, as evaluations of essential matrices do: 0 to 90 degrees.
    """
    a, b = np.asarray(t_a, dtype=np.float64).ravel(), np.asarray(t_b, dtype=np.float64).ravel()
    if not a.any() or not b.any():
        return float("nan")
    angle = float(np.degrees(np.arctan2(np.linalg.norm(np.cross(a, b)), a @ b)))
    return min(angle, 180 - angle) if either_sign else angle


def cross_matrix(vector: npt.ArrayLike) -> FloatArray:
    """Return [v]x, with [v]x u = v x u: (3,) -> (3, 3)."""
    x, y, z = np.asarray(vector, dtype=np.float64)
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])


def rotation_from_quaternion(quaternion: npt.ArrayLike) -> FloatArray:
    """Return the rotation (3, 3) of a quaternion (w, x, y, z)."""
    values = np.asarray(quaternion, dtype=np.float64)
    if not (norm := np.linalg.norm(values)) > 0:
        raise ValueError("the quaternion has length 0")
    w, v = values[0] / norm, values[1:] / norm
    return (2 * w * w - 1) * np.eye(3) + 2 * np.outer(v, v) + 2 * w * cross_matrix(v)


def quaternion_from_rotation(R: FloatArray) -> FloatArray:
    """Return the quaternion (w, x, y, z), w >= 0, of a rotation (3, 3)."""
    # The eigenvector of the largest eigenvalue avoids the case distinctions near 180 degrees.
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = R
    symmetric = np.array(
        [
            [xx + yy + zz, zy - yz, xz - zx, yx - xy],
            [zy - yz, xx - yy - zz, xy + yx, xz + zx],
            [xz - zx, xy + yx, yy - xx - zz, yz + zy],
            [yx - xy, xz + zx, yz + zy, zz - xx - yy],
        ]
    )
    quaternion: FloatArray = np.linalg.eigh(symmetric)[1][:, -1]
    return quaternion if quaternion[0] >= 0 else -quaternion


def pose_from_quaternion(values: Sequence[float]) -> FloatArray:
    """Return the pose (3, 4) of qw qx qy qz tx ty tz, the order of COLMAP and many file formats."""
    return np.column_stack([rotation_from_quaternion(values[:4]), values[4:]])


def camera_from_json(entry: Any, where: str) -> Camera:
    """Return the camera of an entry of cameras.json; `where` names it in errors."""
    try:
        distortion = np.ravel(entry.get("distortion", ())).astype(np.float64).tolist()
        if "model" not in entry and any(distortion):
            raise DataError("its distortion has no model; name a COLMAP model, such as OPENCV for k1 k2 p1 p2.")
        return Camera(
            width=int(entry["width"]),
            height=int(entry["height"]),
            K=np.array(entry["K"], dtype=np.float64),
            lens=Lens(str(entry["model"]), tuple(distortion)) if "model" in entry else PINHOLE,
            source="file",
            cam_from_world=entry.get("cam_from_world"),
        )
    except KeyError as error:
        raise DataError(f"{where}: {error} is missing; a camera has width, height and K.") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: not a camera ({error}); write {{width, height, K}}.") from error
    except DataError as error:
        raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from error


def _as_pose(pose: npt.ArrayLike) -> FloatArray:
    array = np.asarray(pose, dtype=np.float64)
    if array.shape == (4, 4):
        array = array[:3]
    if array.shape != (3, 4) or not np.isfinite(array).all():
        raise DataError(f"A pose must be a finite 3x4 matrix [R | t], not an array of shape {array.shape}.")
    return array


def _focal_from_tags(tags: Mapping[int, Any], size: Size) -> float | None:
    """Return the focal length in pixels of the stored image."""
    film_mm = _number(tags, ExifTags.Base.FocalLengthIn35mmFilm)
    if film_mm:
        # Manufacturers state it by the diagonal. A 4:3 phone image and a 3:2 film frame with equal diagonals have
        # different long sides, so the ratio of long sides would be off by 4 %.
        return film_mm / _FILM_DIAGONAL_MM * float(np.hypot(*size))
    focal_mm = _number(tags, ExifTags.Base.FocalLength)
    per_unit = _number(tags, ExifTags.Base.FocalPlaneXResolution)
    unit_mm = _MM_PER_UNIT.get(int(_number(tags, ExifTags.Base.FocalPlaneResolutionUnit) or 2))
    if not focal_mm or not per_unit or not unit_mm:
        return None
    # The resolution refers to the image that the camera stored; the file may have been resized since.
    ratio = size[0] / (_number(tags, ExifTags.Base.ExifImageWidth) or size[0])
    return focal_mm * per_unit / unit_mm * ratio


def _number(tags: Mapping[int, Any], tag: int) -> float | None:
    """Return the tag as a positive finite number, or None."""
    try:
        value = float(tags[tag])
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    return value if np.isfinite(value) and value > 0 else None
