"""The compiled C sources: which are there, and what is refused; tests/test_ops.py holds them to the reference."""

import shutil
import sys

import pytest
import torch
from conftest import rand, texture, tiny_matcher

from dualrc.errors import ConfigError
from dualrc.ops import choose
from dualrc.ops.native import NativeEngine, library

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
    with pytest.warns(UserWarning, match=r"slower. Install dualrc again"):
        assert library.open_library(str(broken)) is None


@needs_library
def test_several_threads_give_the_same():
    pictures = texture(0, 130, 98), texture(0, 130, 98)[4:, 2:]
    matcher = tiny_matcher()
    alone = matcher.match(*pictures)
    torch.set_num_threads(3)  # more than there may be cores
    try:
        together = matcher.match(*pictures)
    finally:
        torch.set_num_threads(1)
    assert len(alone) == len(together) > 10 and abs(alone.points1 - together.points1).max() < 1e-3


@needs_library
def test_tensors_that_the_kernels_would_misread_are_refused():
    own = library.opened("generic")
    features, index = rand(0, 1, 192, 16), torch.arange(5)
    values = {"features0": features, "features1": features, "pair": index * 0, "index0": index}
    sizes = {"count": 5, "channels": 16, "height0": 12, "width0": 16, "height1": 12, "width1": 16}
    cosines = torch.empty(5, 9, 9)
    own.call("meet", **values, index1=index, cosines=cosines, **sizes)
    for wrong in (index.int(), index.double()):
        with pytest.raises(AssertionError):
            own.call("meet", **values, index1=wrong, cosines=cosines, **sizes)
    with pytest.raises(AssertionError):
        own.call("meet", **values, index1=index, cosines=cosines.transpose(1, 2), **sizes)
