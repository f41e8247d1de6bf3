"""Tests of the compiled C library: variants and rejected files; tests/test_ops.py compares it with the reference."""

import os
import platform
import shutil
import struct
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, rand, texture, tiny_matcher
from ops_data import coarse_maps, consensus_of, refinement_case, search_case

from dualrc.config import FineConfig
from dualrc.errors import ConfigError
from dualrc.model.support import DirectedMatches
from dualrc.ops import choose, onednn
from dualrc.ops.native import NativeEngine, library, sources
from dualrc.ops.torch import TorchEngine

needs_library = pytest.mark.skipif(not library.available(), reason="the C kernels were not compiled")


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="there is no compiler")
def test_the_kernels_were_compiled():
    assert "generic" in library.available()
    assert all(library.opened(variant) is not None for variant in library.available())


@needs_library
def test_an_instruction_set_that_is_not_here():
    with pytest.raises(ConfigError, match="available: "):
        NativeEngine("sse9")
    assert choose(torch.device("cpu"), "native-generic").name == "native-generic"


def test_a_file_that_is_no_library_is_left_alone(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.warns(UserWarning, match=r"Cannot use the C kernels in .*slower. Compile them: pip install"):
        assert library.open_library(str(broken)) is None


def copied_library(tmp_path, variant="generic") -> str:
    source = Path(library._origin(variant))
    return str(shutil.copy(source, tmp_path / source.name))


@needs_library
def test_a_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    """A single different byte of a source is enough."""
    path = copied_library(tmp_path)
    assert library.open_library(path) is not None
    folder = tmp_path / "sources"
    folder.mkdir()
    for source in Path(sources.__file__).parent.glob("*.[ch]"):
        (folder / source.name).write_bytes(source.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(sources, "__file__", str(folder / "sources.py"))
    assert library.open_library(path) is not None  # ends of lines don't matter
    with (folder / "search.c").open("a") as file:
        file.write("/* more */\n")
    with pytest.warns(
        UserWarning, match=r"compiled from different sources .* torch runs instead, .*build_ext -f --inplace"
    ):
        assert library.open_library(path) is None


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a library in the ELF format")
@pytest.mark.parametrize("missing", [1, 20_000])
def test_a_truncated_library_is_refused(tmp_path, missing):
    """The loader would end the process with a bus error."""
    path = Path(copied_library(tmp_path))
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.warns(UserWarning, match=r"the file is incomplete.* torch runs instead"):
        assert library.open_library(str(path)) is None


@needs_library
def test_matching_goes_on_without_a_library_that_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "digest", lambda: "another")
    library.opened.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            matcher = tiny_matcher()
        assert matcher.engine == "torch" and len(told) == 1  # one for all variants
        assert len(matcher.match(texture(0, 96, 80), texture(0, 96, 80)[4:, 2:])) > 0
        with pytest.raises(ConfigError, match="were not compiled or cannot run here"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choose(torch.device("cpu"), "native")
    finally:
        library.opened.cache_clear()


@needs_library
def test_a_library_from_before_versions_is_refused(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no compiler")
    (tmp_path / "old.c").write_text("long dualrc_search_size(void) { return 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "old.so", tmp_path / "old.c"], check=True)
    with pytest.warns(UserWarning, match="they belong to another version"):
        assert library.open_library(str(tmp_path / "old.so")) is None


# Odd shapes and numbers, which scripts/sanitize runs with AddressSanitizer and UndefinedBehaviorSanitizer.


ODD = [((1, 1), (1, 1)), ((1, 1), (3, 2)), ((2, 1), (1, 9)), ((1, 3), (8, 1)), ((3, 2), (2, 3)), ((1, 17), (1, 7))]
STRANGE = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30)


@pytest.mark.parametrize("variant", library.available())
@torch.inference_mode()
def test_odd_shapes(variant):
    native, plain = NativeEngine(variant), TorchEngine()
    for number, (shape0, shape1) in enumerate(ODD):
        batch = 1 + number % 2
        maps, consensus = coarse_maps(batch, shape0, shape1, number), consensus_of((8, 1))
        found = native.coarse(maps, consensus, (None, None))
        assert torch.allclose(found, plain.coarse(maps, consensus, (None, None)), rtol=1e-3, atol=1e-5)
        for channels in (1, 7, 17):
            case = search_case("flat", number, shape0, shape1, batch, channels, masked=number % 2 == 0)
            config = FineConfig(temperature=0.1 * (number % 3))
            assert torch.allclose(
                native.search(*case, config).score0, plain.search(*case, config).score0, rtol=1e-3, atol=1e-6
            )
            case = refinement_case(number, count=9, batch=batch, channels=channels, size0=shape0, size1=shape1)
            points = native.refine(*case)
            assert torch.isfinite(points.points0).all() and torch.isfinite(points.scores).all()


@pytest.mark.parametrize("variant", library.available())
@torch.inference_mode()
def test_numbers_that_are_none(variant):
    engine = NativeEngine(variant)
    subpixel, fine, light, matches = refinement_case(0, count=20)
    count = len(matches.pair)
    points = torch.rand(2, count, 2) * 60
    for strange in STRANGE:
        tensor, *maps = search_case("flat", 1, (2, 3), (3, 2), masked=True)
        tensor[:, ::2, 1] = strange
        engine.search(tensor, *maps, FineConfig(temperature=0.1))
        coarse = [one.clone() for one in coarse_maps(1, (2, 3), (3, 2))]
        coarse[0][:, :, 0, 0] = strange
        engine.coarse(tuple(coarse), consensus_of((8, 1)), (None, None))
        broken = [one.clone() for one in light]
        broken[0][:, 3:9, 3:9] = strange
        engine.align(*broken, matches.pair, *points, torch.eye(2).expand(count, 2, 2))
        away = points.clone()
        away[:, ::2] = strange
        engine.align(*light, matches.pair, *away, torch.eye(2).expand(count, 2, 2))
        engine.align(*light, matches.pair, *points, torch.full((count, 2, 2), strange))
        here, there = away / 4
        engine.support(DirectedMatches(matches.index0, here, there, torch.rand(count), matches.pair, (2, 20, 24)))
        features = [one.features.clone() for one in fine]
        for one in features:
            one[:, ::5] = strange
        spoiled = [replace(one, features=values) for one, values in zip(fine, features, strict=True)]
        engine.windows(*spoiled, matches.pair, matches.index0, matches.index1)
        engine.refine(subpixel, tuple(spoiled), light, matches)


CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


class Emulated(library.Library):
    """The C kernels of another processor, called through tests/call_kernel.c in an emulator."""

    def __init__(self, program: Path) -> None:
        super().__init__(Recorder(program))

    def call(self, name: str, **values) -> None:
        kernel = library.kernels()[name]
        # The engine passes views of other tensors; the call copies whole tensors.
        tensors = {field: values[field] for field in kernel.tensors}
        held = {field: value.contiguous() for field, value in tensors.items() if value is not None}
        self._library.held = [held.get(field) for field in kernel.tensors]
        super().call(name, **(values | {field: held.get(field) for field in tensors}))


class Recorder:
    """Stands in for the ctypes library: sends the structure of a call and its tensors to the emulator."""

    def __init__(self, program: Path) -> None:
        self.program, self.held = program, []

    def __getattr__(self, name: str):
        return lambda pointer: self.run(name.removeprefix("dualrc_"), bytes(pointer._obj))

    def run(self, name: str, structure: bytes) -> int:
        contents = [None if one is None else one.view(-1).view(torch.uint8).numpy() for one in self.held]
        rest = structure[8 * len(contents) :]
        sizes = [-1 if content is None else len(content) for content in contents]
        call = struct.pack(f"{len(sizes) + 2}q", len(sizes), *sizes, len(rest))
        call += b"".join(content.tobytes() for content in contents if content is not None) + rest
        done = subprocess.run([EMULATOR, self.program, name], input=call, capture_output=True, check=True)
        left = np.frombuffer(done.stdout, dtype=np.uint8)
        for content in contents:
            if content is not None:
                content[:], left = left[: len(content)], left[len(content) :]
        assert not len(left)
        return 0


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> NativeEngine:
    for program in (CROSS, EMULATOR):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    if not library.available():
        pytest.skip("the C kernels were not compiled")
    program, folder = tmp_path_factory.mktemp("cross") / "kernels", Path(library.__file__).parent
    files = [*folder.glob("*.c"), ROOT / "tests" / "call_kernel.c"]
    flags = [
        "-std=gnu11",
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fopenmp-simd",
        "-static",
        "-Wall",
        "-Werror",
    ]
    defined = ['-DDUALRC_SOURCES="x"', f"-I{folder}"]
    subprocess.run([CROSS, *flags, *defined, *files, "-lm", "-o", program], check=True)
    engine = NativeEngine("generic")
    engine._library = Emulated(program)
    return engine


@torch.inference_mode()
def test_the_kernels_on_aarch64(emulated):
    here = NativeEngine("generic")
    for number, (shape0, shape1) in enumerate(ODD):
        maps, consensus = coarse_maps(1, shape0, shape1, number), consensus_of((8, 1))
        found, expected = (engine.coarse(maps, consensus, (None, None)) for engine in (emulated, here))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    for temperature in (0.0, 0.1):
        case = search_case("flat", 0, (3, 5), (4, 3), 2, 17, masked=True)
        found, expected = (engine.search(*case, FineConfig(temperature=temperature)) for engine in (emulated, here))
        assert torch.equal(found.index1, expected.index1)
        assert torch.allclose(found.score0, expected.score0, rtol=1e-5, atol=1e-7)
    case = refinement_case(0, count=20)
    found, expected = (engine.refine(*case) for engine in (emulated, here))
    for column in ("points0", "points1", "scores"):
        assert torch.allclose(getattr(found, column), getattr(expected, column), rtol=1e-4, atol=2e-3), column


@pytest.mark.parametrize("compiler", [CROSS, "x86_64-w64-mingw32-gcc", "clang"])
def test_other_compilers_accept_the_kernels(compiler, tmp_path):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fopenmp-simd", "-Wall", "-Wextra", "-Werror"]
    files = Path(library.__file__).parent.glob("*.c")
    subprocess.run([compiler, *flags, '-DDUALRC_SOURCES="x"', *files, "-o", tmp_path / "kernels"], check=True)


def has_sanitizers() -> bool:
    if sys.platform != "linux" or not shutil.which("gcc"):
        return False
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()).is_absolute()


@pytest.mark.sanitize
@pytest.mark.skipif(not has_sanitizers(), reason="there is no gcc with AddressSanitizer")
def test_the_kernels_under_sanitizers():
    """Only the odd shapes; `scripts/sanitize` without arguments runs all tests of the kernels."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "2"}
    chosen = [ROOT / "scripts" / "sanitize", "-k", "odd_shapes or numbers_that_are_none"]
    done = subprocess.run(chosen, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@needs_library
def test_several_threads_give_the_same():
    images = texture(0, 130, 98), texture(0, 130, 98)[4:, 2:]
    matcher = tiny_matcher()
    alone = matcher.match(*images)
    torch.set_num_threads(3)  # more than there may be cores
    try:
        together = matcher.match(*images)
    finally:
        torch.set_num_threads(1)
    assert len(alone) == len(together) > 10 and abs(alone.points1 - together.points1).max() < 1e-3


@needs_library
def test_tensors_that_the_kernels_would_misread_are_refused():
    own = library.opened("generic")
    features, index = rand(0, 1, 192, 16), torch.arange(5)
    values = {"features0": features, "features1": features, "pair": index * 0, "index0": index}
    values |= {"known": None, "inputs": None, "offsets": None, "temperature": 1.0}
    sizes = {"count": 5, "channels": 16, "height0": 12, "width0": 16, "height1": 12, "width1": 16}
    cosines = torch.empty(5, 9, 9)
    own.call("meet", **values, index1=index, cosines=cosines, **sizes)
    for wrong in (index.int(), index.double()):
        with pytest.raises(AssertionError):
            own.call("meet", **values, index1=wrong, cosines=cosines, **sizes)
    with pytest.raises(AssertionError):
        own.call("meet", **values, index1=index, cosines=cosines.transpose(1, 2), **sizes)


@needs_library
@torch.inference_mode()
def test_products_by_onednn_are_those_of_torch():
    engine, plain, case, maps = NativeEngine(), TorchEngine(), refinement_case(hidden=8), coarse_maps(2, (3, 5), (4, 3))
    if sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64"):
        assert onednn.works()
    inputs = case[0], case[1], case[3]
    for found, expected in zip(engine.offsets(*inputs), plain.offsets(*inputs), strict=True):
        assert torch.allclose(found, expected, atol=1e-5) and expected.abs().max() > 0.01
    assert torch.allclose(engine.correlate(*maps), plain.correlate(*maps), atol=1e-6)


def test_a_torch_without_these_products(monkeypatch):
    def missing(*_, **__):
        raise AttributeError("no such operator")

    monkeypatch.setattr(onednn, "linear", missing)
    assert not onednn.works.__wrapped__()
