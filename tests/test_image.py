"""Tests of reading images: all kinds become upright RGB; errors for other files include a remedy."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import texture, tiny_matcher
from PIL import Image

from dualrc.errors import ImageError
from dualrc.image import read

RGB = texture(0, 64, 48)
GREY = RGB[:, :, 0].copy()


def saved(tmp_path, image, name="image.png", **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def mode(path) -> str:
    with Image.open(path) as image:
        return image.mode


@pytest.mark.parametrize("ending", ["png", "bmp", "tiff", "webp", "ppm"])
def test_files_without_loss(tmp_path, ending):
    options = {"lossless": True} if ending == "webp" else {}
    path = saved(tmp_path, Image.fromarray(RGB), f"a.{ending}", **options)
    for image in (path, str(path)):
        result = read(image)
        assert result.dtype == np.uint8 and np.array_equal(result, RGB)


def test_jpeg_is_close(tmp_path):
    result = read(saved(tmp_path, Image.fromarray(RGB), "a.jpg", quality=95))
    assert np.abs(result.astype(int) - RGB).mean() < 5


def test_images_in_memory():
    expected = np.repeat(GREY[:, :, None], 3, axis=2)
    for same in (
        Image.fromarray(RGB),
        RGB,
        RGB.astype(np.uint16) * 257,
        (RGB / 255).astype(np.float64),
        (RGB / 255).astype(np.float16),
        torch.from_numpy(RGB).permute(2, 0, 1),
        torch.from_numpy(RGB).permute(2, 0, 1)[None].float() / 255,
        RGB[::-1][::-1],  # with negative strides on the way
        np.asfortranarray(RGB),
        np.asarray(Image.fromarray(RGB)),
    ):
        assert np.array_equal(read(same), RGB)
    for grey in (Image.fromarray(GREY), GREY, GREY[:, :, None], torch.from_numpy(GREY), torch.from_numpy(GREY)[None]):
        assert np.array_equal(read(grey), expected)
    assert np.array_equal(read(torch.from_numpy(RGB / 255).permute(2, 0, 1).requires_grad_()), RGB)


def test_bool_images(tmp_path):
    black_and_white = GREY > 128
    expected = np.repeat(black_and_white[:, :, None] * np.uint8(255), 3, axis=2)
    assert np.array_equal(read(black_and_white), expected)
    path = saved(tmp_path, Image.fromarray(black_and_white))
    assert mode(path) == "1"
    assert np.array_equal(read(path), expected)


def test_alpha_lies_on_white(tmp_path):
    alpha = np.zeros((48, 64, 1), np.uint8)
    alpha[:24], alpha[24:36] = 255, 128
    rgba = np.concatenate([RGB, alpha], axis=2)
    half = np.round(RGB[24:36] * (128 / 255) + 255 * (127 / 255))
    grey_alpha = Image.fromarray(GREY).convert("LA")
    grey_alpha.putalpha(Image.fromarray(alpha[:, :, 0]))
    for image in (
        rgba,
        rgba / 255,
        torch.from_numpy(rgba).permute(2, 0, 1),
        Image.fromarray(rgba),
        saved(tmp_path, Image.fromarray(rgba)),
    ):
        result = read(image)
        assert result.shape == (48, 64, 3)
        assert np.array_equal(result[:24], RGB[:24]) and (result[36:] == 255).all()
        assert np.abs(result[24:36] - half).max() <= 1
    result = read(saved(tmp_path, grey_alpha, "grey.png"))
    assert np.array_equal(result[:24, :, 1], GREY[:24]) and (result[36:] == 255).all()


def test_palettes(tmp_path):
    palette = Image.fromarray(RGB).quantize(16)
    colors = np.array(palette.convert("RGB"))
    path = saved(tmp_path, palette)
    assert mode(path) == "P"
    assert np.array_equal(read(path), colors) and np.array_equal(read(palette), colors)
    index = np.array(palette)
    clear = int(index[0, 0])
    for transparency in (clear, bytes(0 if i == clear else 255 for i in range(16))):
        result = read(saved(tmp_path, palette, transparency=transparency))
        assert (result[index == clear] == 255).all()
        assert np.array_equal(result[index != clear], colors[index != clear])


def test_deep_grey(tmp_path):
    deep = (np.arange(48 * 64, dtype=np.uint16) * 21).reshape(48, 64)
    path = saved(tmp_path, Image.fromarray(deep))
    assert mode(path).startswith("I;16")
    expected = np.round(deep / 257).astype(int)
    for image in (path, deep, Image.fromarray(deep), saved(tmp_path, Image.fromarray(deep), "deep.tiff")):
        assert np.abs(read(image)[:, :, 2].astype(int) - expected).max() <= 1
    assert np.array_equal(read(path), read(deep))  # a file and its array give the same image
    assert read(path).max() > 240


def test_float_tiff(tmp_path):
    unit = (GREY / 255).astype(np.float32)
    assert np.array_equal(read(saved(tmp_path, Image.fromarray(unit), "a.tiff"))[:, :, 0], GREY)
    large = unit * 1000 / unit.max()  # depths, say: scaled by their maximum
    assert read(saved(tmp_path, Image.fromarray(large), "b.tiff")).max() == 255
    for bad in (np.nan, np.inf):
        broken = unit.copy()
        broken[3, 4] = bad
        with pytest.raises(ImageError, match="NaN or infinite"):
            read(saved(tmp_path, Image.fromarray(broken), "c.tiff"))
    with pytest.raises(ImageError, match="NaN or infinite"):
        read(saved(tmp_path, Image.fromarray(unit * np.nan), "d.tiff"))


def test_cmyk_jpeg(tmp_path):
    path = saved(tmp_path, Image.fromarray(RGB).convert("CMYK"), "a.jpg", quality=98)
    assert mode(path) == "CMYK"
    assert np.abs(read(path).astype(int) - RGB).mean() < 6


UPRIGHT = {  # what each EXIF orientation asks a viewer to do with the stored pixels
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, Image.fromarray(RGB), exif=exif)
    assert np.array_equal(read(path), UPRIGHT[orientation](RGB))
    with Image.open(path) as image:
        assert np.array_equal(read(image), UPRIGHT[orientation](RGB))
    matcher = tiny_matcher()
    assert matcher.features(path).size == ((64, 48) if orientation < 5 else (48, 64))


def test_a_damaged_exif_block_does_not_matter(tmp_path):
    path = saved(tmp_path, Image.fromarray(RGB), "a.jpg", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x05\x00\x12\x01")
    with pytest.warns(UserWarning, match=r"a\.jpg has damaged EXIF data"):
        assert read(path).shape == (48, 64, 3)


def bomb(width: int, height: int) -> bytes:
    """Return a tiny PNG that claims this number of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(RGB).save(buffer, kind)
    return buffer.getvalue()


BAD_FILES = {
    "empty": (b"", "empty or not an image"),
    "text": (b"hello, I am a text file\n" * 20, "empty or not an image"),
    "truncated jpeg": (encoded("JPEG")[:-200], "truncated: copy it again"),
    "truncated png": (encoded("PNG")[:-200], "truncated: copy it again"),
    "png header": (encoded("PNG")[:30], "an image|decode"),
    "bomb": (bomb(60000, 60000), "more pixels than can be decoded safely; scale it down"),
    "broken png": (encoded("PNG")[:200] + b"garbage" + encoded("PNG")[200:], "may be truncated: copy it again"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files(tmp_path, kind):
    content, message = BAD_FILES[kind]
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=rf"bad\.jpg.*({message})") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(ImageError, match=r"none\.jpg does not exist; check the path"):
        read(tmp_path / "none.jpg")
    with pytest.raises(ImageError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(ImageError):
        read(tmp_path / ("x" * 300))
    with pytest.raises(ImageError, match="is a folder"):
        read("")


def test_a_lazy_image_that_turns_out_broken():
    with pytest.raises(ImageError, match="Cannot decode"):
        read(Image.open(io.BytesIO(encoded("JPEG")[:-200])))
    closed = Image.fromarray(RGB)
    closed.close()
    with pytest.raises(ImageError, match="Cannot decode"):
        read(closed)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((48, 64, 3), np.nan), "NaN or infinite values; replace"),
        (np.full((48, 64), np.inf, np.float32), "NaN or infinite"),
        (torch.full((3, 48, 64), torch.nan), "NaN or infinite"),
        (RGB.astype(np.float32), "must range from 0 to 1, not .*; scale it, or give uint8"),
        (RGB / 255 - 0.5, "must range from 0 to 1"),
        (RGB.astype(np.int64), "int64 is ambiguous; give uint8"),
        (RGB.astype(np.int8), "int8 is ambiguous"),
        (RGB.astype(complex), "complex128 is ambiguous"),
        (np.zeros((48, 64, 2), np.uint8), "not an image; give"),
        (np.zeros((3, 48, 64), np.uint8), "not an image"),  # channels first is for tensors
        (torch.zeros(48, 64, 3, dtype=torch.uint8), "not an image"),
        (np.zeros((2, 3, 48, 64), np.uint8), "not an image"),
        (torch.zeros(2, 3, 48, 64), "not an image"),
        (np.zeros(10, np.uint8), "not an image"),
        (np.zeros((0, 5, 3), np.uint8), "not an image"),
        (np.zeros((), np.uint8), "not an image"),
        (np.array([["a", "b"]] * 2), "ambiguous"),
        (None, "a path, PIL image, array or tensor, not as NoneType"),
        (b"bytes", "not as bytes"),
        ([[1, 2], [3, 4]], "not as list"),
    ],
)
def test_things_that_are_no_images(image, message):
    with pytest.raises(ImageError, match=message):
        read(image)


@pytest.mark.parametrize("size", [(1, 1), (15, 4000), (4000, 15), (31, 100)])
def test_images_too_small_for_the_network(size):
    matcher = tiny_matcher()
    small = np.zeros((size[1], size[0], 3), np.uint8)
    with pytest.raises(ImageError, match=f"{size[0]}x{size[1]} pixels is too small or too thin"):
        matcher.match(small, RGB)
    with pytest.raises(ImageError, match="too small or too thin"):
        matcher.match(RGB, Image.fromarray(small))


def test_half_precision_tensors():
    tensor = torch.from_numpy(RGB).permute(2, 0, 1) / 255
    assert np.array_equal(read(tensor.half()), RGB)
    assert np.abs(read(tensor.bfloat16()).astype(int) - RGB).max() <= 1


def test_read_only_arrays_give_no_warning():
    frozen = RGB.copy()
    frozen.flags.writeable = False
    matcher = tiny_matcher()
    assert len(matcher.match(frozen, np.broadcast_to(GREY[:, :, None], (48, 64, 3)))) >= 0


def test_reading_does_not_change_the_image():
    array, floats = RGB.copy(), RGB / 255
    read(array)
    read(floats)
    tiny_matcher().features(array)
    assert np.array_equal(array, RGB) and np.array_equal(floats, RGB / 255)
