"""Tests of malicious files: huge counts, invalid offsets, names outside of the folder, links, and bombs.

Each reader rejects them with an error of this package, in little memory: the tests limit the address space.
"""

import gzip
import io
import json
import os
import pickle
import resource
import sqlite3
import struct
import tarfile
import zipfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import texture, tiny_network
from PIL import Image

from dualrc.collection.retrieval import read_descriptors
from dualrc.collection.store import MatchStore
from dualrc.config import MatcherConfig, NetworkConfig
from dualrc.data import read_photos
from dualrc.data.arrays import read_arrays, read_dataset
from dualrc.data.megadepth import read_depth_h5
from dualrc.data.pairsfile import read_pairs
from dualrc.errors import ConfigError, DataError, ImageError, WeightsError
from dualrc.evaluation.pose_data import read_index
from dualrc.files import inside, limit_zip, parse_json, read_text
from dualrc.geometry import read_cameras_json, read_rgbd
from dualrc.image import find_images, read
from dualrc.matches import Matches
from dualrc.model.checkpoint import convert_published, load_pickle, load_weights, read_config, save_weights
from dualrc.toml import from_dict, read_toml, to_dict

GIB = 1 << 30
OUTSIDE = ("../secret.png", "deep/../../secret.png", "/etc/secret.png")
DEEP = "[" * 100_000 + "]" * 100_000


@contextmanager
def little_memory(more: int = 2 * GIB):
    """Limit the address space beyond current use, so that a bomb fails here and not on the machine."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(autouse=True)
def _limits():
    # On systems other than Linux the tests run without the limit.
    with little_memory() if Path("/proc/self/statm").exists() else nullcontext():
        yield


def npy_header(shape, dtype="<f4") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def write_npz(path, **members: bytes):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def lie_about_size(path, size: int):
    """Make the members of a zip file claim to unpack to `size` bytes each, in both of its tables."""
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        at = data.find(signature)
        while at >= 0:
            data[at + offset : at + offset + 4] = struct.pack("<I", size)
            at = data.find(signature, at + 4)
    path.write_bytes(data)
    return path


# Names.


@pytest.mark.parametrize("name", [*OUTSIDE, "..", "a/..", "nul\0.png"])
def test_names_that_lead_out_of_the_folder(tmp_path, name):
    with pytest.raises(DataError, match=r"leads outside .*give names relative"):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a.png", "deep/a.png", "..a.png", "a..b/c.png", "5:30 h.png"])
def test_names_inside_the_folder(tmp_path, name):
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_in_pairs_files_and_frames(tmp_path, name):
    (tmp_path / "images").mkdir()
    Image.fromarray(texture(0, 64, 64)).save(tmp_path / "secret.png")
    (tmp_path / "pairs.txt").write_text(f"a.png {name} 1 2 3 4\n")
    with pytest.raises(DataError, match="leads outside"):
        read_pairs(tmp_path / "pairs.txt", tmp_path / "images")[0].load()
    (tmp_path / "K.txt").write_text("1 0 0 0 1 0 0 0 1")
    (tmp_path / "world_from_cam.txt").write_text(f"{name} {' '.join(map(str, np.eye(4).ravel()))}\n")
    with pytest.raises(DataError, match="leads outside"):
        read_rgbd(tmp_path)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_in_colmap_models(tmp_path, name):
    pytest.importorskip("pycolmap", reason="pycolmap is not installed")
    from dualrc.colmap import read_model

    (tmp_path / "cameras.txt").write_text("1 PINHOLE 64 48 100 100 32 24\n")
    (tmp_path / "images.txt").write_text(f"1 1 0 0 0 0 0 0 1 {name}\n\n")
    (tmp_path / "points3D.txt").write_text("")
    with pytest.raises(DataError, match="leads outside"):
        read_model(tmp_path)


# Text: JSON, TOML and plain.


def test_json_that_is_nested_too_deeply(tmp_path):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    (tmp_path / "deep.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"deep\.json .*nested too deeply"):
        read_cameras_json(tmp_path / "deep.json")
    with pytest.raises(DataError, match=r"deep\.json does not contain matches .*nested too deeply"):
        Matches.load(tmp_path / "deep.json")


def test_cameras_with_numbers_beyond_all_bounds(tmp_path):
    path = tmp_path / "cameras.json"
    for width in ("1e999", "NaN", "9" * 5000, '"wide"', "[]", "null"):
        path.write_text(f'{{"a": {{"width": {width}, "height": 1, "K": [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}}}}')
        with pytest.raises(DataError, match=r"cameras\.json"):
            read_cameras_json(path)


TOML = {
    "deep": "top = " + DEEP,
    "digits": "top = " + "9" * 10_000,
    "large": "# " + "x" * (1 << 20) + "\ntop = 1\n",
    "nul": "top = 1\0",
    "bytes": "top = '\udcff'",
    "tables": "\n".join(f"[{'a.' * 2000}b{number}]" for number in range(100)),
    "twice": "top = 1\ntop = 2",
    "type": "top = 1979-05-27",
    "infinite": "min_score = inf",
}


@pytest.mark.parametrize("kind", TOML)
def test_toml(tmp_path, kind):
    path = tmp_path / "config.toml"
    path.write_bytes(TOML[kind].encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError):
        read_toml(MatcherConfig, path)


def test_text_files_have_a_limit(tmp_path):
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(3 * GIB)  # holes, which take no room
    with pytest.raises(DataError, match="larger than 1024 MiB"):
        read_text(tmp_path / "large.txt")


# Arrays: .npz and HDF5.


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    members = dict.fromkeys(("points0", "points1", "scores", "header"), npy_header((1 << 26,)) + bytes(1 << 20))
    path = lie_about_size(write_npz(tmp_path / "bomb.npz", **members), 300 << 20)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"bomb\.npz does not contain matches .*GiB of memory"):
        Matches.load(path)
    with pytest.raises(ValueError, match=r"more than the 1\.0 allowed"):
        limit_zip(path, GIB)


def test_members_that_claim_more_than_all_memory(tmp_path):
    path = lie_about_size(write_npz(tmp_path / "a.npz", names=npy_header((3,)), more=b""), 0xFFFFFFF0)
    for read_it in (lambda: read_arrays(path, ["names"]), lambda: read_index(path)):
        with pytest.raises(DataError, match=r"a\.npz"):
            read_it()
    with pytest.raises(DataError, match="does not contain matches"):
        Matches.load(path)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 62, 1 << 62), (-1, 4), (5,), (0,)])
def test_arrays_whose_shape_is_not_that_of_their_data(tmp_path, shape):
    path = write_npz(tmp_path / "a.npz", names=npy_header(shape) + bytes(12))
    with pytest.raises(DataError, match=r"a\.npz"):
        read_arrays(path, ["names"])
    parts = dict.fromkeys(("points0", "points1", "scores", "header"), npy_header(shape) + bytes(12))
    with pytest.raises(DataError, match="does not contain matches"):
        Matches.load(write_npz(tmp_path / "m.npz", **parts))


class Evil:
    def __reduce__(self):
        return (exec, ("open('/tmp/dualrc-was-here', 'w')",))


def test_pickles_in_arrays_are_not_run(tmp_path):
    objects = np.array([Evil()], dtype=object)
    np.savez(tmp_path / "a.npz", points0=objects, points1=objects, scores=objects, header=objects, config=objects)
    with pytest.raises(DataError, match="does not contain matches"):
        Matches.load(tmp_path / "a.npz")
    with pytest.raises(DataError, match="not allowed here"):
        read_arrays(tmp_path / "a.npz", ["points0"])
    with pytest.raises(DataError, match="not allowed here"):
        read_index(tmp_path / "a.npz")
    assert read_descriptors(tmp_path / "a.npz", {}) == {}


def test_hdf5_with_huge_and_foreign_arrays(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.arange(64, dtype="<f4").tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["depth"] = np.ones((4, 4), np.float32)

    def make(name, fill):
        with h5py.File(tmp_path / name, "w") as file:
            fill(file)
        with pytest.raises(DataError, match=rf"{name} is damaged|{name} has an array"):
            read_depth_h5(tmp_path / name)

    # No data is written: the file has some kilobytes.
    make("huge.h5", lambda file: file.create_dataset("depth", (1 << 20, 1 << 20), "f4", chunks=(64, 64)))
    make(
        "bomb.h5", lambda file: file.create_dataset("depth", (1 << 15, 1 << 15), "f4", compression="gzip", fillvalue=1)
    )
    external = [(str(secret), 0, 256)]
    make("external.h5", lambda file: file.create_dataset("depth", (8, 8), "<f4", external=external))
    make("link.h5", lambda file: file.__setitem__("depth", h5py.ExternalLink(str(tmp_path / "other.h5"), "depth")))
    layout = h5py.VirtualLayout((4, 4), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "depth", (4, 4))
    make("virtual.h5", lambda file: file.create_virtual_dataset("depth", layout))
    make("group.h5", lambda file: file.create_group("depth"))
    make("loop.h5", lambda file: file.__setitem__("depth", h5py.SoftLink("/depth")))
    make("text.h5", lambda file: file.__setitem__("depth", "text"))
    make("line.h5", lambda file: file.__setitem__("depth", np.ones(5)))
    assert read_depth_h5(tmp_path / "other.h5").shape == (4, 4)
    with h5py.File(tmp_path / "other.h5") as file, pytest.raises(KeyError):
        read_dataset(file, "nothing")


# Tar files of photos.


def tar_of(path, *members: tuple[tarfile.TarInfo, bytes], mode="w"):
    with tarfile.open(path, mode) as archive:
        for info, content in members:
            info.size = info.size or len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def member(name: str, **fields) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(texture(seed, 96, 96)).save(buffer, "PNG")
    return buffer.getvalue()


def test_tar_files_with_links_and_foreign_names(tmp_path):
    Image.fromarray(texture(5, 96, 96)).save(tmp_path / "secret.png")
    link, hard = tarfile.SYMTYPE, tarfile.LNKTYPE
    path = tar_of(
        tmp_path / "a.tar",
        (member("good.png"), png()),
        # Read like any other member; nothing is unpacked.
        (member("../up.png"), png(1)),
        (member("/absolute.png"), png(2)),
        (member("link.png", type=link, linkname=str(tmp_path / "secret.png")), b""),
        (member("up.png", type=link, linkname="../secret.png"), b""),
        (member("self.png", type=link, linkname="self.png"), b""),
        (member("a.png", type=hard, linkname="b.png"), b""),
        (member("b.png", type=hard, linkname="a.png"), b""),
        (member("again.png", type=hard, linkname="good.png"), b""),
        (member("device.png", type=tarfile.CHRTYPE), b""),
        (member("pipe.png", type=tarfile.FIFOTYPE), b""),
    )
    before = sorted(tmp_path.rglob("*"))
    photos = read_photos([path], canvas=96)
    assert len(photos.canvases) == 3
    links = ("link.png", "up.png", "self.png", "a.png", "b.png", "again.png", "device.png", "pipe.png")
    assert photos.broken == links
    assert sorted(tmp_path.rglob("*")) == before


def test_tar_files_that_claim_too_much(tmp_path, monkeypatch):
    """A size beyond the end of the file, a header of gigabytes, and more zeros than an image may have."""
    with (tmp_path / "size.tar").open("wb") as file:
        file.write(member("large.png", size=1 << 40).tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(DataError, match=r"No photos could be read|size\.tar"):
        read_photos([tmp_path / "size.tar"], canvas=96)
    with gzip.open(tmp_path / "header.tar.gz", "wb", compresslevel=1) as file:
        file.write(member("pax", size=3 * GIB, type=tarfile.XHDTYPE).tobuf(tarfile.PAX_FORMAT))
        for _ in range(20):
            file.write(bytes(1 << 20))
    with pytest.raises(DataError, match=r"header\.tar\.gz is neither a folder nor a complete tar file"):
        read_photos([tmp_path / "header.tar.gz"], canvas=96)
    monkeypatch.setattr("dualrc.data.photos._MOST_BYTES", 1 << 20)
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as file:
        file.write(member("bomb.png", size=2 << 20).tobuf() + bytes(2 << 20))
        file.write(member("good.png", size=len(png())).tobuf() + png() + bytes(-len(png()) % 512 + 1024))
    photos = read_photos([tmp_path / "bomb.tar.gz"], canvas=96)
    assert len(photos.canvases) == 1 and photos.broken == ("bomb.png",)


def test_a_sparse_member_is_not_filled_with_its_holes(tmp_path):
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s.png"}
    holes = member("s.png", pax_headers={**sparse, "GNU.sparse.realsize": str(1 << 40)})
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        content = b"0\n".ljust(512, b"\0")
        holes.size = len(content)
        archive.addfile(holes, io.BytesIO(content))
        good = member("good.png", size=len(png()))
        archive.addfile(good, io.BytesIO(png()))
    photos = read_photos([path], canvas=96)
    assert len(photos.canvases) == 1 and photos.broken == ("s.png",)


# Weights and checkpoints.


def write_safetensors(path, header: dict, data: bytes = b""):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def metadata(**network) -> dict:
    config = to_dict(tiny_network().config) | network
    return {"__metadata__": {"format": "dualrc-1", "network": json.dumps(config)}}


LIES = {
    "overlap": {"a": ("F32", [4], [0, 16]), "b": ("F32", [4], [8, 24])},
    "out of range": {"a": ("F32", [4], [0, 1 << 40])},
    "backwards": {"a": ("F32", [4], [16, 0])},
    "hole": {"a": ("F32", [2], [16, 24])},
    "shape": {"a": ("F32", [1 << 40, 1 << 40], [0, 24])},
    "negative": {"a": ("F32", [-4], [0, 24])},
    "unknown type": {"a": ("EVIL", [6], [0, 24])},
}


@pytest.mark.parametrize("kind", LIES)
def test_weights_with_lying_offsets(tmp_path, kind):
    entries = {name: {"dtype": d, "shape": s, "data_offsets": o} for name, (d, s, o) in LIES[kind].items()}
    path = write_safetensors(tmp_path / "a.safetensors", metadata() | entries, bytes(24))
    with pytest.raises(WeightsError, match=r"a\.safetensors"):
        load_weights(path)


@pytest.mark.parametrize(
    "network",
    [
        {"backbone": {"kind": "compact", "widths": [10**9] * 5}},
        {"backbone": {"kind": "compact", "depths": [10**9] * 4}},
        {"backbone": {"kind": "compact", "coarse_channels": 10**12}},
        {"backbone": {"kind": "compact", "fine_channels": -1}},
        # A valid config, but its tensors are not in the file.
        {"backbone": {"kind": "compact", "widths": [4096] * 5, "depths": [64] * 4}},
        {"consensus": {"kernel_sizes": [10**6] * 2, "channels": [16, 1]}},
        {"consensus": {"kernel_sizes": [3] * 10**4, "channels": [16] * 10**4}},
        {"fine": {"subpixel_hidden": 10**10}},
    ],
    ids=lambda network: next(iter(network)),
)
def test_weights_whose_config_asks_for_a_giant(tmp_path, network):
    with pytest.raises(WeightsError, match=r"a\.safetensors"):
        load_weights(write_safetensors(tmp_path / "a.safetensors", metadata(**network)))


def test_weights_whose_header_lies(tmp_path):
    path = tmp_path / "a.safetensors"
    for length in (0, 1, 1 << 20, 1 << 40, (1 << 64) - 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(100))
        with pytest.raises(WeightsError, match=r"a\.safetensors"):
            read_config(path)
    deep = {"__metadata__": {"format": "dualrc-1", "network": DEEP}}
    with pytest.raises(WeightsError, match="nested too deeply"):
        read_config(write_safetensors(path, deep))


def test_unknown_tensors_are_not_read(tmp_path):
    """The names in the header are checked before any tensor is read."""
    save_weights(tiny_network(), tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, size = json.loads(data[8 : 8 + length]), len(data) - 8 - length
    more = 3 * GIB
    header["more"] = {"dtype": "U8", "shape": [more], "data_offsets": [size, size + more]}
    text = json.dumps(header).encode()
    with (tmp_path / "b.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data[8 + length :])
        file.truncate(8 + len(text) + size + more)
    with little_memory(8 * GIB), pytest.raises(WeightsError, match="has the unknown more"):
        load_weights(tmp_path / "b.safetensors")


def test_configs_have_bounds():
    config = to_dict(tiny_network().config)
    assert from_dict(NetworkConfig, config) == tiny_network().config
    with pytest.raises(ConfigError, match="widths contains 0: every entry must be at least 1 and at most 4096"):
        from_dict(NetworkConfig, config | {"backbone": {"kind": "compact", "widths": [0] * 5}})


def test_pickles_that_are_bombs_or_run_code(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"state_dict": {"a": torch.zeros(1 << 20)}}, path)
    assert load_pickle(path)["state_dict"]["a"].shape == (1 << 20,)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"GiB of memory|compressed"):
        load_pickle(tmp_path / "b.pt")
    with pytest.raises(WeightsError, match=r"b\.pt is not a PyTorch checkpoint"):
        convert_published(tmp_path / "b.pt", tmp_path / "out.safetensors")
    (tmp_path / "c.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    with pytest.raises(WeightsError, match="holds more than weights"):
        convert_published(tmp_path / "c.pt", tmp_path / "out.safetensors")


# SQLite stores.


def matches(count: int = 3) -> Matches:
    points = np.zeros((count, 2), np.float32)
    return Matches(points0=points, points1=points, scores=points[:, 0], size0=(8, 8), size1=(8, 8))


@pytest.fixture
def store(tmp_path):
    with MatchStore(tmp_path / "a.sqlite", {"a": 1}) as made:
        made.put("a.png", "b.png", matches())
    return tmp_path / "a.sqlite"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pairs SET points0 = zeroblob(23)",
        "UPDATE pairs SET points0 = zeroblob(8)",
        "UPDATE pairs SET points0 = 'text'",
        "UPDATE pairs SET scores = 5",
        "UPDATE pairs SET info = '[1, 2]'",
        "UPDATE pairs SET info = 7",
        f"UPDATE pairs SET info = '{DEEP}'",
        "UPDATE pairs SET width0 = 'wide'",
        "UPDATE pairs SET width0 = 9e999",
    ],
)
def test_stores_with_rows_that_do_not_fit(store, statement):
    with sqlite3.connect(store) as connection:
        connection.execute(statement)
    connection.close()
    with MatchStore(store) as opened, pytest.raises(DataError, match=r"a\.sqlite: the pair a\.png, b\.png is damaged"):
        opened.get("a.png", "b.png")


@pytest.mark.parametrize("config", [DEEP, "[]", "no JSON", "5"])
def test_stores_with_a_damaged_config(store, config):
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'config'", (config,))
    connection.close()
    with MatchStore(store) as opened, pytest.raises(DataError, match="the config is damaged"):
        assert opened.config
    with pytest.raises(DataError, match="the config is damaged"):
        MatchStore(store, {"a": 1})


def test_stores_whose_schema_runs_code(store):
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS name0 FROM n"
    for statement in (
        f"CREATE VIEW more AS {endless}",
        "CREATE TRIGGER t AFTER INSERT ON pairs BEGIN DELETE FROM meta; END",
    ):
        copy = store.with_name("b.sqlite")
        copy.write_bytes(store.read_bytes())
        with sqlite3.connect(copy) as connection:
            connection.execute(statement)
        connection.close()
        for config in (None, {"a": 1}):
            with pytest.raises(DataError, match=r"b\.sqlite is not a match store"):
                MatchStore(copy, config)


def test_values_of_a_store_have_a_limit(store, monkeypatch):
    monkeypatch.setattr("dualrc.collection.store._MOST_BYTES", 1 << 20)
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE pairs SET points0 = zeroblob(2000000)")
    connection.close()
    with MatchStore(store) as opened, pytest.raises(DataError, match="too big"):
        opened.get("a.png", "b.png")


# COLMAP's binary files.


@pytest.mark.parametrize("name", ["cameras.bin", "images.bin", "points3D.bin", "rigs.bin", "frames.bin"])
def test_colmap_files_with_huge_counts(tmp_path, name):
    pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")
    from test_read_model import write_model

    from dualrc.colmap import read_model

    write_model(tmp_path, names=("a.png", "b.png"))
    if not (tmp_path / name).exists():
        pytest.skip(f"COLMAP {pycolmap.__version__} writes no {name}")
    whole = (tmp_path / name).read_bytes()
    for at in (0, *np.random.default_rng(0).integers(0, len(whole) - 8, 6).tolist()):
        for count in ((1 << 64) - 1, 1 << 40, 1 << 31):
            (tmp_path / name).write_bytes(whole[:at] + struct.pack("<Q", count) + whole[at + 8 :])
            try:
                read_model(tmp_path)
            except DataError as error:
                assert str(tmp_path) in str(error)


# Images are tested in test_fuzz.py; other files in image folders are tested here.


def test_folders_with_links_and_pipes(tmp_path):
    (tmp_path / "deep").mkdir()
    Image.fromarray(texture(0, 64, 64)).save(tmp_path / "a.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "none.png")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    assert find_images(tmp_path) == ["a.png"]
    for name in ("loop.png", "nowhere.png"):
        with pytest.raises(ImageError, match=name):
            read(tmp_path / name)
