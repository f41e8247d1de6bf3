"""Picture files: the formats that are opened, and EXIF data that may be damaged."""

import operator
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from PIL import ExifTags, Image, UnidentifiedImageError

from dualrc.errors import ImageError

# The formats that photographs come in, by Pillow's names, and how names of such files end. Nothing else is opened:
# Pillow knows some forty more, of which some start other programs and many are hardly ever tested.
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),  # with MPO, JPEGs of several views; the first is read
    "PNG": (".png",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "JPEG2000": (".jp2", ".j2k"),
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif", ".hif"),
}
SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
# Formats that need more than Pillow's smallest build, and how to get it.
_REMEDIES = {
    "HEIF": "pip install 'dualrc[heif]'",
    "AVIF": "pip install --upgrade Pillow",
    "WEBP": "install a Pillow with WebP",
    "JPEG2000": "install a Pillow with JPEG 2000",
}
# The third field of an ISO media file's first box, for what can't be opened here.
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "HEIF"
)
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = ExifTags.Base.Orientation
# Filters of warnings belong to all threads, so that only one at a time may change them.
_LOCK = threading.Lock()


class Exif(NamedTuple):
    """What EXIF data tells."""

    orientation: int = 1  # 1 to 8
    tags: Mapping[int, Any] = {}  # of the camera


@cache
def formats() -> tuple[str, ...]:
    """The formats that can be opened here, by Pillow's names."""
    Image.init()
    try:
        import pillow_heif

        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    # A plugin whose decoder was not compiled in answers with a sentence in place of a refusal.
    return tuple(name for name in _SUFFIXES if name in Image.OPEN and _has_decoder(name))


def leave_out(names: Iterable[str], where: str | Path) -> tuple[list[str], str]:
    """The names of pictures that can be opened here, and in one line why others can't."""
    absent = {suffix: name for name in _SUFFIXES if name not in formats() for suffix in _SUFFIXES[name]}
    kept, left_out = [], Counter[str]()
    for name in names:
        if (missing := absent.get(Path(name).suffix.lower())) is None:
            kept.append(name)
        else:
            left_out[missing] += 1
    reasons = [f"{count} {name} picture{'s' * (count > 1)} ({_REMEDIES[name]})" for name, count in left_out.items()]
    return kept, f"{where}: can't read {' and '.join(reasons)}; or convert to JPEG." if reasons else ""


def open_picture(source: str | Path | IO[bytes], name: str, only: tuple[str, ...] | None = None) -> Image.Image:
    """A picture of an allowed format, or of those in `only`, not yet decoded; an ImageError says what else it is."""
    try:
        with _pillow_warnings() as complaints:
            image = Image.open(source, formats=only or formats())
    except FileNotFoundError as error:
        raise ImageError(f"{name} does not exist; check the path.") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} has more pixels than can be decoded safely; scale it down first.") from error
    except UnidentifiedImageError as error:
        raise ImageError(_refusal(source, name)) from error
    except Exception as error:  # a damaged file can fail in any way
        raise undecodable(name, error) from error
    try:
        _warn_of_exif(name, complaints)  # of a JPEG they are read at once
    except Warning:  # where warnings are errors
        image.close()
        raise
    return image


def undecodable(name: str, error: Exception) -> ImageError:
    """The error for whatever a decoder raised."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ImageError(f"{name} can't be decoded ({reason}); it may be truncated: copy it again.")


def upright(image: Image.Image, name: str) -> Image.Image:
    """Decode a picture and rotate it as its EXIF orientation says."""
    if image.format == "PNG":
        image.load()  # its EXIF data may come after the pixels
    orientation = read_exif(image, name).orientation
    image.load()
    if image.format == "TIFF":  # decoding it has rotated it, and removed the tag
        orientation = read_exif(image, name).orientation
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def read_exif(image: Image.Image, name: str) -> Exif:
    """EXIF data of an opened picture; what is damaged counts as absent, with a warning."""
    orientation: int | None = None
    tags: Mapping[int, Any] | None = None
    with _pillow_warnings() as complaints:
        # Pillow hardly checks these data, and reading them can fail in any way.
        with suppress(Exception):
            orientation = operator.index(image.getexif().get(_ORIENTATION, 1))
        with suppress(Exception):
            tags = image.getexif().get_ifd(ExifTags.IFD.Exif)
        if image.format == "TIFF" and (orientation is None or tags is None):
            # Decoding it reads them again.
            exif = image.getexif()
            for tag in [tag for tag in exif if tag != _ORIENTATION or orientation is None]:
                del exif[tag]
    _warn_of_exif(name, complaints, damaged=orientation is None or tags is None)
    # 0 and values above 8 have no meaning, and some programs write them.
    return Exif(orientation if orientation in _UPRIGHT else 1, tags or {})


@contextmanager
def _pillow_warnings() -> Iterator[list[str]]:
    """Collects what Pillow warns of: damaged EXIF data, without a name, and large pictures, which are welcome here."""
    told: list[str] = []
    with _LOCK, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
        told += [str(warning.message) for warning in caught]


def _warn_of_exif(name: str, complaints: Iterable[str], *, damaged: bool = False) -> None:
    if damaged or any(
        re.search("corrupt|truncated|skipping tag|tag offset", complaint, re.IGNORECASE) for complaint in complaints
    ):
        remedy = "where they matter, write them again, or give the camera"
        warn_once(f"{name} has damaged EXIF data; what can't be read of them is ignored: {remedy}.")


@lru_cache(maxsize=4096)
def warn_once(message: str) -> None:
    """Warn of a file that may be opened several times."""
    warnings.warn(message, stacklevel=2)


def _has_decoder(name: str) -> bool:
    from PIL import features

    modules = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000", "JPEG": "jpg"}
    return name not in modules or features.check(modules[name]) is True


def _refusal(source: str | Path | IO[bytes], name: str) -> str:
    """Why a file is not opened."""
    start = b""
    if isinstance(source, (str, Path)):
        with suppress(OSError), Path(source).open("rb") as file:
            start = file.read(12)
    brand = _BRANDS.get(start[8:12]) if start[4:8] == b"ftyp" else None
    if brand is not None and brand not in formats():
        return f"{name} is a {brand} picture, which can't be read here: {_REMEDIES[brand]}, or convert it to JPEG."
    return f"{name} is empty or not a picture of a known format; give a JPEG, PNG, TIFF, WebP or another picture file."
