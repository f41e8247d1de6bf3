"""COLMAP's files in our convention: the one home of its half pixel and of its pictures that lie on their side.

COLMAP puts the centre of the first pixel at (0.5, 0.5), we put it at (0, 0). COLMAP's cameras are for pictures as they
are stored, ours for pictures that are turned upright as their EXIF orientation says.
"""

import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from dualrc.errors import ConfigError, DataError
from dualrc.geometry import Camera, read_cameras_json, refuse_distortion
from dualrc.types import FloatArray, Size

_HALF_PX = 0.5
# By EXIF orientation, how x and y of the stored picture's camera become those of the upright one's: turned by 180, by
# 90 clockwise and by 90 counterclockwise.
_TURNS = {3: ((-1, 0), (0, -1)), 6: ((0, -1), (1, 0)), 8: ((0, 1), (-1, 0))}
_MIRRORED = (2, 4, 5, 7)
_ON_ITS_SIDE = (5, 6, 7, 8)
# Per model, how many focal lengths precede cx and cy, and how many distortion coefficients follow. Fisheye models are
# missing because they are not pinholes even when their coefficients are zero.
_MODELS = {
    "SIMPLE_PINHOLE": (1, 0),
    "PINHOLE": (2, 0),
    "SIMPLE_RADIAL": (1, 1),
    "RADIAL": (1, 2),
    "OPENCV": (2, 4),
    "FULL_OPENCV": (2, 8),
}


@dataclass(frozen=True, kw_only=True)
class _ImageEntry:
    """A picture of images.txt."""

    camera_id: int
    cam_from_world: FloatArray  # (3, 4)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a picture file tells without being decoded."""

    stored_size: Size
    orientation: int  # EXIF's, 1 to 8

    @property
    def upright_size(self) -> Size:
        """(width, height) of the picture as we read it."""
        return self.stored_size[::-1] if self.orientation in _ON_ITS_SIDE else self.stored_size


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelImage:
    """A registered picture of a COLMAP model, upright."""

    size: Size
    points: FloatArray  # (n, 2) float64, the observations that have a 3D point
    point_ids: npt.NDArray[np.int64]  # (n,)
    cam_from_world: FloatArray  # (3, 4)
    camera: Camera | None  # None where the lens distorts, or is no pinhole


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A COLMAP model in our convention."""

    images: dict[str, ModelImage]  # by name
    point_ids: npt.NDArray[np.int64]  # (m,), ascending
    xyz: FloatArray  # (m, 3)

    def xyz_of(self, point_ids: npt.ArrayLike) -> FloatArray:
        """The 3D points with these ids, (n,) -> (n, 3)."""
        return self.xyz[np.searchsorted(self.point_ids, point_ids)]


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """How a stored picture becomes the upright one."""

    pixels: FloatArray  # (3, 3), upright from stored
    camera: FloatArray  # (3, 3), upright from stored
    size: Size  # of the upright picture


def read_header(path: str | Path) -> Header | None:
    """Size and orientation of a picture file; None where there is none or it can't be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damaged EXIF, and of large pictures
            with Image.open(path) as image:
                size, is_tiff = image.size, image.format == "TIFF"
                try:
                    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
                except (OSError, SyntaxError, ValueError, KeyError, TypeError, struct.error):
                    orientation = 1  # Damaged EXIF data tells nothing; the picture may be fine.
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, Image.DecompressionBombError):
        return None
    if is_tiff and orientation in _ON_ITS_SIDE:
        size = size[::-1]  # of these Pillow tells the upright size
    return Header(stored_size=size, orientation=orientation if orientation in range(1, 9) else 1)


def read_cameras(path: str | Path, names: Sequence[str], root: str | Path = "") -> dict[str, Camera]:
    """The cameras of the named pictures, from our cameras.json or COLMAP's cameras.txt.

    An images.txt beside cameras.txt says which picture has which camera; without it one camera serves all pictures,
    and two cameras serve two pictures in the order of their ids. A name is found with or without its folders. Where a
    name is that of a picture file under `root`, COLMAP's camera is turned upright with it.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        cameras = read_cameras_json(path)
        return {name: cameras[_find(name, list(cameras), path)] for name in names}
    if path.suffix.lower() != ".txt":
        raise DataError(f"{path}: cameras are read from cameras.json or COLMAP's cameras.txt; give one of these.")
    return {name: _upright(camera, Path(root, name)) for name, camera in _read_colmap(path, names).items()}


def _read_colmap(path: Path, names: Sequence[str]) -> dict[str, Camera]:
    """The cameras of the named pictures as they are stored."""
    by_id = _read_cameras_txt(path)
    images_path = path.with_name("images.txt")
    if images_path.is_file():
        entries = _read_images_txt(images_path)
        found = {name: entries[_find(name, list(entries), images_path)] for name in names}
        missing = {entry.camera_id for entry in found.values()} - set(by_id)
        if missing:
            raise DataError(f"{path} has no camera {min(missing)}, which {images_path} names; export both again.")
        return {
            name: replace(by_id[entry.camera_id], cam_from_world=entry.cam_from_world) for name, entry in found.items()
        }
    cameras_in_order = [by_id[camera_id] for camera_id in sorted(by_id)]
    if len(cameras_in_order) == 1:
        return dict.fromkeys(names, cameras_in_order[0])
    if len(cameras_in_order) == len(names) == 2:
        return dict(zip(names, cameras_in_order, strict=True))
    raise DataError(
        f"{path} has {len(by_id)} cameras for {len(names)} pictures; "
        "put COLMAP's images.txt beside it, or keep one camera."
    )


def _upright(camera: Camera, path: Path) -> Camera:
    """The camera of the upright picture, from that of the stored one."""
    return _turn_camera(camera, _find_turn(path, camera.size))


def _turn_camera(camera: Camera, turn: _Turn | None) -> Camera:
    if turn is None:
        return camera
    pose = camera.cam_from_world
    return replace(
        camera,
        width=turn.size[0],
        height=turn.size[1],
        K=turn.pixels @ camera.K @ turn.camera.T,
        cam_from_world=None if pose is None else turn.camera @ pose,
    )


def _find_turn(path: str | Path, size: Size) -> _Turn | None:
    """How a picture file with a camera for `size` is to be turned; None where it is upright or can't be read."""
    header = read_header(path)
    if header is None or header.orientation == 1:
        return None
    if header.orientation in _MIRRORED:
        remedy = "save it upright, without that tag, and run COLMAP on it again"
        raise DataError(f"{path} is mirrored by its EXIF orientation {header.orientation}, as no camera is; {remedy}.")
    width, height = size
    stored_width, stored_height = header.stored_size
    if header.orientation in _ON_ITS_SIDE and (width - height) * (stored_width - stored_height) < 0:
        return None  # it lies as the upright picture does: some versions of COLMAP turned pictures themselves
    camera = np.eye(3)
    camera[:2, :2] = turn = np.array(_TURNS[header.orientation])
    pixels = camera.copy()
    # A turn about the first pixel, then moved so that the picture begins at (0, 0) again.
    pixels[:2, 2] = -np.minimum(turn @ (width - 1, height - 1), 0)
    upright = (height, width) if header.orientation in _ON_ITS_SIDE else size
    return _Turn(pixels=pixels, camera=camera, size=upright)


def read_model(path: str | Path, images: str | Path | None = None) -> Model:
    """A COLMAP model, binary or text, from its folder; `images` is where its pictures are, to find their EXIF turns."""
    pycolmap = import_pycolmap()
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; give the one that holds cameras.bin or cameras.txt.")
    _refuse_cut(path, pycolmap)
    try:
        model = pycolmap.Reconstruction(str(path))
    except (ValueError, RuntimeError, IndexError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} does not hold a COLMAP model ({reason}); give the folder of cameras.bin.") from error
    if not model.is_valid():
        raise DataError(f"The COLMAP model {path} is damaged; copy or export it again.")
    point_ids = np.array(sorted(model.points3D), dtype=np.int64)
    xyz = np.array([model.points3D[point_id].xyz for point_id in point_ids.tolist()]).reshape(-1, 3)
    registered = sorted((model.images[number] for number in model.reg_image_ids()), key=lambda image: image.name)
    folder = None if images is None else Path(images)
    return Model(images={image.name: _model_image(image, folder) for image in registered}, point_ids=point_ids, xyz=xyz)


def posed_reconstruction(cameras: Mapping[str, Camera]) -> Any:
    """pycolmap's Reconstruction of upright pictures with known cameras and poses, ready to be triangulated."""
    pycolmap = import_pycolmap()
    made = pycolmap.Reconstruction()
    for number, (name, camera) in enumerate(cameras.items(), start=1):
        if camera.cam_from_world is None:
            raise DataError(f"The camera of {name} has no pose; add its cam_from_world.")
        K = camera.K
        params = [K[0, 0], K[1, 1], K[0, 2] + _HALF_PX, K[1, 2] + _HALF_PX]
        made.add_camera_with_trivial_rig(
            pycolmap.Camera(camera_id=number, model="PINHOLE", width=camera.width, height=camera.height, params=params)
        )
        image = pycolmap.Image(name=name, camera_id=number, image_id=number)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(camera.cam_from_world))
    return made


def stored_points(points: npt.ArrayLike, path: str | Path) -> FloatArray:
    """Upright points (n, 2) of a picture file in its pixels as they are stored, still in our convention."""
    upright = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    turn = _stored_turn(path)
    # The inverse of a turn is its transpose.
    return upright if turn is None else (upright - turn.pixels[:2, 2]) @ turn.pixels[:2, :2]


def colmap_points(points: npt.ArrayLike, path: str | Path | None = None) -> FloatArray:
    """Upright points (n, 2) of a picture file as COLMAP counts its pixels; without a file they are not turned."""
    places = np.asarray(points, dtype=np.float64).reshape(-1, 2) if path is None else stored_points(points, path)
    return places + _HALF_PX


def colmap_camera(camera: Camera, path: str | Path, *, known: bool) -> Any:
    """pycolmap's Camera of a picture file: a pinhole if it is known, else one focal length and one distortion."""
    pycolmap = import_pycolmap()
    turn = _stored_turn(path)
    K, (width, height) = camera.K, camera.size
    if turn is not None:
        K = np.linalg.inv(turn.pixels) @ K @ turn.camera
        # The same matrix turns a size, but for signs.
        width, height = (int(abs(side)) for side in turn.pixels[:2, :2].T @ camera.size)
    cx, cy = K[0, 2] + _HALF_PX, K[1, 2] + _HALF_PX
    model, params = "PINHOLE", [K[0, 0], K[1, 1], cx, cy]
    if not known:
        model, params = "SIMPLE_RADIAL", [camera.focal_px, cx, cy, 0.0]
    made = pycolmap.Camera(model=model, width=width, height=height, params=params)
    made.has_prior_focal_length = camera.source in ("file", "exif")
    return made


def refuse_mirrored(path: str | Path) -> None:
    """Raise DataError if a picture file is mirrored by its EXIF orientation."""
    _stored_turn(path)


def _stored_turn(path: str | Path) -> _Turn | None:
    header = read_header(path)
    return None if header is None else _find_turn(path, header.stored_size)


def _refuse_cut(path: Path, pycolmap: Any) -> None:
    """Raise DataError if a binary file ends too early, as when a copy broke off; pycolmap may then read for ever."""

    def after_camera(data: bytes, at: int) -> int:
        (model,) = struct.unpack_from("<i", data, at + 4)
        kind = pycolmap.CameraModelId(model)
        return at + 24 + 8 * len(pycolmap.Camera.create_from_model_id(1, kind, 1.0, 1, 1).params)

    def after_image(data: bytes, at: int) -> int:
        name_end = data.index(b"\0", at + 64)  # after id, pose and camera
        return name_end + 9 + 24 * int(struct.unpack_from("<Q", data, name_end + 1)[0])

    def after_point(data: bytes, at: int) -> int:
        return at + 51 + 8 * int(struct.unpack_from("<Q", data, at + 43)[0])

    for name, after in (("cameras.bin", after_camera), ("images.bin", after_image), ("points3D.bin", after_point)):
        if not (path / name).is_file():
            continue
        data, at = (path / name).read_bytes(), 8
        try:
            for _ in range(struct.unpack_from("<Q", data)[0]):
                at = after(data, at)
            if at > len(data):
                raise ValueError("it ends too early")
        except (struct.error, ValueError) as error:
            raise DataError(
                f"{path / name} is cut off or damaged ({error}); copy or export the model again."
            ) from error


def import_pycolmap() -> Any:
    """The module pycolmap, or an error that says how to get it."""
    # Pillow must come first, as it does at the top of this file: the other way round its PNG writer breaks.
    try:
        import pycolmap
    except ImportError as error:
        raise ConfigError(f"COLMAP's models need pycolmap ({error}): pip install 'dualrc[colmap]'.") from error
    return pycolmap


@contextmanager
def quiet_colmap(pycolmap: Any) -> Iterator[None]:
    """Keep COLMAP from writing its log to the screen; errors come as exceptions."""
    before = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = int(pycolmap.logging.FATAL.value)
    try:
        yield
    finally:
        pycolmap.logging.minloglevel = before


def _model_image(image: Any, folder: Path | None) -> ModelImage:
    """A registered picture of pycolmap's, upright."""
    seen, size = image.get_observation_points2D(), (image.camera.width, image.camera.height)
    points = np.array([point.xy for point in seen], dtype=np.float64).reshape(-1, 2) - _HALF_PX
    pose = np.array(image.cam_from_world().matrix(), dtype=np.float64)
    turn = None if folder is None else _find_turn(folder / image.name, size)
    fields = [0, image.camera.model_name, *size, *image.camera.params]
    try:
        camera = _turn_camera(_camera([str(value) for value in fields], image.name), turn)
    except DataError:
        camera = None
    if turn is not None:
        points = points @ turn.pixels[:2, :2].T + turn.pixels[:2, 2]
        pose, size = turn.camera @ pose, turn.size
    return ModelImage(
        size=size,
        points=points,
        point_ids=np.array([point.point3D_id for point in seen], dtype=np.int64),
        cam_from_world=pose,
        camera=None if camera is None else replace(camera, cam_from_world=pose),
    )


def from_colmap_pixels(K: npt.ArrayLike) -> FloatArray:
    """COLMAP's K (3, 3) in our pixels."""
    shifted = np.array(K, dtype=np.float64)
    shifted[:2, 2] -= _HALF_PX
    return shifted


def _find(name: str, known: Sequence[str], path: Path) -> str:
    """The known name that is `name`, else the only one with the same last part."""
    if name in known:
        return name
    candidates = [other for other in known if Path(other).name == Path(name).name]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise DataError(f"{path} has several pictures called {Path(name).name}; name {name} as it is there.")
    raise DataError(f"{path} has no camera for {name}; add it, or leave the cameras file out.")


def _read_cameras_txt(path: Path) -> dict[int, Camera]:
    cameras = {}
    for number, line in _lines(path):
        if not line:
            continue
        fields = line.split()
        try:
            cameras[int(fields[0])] = _camera(fields, f"{path}, line {number}")
        except (ValueError, IndexError) as error:
            raise DataError(
                f"{path}, line {number}: not a camera; write CAMERA_ID MODEL WIDTH HEIGHT PARAMS."
            ) from error
    if not cameras:
        raise DataError(f"{path} holds no camera; write CAMERA_ID MODEL WIDTH HEIGHT PARAMS.")
    return cameras


def _camera(fields: Sequence[str], where: str) -> Camera:
    """A camera from CAMERA_ID MODEL WIDTH HEIGHT PARAMS."""
    model, width, height = fields[1], int(fields[2]), int(fields[3])
    params = [float(value) for value in fields[4:]]
    if model not in _MODELS:
        raise DataError(f"{where}: the camera model {model} is not supported; undistort the pictures first.")
    focals, distortions = _MODELS[model]
    if len(params) != focals + 2 + distortions:
        raise DataError(
            f"{where}: {model} has {focals + 2 + distortions} parameters, not {len(params)}; mend the line."
        )
    refuse_distortion(params[focals + 2 :], where)
    fx, fy = params[0], params[focals - 1]
    cx, cy = params[focals] - _HALF_PX, params[focals + 1] - _HALF_PX
    return Camera(width=width, height=height, K=np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]]), source="file")


def _read_images_txt(path: Path) -> dict[str, _ImageEntry]:
    """Every second line is a picture: IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME; the others are its points."""
    entries = {}
    lines = list(_lines(path))
    # A picture without points is followed by an empty line, so empty lines count, but not at the very start.
    while lines and not lines[0][1]:
        del lines[0]
    for number, line in lines[::2]:
        if not line:
            continue
        fields = line.split(maxsplit=9)
        try:
            pose = np.column_stack(
                [rotation_from_quaternion([float(v) for v in fields[1:5]]), [float(v) for v in fields[5:8]]]
            )
            entries[fields[9]] = _ImageEntry(camera_id=int(fields[8]), cam_from_world=pose)
        except (ValueError, IndexError) as error:
            raise DataError(f"{path}, line {number}: not a picture; export the model from COLMAP again.") from error
    return entries


def _lines(path: Path) -> list[tuple[int, str]]:
    """The stripped lines of a text file with their numbers, without comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text ({error}); export it from COLMAP as text.") from error
    numbered = enumerate((line.strip() for line in text.splitlines()), start=1)
    return [(number, line) for number, line in numbered if not line.startswith("#")]


def rotation_from_quaternion(quaternion: Sequence[float]) -> FloatArray:
    """The rotation (3, 3) of a quaternion (w, x, y, z)."""
    norm = np.linalg.norm(quaternion)
    if not norm > 0:
        raise ValueError("a quaternion of length 0")
    w, x, y, z = np.asarray(quaternion) / norm
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
