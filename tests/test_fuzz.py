"""Tests of damaged and malicious images: only our own errors occur, and broken EXIF data does not affect an image."""

import collections
import io
import itertools
import struct
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import texture, tiny_config
from PIL import ExifTags, Image
from rich.console import Console

from dualrc import cli, formats
from dualrc.data import PhotosConfig
from dualrc.errors import DataError, DualRCError, ImageError
from dualrc.geometry import camera_from_exif, read_depth_m
from dualrc.image import find_images, read, read_header
from dualrc.toml import to_toml
from dualrc.train import TrainConfig

RGB = texture(0, 64, 48)
# Number of damaged files per format: some thousand in a few seconds.
CASES = 150
ENDINGS = {"JPEG": "jpg", "PNG": "png", "TIFF": "tif", "WEBP": "webp", "BMP": "bmp", "GIF": "gif", "PPM": "ppm"} | {
    "JPEG2000": "jp2",
    "AVIF": "avif",
    "HEIF": "heic",
}
# Pillow opens these formats too, but photos do not use them.
REFUSED = ("DDS", "EPS", "ICO", "PCX", "QOI", "SGI", "TGA", "XBM")


def camera_exif() -> bytes:
    """Return EXIF data with an orientation, a maker and a focal length."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = 6, "maker"
    exif.get_ifd(ExifTags.IFD.Exif).update({0x920A: 35.0, 0xA405: 35})
    return exif.tobytes()


def encoded(kind: str, exif: bytes | None = None, size: int = 1) -> bytes:
    buffer = io.BytesIO()
    options = {} if exif is None or kind in ("BMP", "GIF", "PPM", "JPEG2000") else {"exif": exif}
    image = Image.fromarray(RGB)
    image.resize((64 * size, 48 * size)).save(buffer, kind, **options)
    return buffer.getvalue()


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    """Change some bytes, mostly in the headers, and truncate a third of the files."""
    data = bytearray(whole if rng.random() > 1 / 3 else whole[: rng.integers(len(whole))])
    for _ in range(int(rng.integers(1, 8))):
        if data:
            reach = min(len(data), 400) if rng.random() < 0.5 else len(data)
            data[int(rng.integers(reach))] = int(rng.integers(256))
    return bytes(data)


def outcome(function, path: Path) -> str:
    """Return "fine" or "refused"; any error but our own fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(path)
        except DualRCError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            return "refused"
    return "fine"


@pytest.mark.parametrize("kind", ENDINGS)
def test_damaged_files(tmp_path, kind):
    if kind not in formats.formats():
        pytest.skip(f"Pillow can't read {kind} here")
    rng = np.random.default_rng(list(ENDINGS).index(kind))
    whole, path = encoded(kind, camera_exif()), tmp_path / f"damaged.{ENDINGS[kind]}"
    path.write_bytes(whole)
    assert outcome(read, path) == outcome(camera_from_exif, path) == "fine"
    found = collections.Counter()
    for number in range(CASES):
        path.write_bytes(damaged(whole, rng))
        functions = (read, camera_from_exif) if number % 5 else (read, camera_from_exif, read_header, read_depth_m)
        found.update(outcome(function, path) for function in functions)
    assert min(found["fine"], found["refused"]) > CASES // 20  # the damage is neither harmless nor total


def exif_block(*entries: tuple[int, int, int, bytes], order: str = "<") -> bytes:
    """Return EXIF data with these entries: tag, type, count, and four bytes of value or offset."""
    packed = b"".join(struct.pack(f"{order}HHI", *entry[:3]) + entry[3] for entry in entries)
    head = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + head + struct.pack(f"{order}IH", 8, len(entries)) + packed + bytes(4)


TAGS = (0x0112, 0x011A, 0x0128, 0x8769, 0x8825, 0x010F)  # orientation, resolution and unit, two tables, maker
VALUES = (struct.pack("<I", 8), struct.pack("<I", 0xFFFFFFF0))  # the second is an offset far beyond the end


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_of_every_type_costs_no_image(tmp_path, kind):
    path = tmp_path / f"a.{ENDINGS[kind]}"
    path.write_bytes(encoded(kind))
    plain = read(path)
    for tag, type_, count, value in itertools.product(TAGS, (*range(15), 99), (0, 1, 0xFFFFFFFF), VALUES):
        path.write_bytes(encoded(kind, exif_block((tag, type_, count, value))))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pixels, header = read(path), read_header(path)
            assert camera_from_exif(path) is None
        # The orientation is 8 if type and count are valid.
        assert header.orientation in ((1, 8) if tag == 0x0112 else (1,))
        expected = np.rot90(plain) if header.orientation == 8 else plain
        assert np.array_equal(pixels, expected), (tag, type_, count, value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_broken_exif_is_told_once(tmp_path, kind):
    path, sound = tmp_path / f"broken.{ENDINGS[kind]}", tmp_path / f"sound.{ENDINGS[kind]}"
    sound.write_bytes(encoded(kind, camera_exif()))
    whole = encoded(kind, camera_exif())
    # The offset of the camera tags is far beyond the end.
    pointer = struct.pack("<HHI", 0x8769, 4, 1) if struct.pack("<HHI", 0x8769, 4, 1) in whole else None
    pointer = pointer or struct.pack(">HHI", 0x8769, 4, 1)
    start = whole.index(pointer) + len(pointer)
    path.write_bytes(whole[:start] + b"\x7f\xff\xff\xff" + whole[start + 4 :])
    if kind == "PNG":  # its checksum is that of the sound data
        path.write_bytes(repair_png(path.read_bytes()))
    with pytest.warns(UserWarning, match=rf"broken\.{ENDINGS[kind]} has damaged EXIF data; unreadable .* ignored"):
        pixels = read(path)
    assert np.array_equal(pixels, read(sound))  # the orientation before the damage is taken
    assert read_header(path).orientation == 6 and camera_from_exif(path) is None  # no second warning
    assert camera_from_exif(sound) is not None


def repair_png(data: bytes) -> bytes:
    """Return a PNG with correct checksums."""
    out, at = data[:8], 8
    while at < len(data):
        length = struct.unpack(">I", data[at : at + 4])[0]
        chunk = data[at + 4 : at + 8 + length]
        out += data[at : at + 4] + chunk + struct.pack(">I", zlib.crc32(chunk))
        at += 12 + length
    return out


@pytest.mark.parametrize("kind", REFUSED)
def test_formats_of_no_photograph_are_not_opened(tmp_path, kind):
    path = tmp_path / "image.png"  # the name says nothing
    image = Image.fromarray(RGB)
    (image.convert("1") if kind == "XBM" else image).save(path, kind)
    with pytest.raises(ImageError, match=r"image\.png is empty or not an image of a known format; give a JPEG"):
        read(path)
    assert read_header(path) is None


def test_other_endings_than_the_content_do_not_matter(tmp_path):
    path = tmp_path / "image.gif"
    path.write_bytes(encoded("PNG"))
    assert np.array_equal(read(path), RGB)


def test_a_heic_image_without_its_extra(tmp_path, monkeypatch):
    """The error names the format and the extra to install; in a folder once."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    formats.formats.cache_clear()
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)
    try:
        for name in ("1.heic", "2.HEIC"):
            (tmp_path / name).write_bytes(struct.pack(">I", 24) + b"ftypheic" + bytes(12))
        with pytest.raises(ImageError, match=r"1\.heic is a HEIF image, .*pip install 'dualrc\[heif\]', or convert"):
            read(tmp_path / "1.heic")
        with pytest.raises(DataError, match=r"cannot read 2 HEIF images \(pip install 'dualrc\[heif\]'\)"):
            find_images(tmp_path)
        (tmp_path / "3.png").write_bytes(encoded("PNG"))
        with pytest.warns(UserWarning, match="cannot read 2 HEIF images"):
            assert find_images(tmp_path) == ["3.png"]
        assert find_images(tmp_path) == ["3.png"]  # told once
    finally:
        formats.formats.cache_clear()
        monkeypatch.undo()
        formats.formats()


def test_a_heic_image(tmp_path):
    pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    (tmp_path / "a.heic").write_bytes(encoded("HEIF", camera_exif(), size=2))
    assert find_images(tmp_path) == ["a.heic"]
    pixels = read(tmp_path / "a.heic")
    assert pixels.shape == (128, 96, 3)  # on its side
    whole = np.asarray(Image.fromarray(RGB).resize((128, 96)))
    assert np.abs(np.rot90(pixels).astype(int) - whole).mean() < 12
    assert camera_from_exif(tmp_path / "a.heic").size == (96, 128)


def test_threads_leave_the_filters_of_warnings_alone(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded("JPEG", camera_exif()))
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, [path] * 200))
    assert warnings.filters == before


# Commands on folders in which most images are damaged.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write two intact images, and one with each kind of damage per format."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(5)
    for number in range(2):
        Image.fromarray(texture(number, 96, 80)).save(root / f"sound{number}.png")
    for kind in formats.formats():
        (root / f"flipped.{ENDINGS[kind]}").write_bytes(damaged(encoded(kind, camera_exif(), size=2), rng))
    broken = exif_block((0x0112, 12, 0xFFFFFFFF, VALUES[1]), (0x8769, 5, 3, VALUES[1]))
    (root / "exif.jpg").write_bytes(encoded("JPEG", broken, size=2))
    return root


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command line as a shell would; return status and error output, which is never a traceback."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dualrc", *map(str, arguments)])
        for name in ("screen", "messages"):
            monkeypatch.setattr(cli.common, name, Console(stderr=name == "messages", width=300))
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stopped:
            warnings.simplefilter("default")
            cli.main()
        errors = capfd.readouterr().err
        assert "Traceback" not in errors, errors
        return int(stopped.value.code or 0), errors

    return call


def test_match_of_damaged_images(run, weights, folder):
    for path in sorted(folder.iterdir()):
        status, errors = run("match", folder / "sound0.png", path, "--weights", weights)
        assert status == 0 or ("Error: " in errors and str(path) in errors)
        assert path.stem != "sound1" or (status == 0 and str(path) not in errors)
        assert path.stem != "exif" or (status == 0 and f"Note: {path} has damaged EXIF data" in errors)


def test_collection_and_reconstruction_of_damaged_images(run, weights, folder, tmp_path):
    pytest.importorskip("pycolmap", reason="pycolmap is not installed")
    settings = ("--out", tmp_path / "out", "--weights", weights, "--workers", 1, "--device", "cpu", "--top", 50)
    status, errors = run("collection", folder, *settings)
    assert status == 0, errors
    status, errors = run("reconstruct", folder, *settings)
    assert status == 0 or "Error: " in errors.splitlines()[-1], errors


def test_localization_of_damaged_images(run, weights, folder, tmp_path):
    for name in ("images", "depth"):
        (tmp_path / "map" / name).mkdir(parents=True)
    for number in range(3):
        Image.fromarray(texture(number, 96, 80)).save(tmp_path / "map" / "images" / f"{number}.png")
        # One depth map is intact, one is damaged and one is missing.
        if number < 2:
            whole = io.BytesIO()
            Image.fromarray(np.full((80, 96), 2000, np.uint16)).save(whole, "PNG")
            content = whole.getvalue()[: 60 if number else None]
            (tmp_path / "map" / "depth" / f"{number}.png").write_bytes(content)
    poses = "".join(f"{number}.png {' '.join(map(str, np.eye(4).ravel()))}\n" for number in range(3))
    (tmp_path / "map" / "world_from_cam.txt").write_text(poses)
    np.savetxt(tmp_path / "map" / "K.txt", [[90, 0, 48], [0, 90, 40], [0, 0, 1]])
    out = tmp_path / "poses.json"
    status, errors = run("localize", folder, "--map", tmp_path / "map", "--out", out, "--weights", weights)
    assert out.exists(), (status, errors)


def test_training_on_damaged_images(run, folder, tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    photos = (str(folder), str(folder))
    config = TrainConfig(
        data=(PhotosConfig(paths=photos, canvas=128),),
        **{"size": 64, "pairs": 2, "points": 32, "steps": 1, "warm_up": 1, "precision": "float32"},
        **{"network": tiny_config(subpixel_hidden=16), "validate_every": 1, "validation_batches": 1},
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    status, errors = run("train", tmp_path / "run.toml", "--out", tmp_path / "out", "--device", "cpu")
    assert status == 0 and (tmp_path / "out" / "weights.safetensors").exists(), errors
