"""Image file formats, and EXIF data that may be damaged."""

import io
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
from dualrc.files import one_line

# Supported formats by Pillow's names, and their file name suffixes.
# Pillow knows about forty more, of which some start other programs and many are hardly tested.
_SUFFIXES = {
    # Includes MPO, a JPEG with several views; the first view is read.
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
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
# Formats that need more than Pillow's minimal build, and how to get them.
_REMEDIES = {
    "HEIF": "pip install 'dualrc[heif]'",
    "AVIF": "pip install --upgrade Pillow",
    "WEBP": "install a Pillow with WebP",
    "JPEG2000": "install a Pillow with JPEG 2000",
}
# Major brands of ISO media files, to name a format that cannot be opened here.
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
# Warning filters are global to all threads, so only one thread at a time may change them.
_LOCK = threading.Lock()


class Exif(NamedTuple):
    """EXIF data of an image."""

    # 1 to 8
    orientation: int = 1
    # Tags of the camera.
    tags: Mapping[int, Any] = {}


@cache
def formats() -> tuple[str, ...]:
    """Return the formats that can be opened here, by Pillow's names."""
    Image.init()
    try:
        import pillow_heif

        pillow_heif.register_heif_opener()
    except ImportError:
        pass
    # A plugin without a compiled decoder registers itself but fails later, so the decoder is checked too.
    return tuple(name for name in _SUFFIXES if name in Image.OPEN and _has_decoder(name))


def leave_out(names: Iterable[str], where: str | Path) -> tuple[list[str], str]:
    """Return the names of images that can be opened here, and a one-line reason for the others."""
    absent = {suffix: name for name in _SUFFIXES if name not in formats() for suffix in _SUFFIXES[name]}
    kept, left_out = [], Counter[str]()
    for name in names:
        if (missing := absent.get(Path(name).suffix.lower())) is None:
            kept.append(name)
        else:
            left_out[missing] += 1
    reasons = [f"{count} {name} image{'s' * (count > 1)} ({_REMEDIES[name]})" for name, count in left_out.items()]
    return kept, f"{where}: cannot read {' and '.join(reasons)}; or convert to JPEG." if reasons else ""


def open_image(source: str | Path | IO[bytes], name: str, only: tuple[str, ...] | None = None) -> Image.Image:
    """Open an image of a supported format, or of those in `only`, without decoding it; else raise an ImageError."""
    try:
        with _pillow_warnings() as complaints:
            image = Image.open(source, formats=only or formats())
    except FileNotFoundError as error:
        raise ImageError(f"{name} does not exist; check the path.") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} has more pixels than can be decoded safely; scale it down first.") from error
    except UnidentifiedImageError as error:
        raise ImageError(_refusal(source, name)) from error
    except Exception as error:
        # Opening a damaged file can raise any exception.
        raise undecodable(name, error) from error
    try:
        # Pillow reads the EXIF data of a JPEG when it opens the file.
        _warn_of_exif(name, complaints)
    except Warning:
        # The warning was turned into an error.
        image.close()
        raise
    return image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as the content of a file; `kind` and `options` are those of Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def undecodable(name: str, error: Exception) -> ImageError:
    """Return an ImageError for an exception of a decoder."""
    return ImageError(f"Cannot decode {name} ({one_line(error)}); it may be truncated: copy it again.")


def upright(image: Image.Image, name: str) -> Image.Image:
    """Decode an image and rotate it by its EXIF orientation."""
    if image.format == "PNG":
        # EXIF data of a PNG may follow the pixels.
        image.load()
    orientation = read_exif(image, name).orientation
    image.load()
    # Decoding a TIFF rotates it and removes the tag.
    if image.format == "TIFF":
        orientation = read_exif(image, name).orientation
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def read_exif(image: Image.Image, name: str) -> Exif:
    """Return the EXIF data of an opened image; damaged data counts as absent, with a warning."""
    orientation: int | None = None
    tags: Mapping[int, Any] | None = None
    with _pillow_warnings() as complaints:
        # Pillow hardly validates EXIF data, and reading it can raise any exception.
        with suppress(Exception):
            orientation = operator.index(image.getexif().get(_ORIENTATION, 1))
        with suppress(Exception):
            tags = image.getexif().get_ifd(ExifTags.IFD.Exif)
        if image.format == "TIFF" and (orientation is None or tags is None):
            # Decoding reads the tags again, so remove the damaged ones.
            exif = image.getexif()
            for tag in [tag for tag in exif if tag != _ORIENTATION or orientation is None]:
                del exif[tag]
    _warn_of_exif(name, complaints, damaged=orientation is None or tags is None)
    # Some programs write 0 or values above 8, which are undefined.
    return Exif(orientation if orientation in _UPRIGHT else 1, tags or {})


@contextmanager
def _pillow_warnings() -> Iterator[list[str]]:
    """Collect Pillow's warnings: damaged EXIF data, and large images, which are supported here."""
    told: list[str] = []
    with _LOCK, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
        told += [str(warning.message) for warning in caught]


def _warn_of_exif(name: str, complaints: Iterable[str], *, damaged: bool = False) -> None:
    if damaged or re.search("corrupt|truncated|skipping tag|tag offset", "\n".join(complaints), re.IGNORECASE):
        remedy = "if it matters, write it again, or give the camera"
        warn_once(f"{name} has damaged EXIF data; unreadable parts are ignored: {remedy}.")


@lru_cache(maxsize=4096)
def warn_once(message: str) -> None:
    """Warn once per message, because a file may be opened several times."""
    warnings.warn(message, stacklevel=2)


def _has_decoder(name: str) -> bool:
    from PIL import features

    modules = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000", "JPEG": "jpg"}
    return name not in modules or features.check(modules[name]) is True


def _refusal(source: str | Path | IO[bytes], name: str) -> str:
    """Return the reason why a file is not opened."""
    start = b""
    if isinstance(source, (str, Path)):
        with suppress(OSError), Path(source).open("rb") as file:
            start = file.read(12)
    brand = _BRANDS.get(start[8:12]) if start[4:8] == b"ftyp" else None
    if brand is not None and brand not in formats():
        return f"{name} is a {brand} image, which cannot be read here: {_REMEDIES[brand]}, or convert it to JPEG."
    return f"{name} is empty or not an image of a known format; give a JPEG, PNG, TIFF, WebP or another image file."
