"""Tests of the order of rooms, and that importing the package has no side effects."""

import ast
import subprocess
import sys
from importlib import metadata

import pytest
from conftest import ROOT

import dualrc

PACKAGE = ROOT / "src" / "dualrc"
# The rooms in order: each imports from itself and from the rooms above it.
ROOMS = [
    "errors",
    "extras",
    "files",
    "machine",
    "measure",
    "toml",
    "config",
    "provenance",
    "types",
    "pixels",
    "evidence",
    "calibration",
    "formats",
    "notebook",
    "matches",
    "image",
    "agreement",
    "texture",
    "geometry",
    "colmap",
    "metrics",
    "draw",
    "scenes",
    "model",
    "ops",
    "matcher",
    "onnx",
    "stitch",
    "data",
    "losses",
    "train",
    "collection",
    "localize",
    "evaluation",
    "bench",
    "adapters",
    "demo",
    "web",
    "client",
    "cli",
    "__main__",  # `python -m dualrc`: the command line under Python's name for it
]


def room_of(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def imported_rooms(path) -> set[str]:
    """Return the rooms of dualrc that a file imports, anywhere in the file."""
    rooms = set()
    package = ("dualrc", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*package[: len(package) - node.level + 1], *([module] if module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        rooms |= {parts[1] for name in names if (parts := name.split("."))[0] == "dualrc" and len(parts) > 1}
    return rooms


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_room_is_in_the_plan():
    found = {room_of(path.relative_to(PACKAGE).parts) for path in FILES}
    assert found <= set(ROOMS), found - set(ROOMS)
    assert "model" in found and "utils" not in found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_what_stands_above(path):
    room = room_of(path.relative_to(PACKAGE).parts)
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    assert imported_rooms(path) <= allowed, f"{room} imports {imported_rooms(path) - allowed}"


def test_the_parser_of_imports_sees_them_all(tmp_path, monkeypatch):
    """Every form of import is recognized."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "some.py"
    file.write_text(
        "import dualrc.cli\nfrom dualrc import train\nfrom dualrc.web.page import x\nfrom .. import bench\n"
        "from ..data import y\nfrom . import z\ndef f():\n    from dualrc.draw import q\nimport torch\n"
    )
    assert imported_rooms(file) == {"cli", "train", "web", "bench", "data", "model", "draw"}


def test_the_reference_engine_shares_nothing_with_the_others():
    engine, formulas = (PACKAGE / "ops" / name for name in ("reference.py", "formulas.py"))
    assert imported_rooms(engine) == {"config", "model", "ops"} and imported_rooms(formulas) == {"model"}
    text = engine.read_text(encoding="utf-8")
    assert text.count("dualrc.ops") == text.count("from dualrc.ops import formulas\n") == 1


def test_the_definition_names_no_engine_device_or_graph():
    for path in (PACKAGE / "model").glob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        assert "ops" not in imported_rooms(path)
        words = ("cuda", "triton", "is_cuda", "native", "graph.", "chunk", "trace")
        found = [word for word in words if word in text]
        assert not found, (path.name, found)


def test_the_network_is_readable_at_a_glance():
    assert len((PACKAGE / "model" / "dualrc.py").read_text(encoding="utf-8").splitlines()) < 200


def test_public_names():
    assert sorted(dualrc.__all__) == [
        "CollectionConfig",
        "ConfigError",
        "DataError",
        "DualRCError",
        "Estimate",
        "ImageError",
        "ImageFeatures",
        "LocalizeConfig",
        "Localizer",
        "Match",
        "MatchStore",
        "Matcher",
        "MatcherConfig",
        "Matches",
        "NetworkConfig",
        "OutputError",
        "ReconstructConfig",
        "RelativePose",
        "Warp",
        "WeightsError",
        "__version__",
        "colmap",
        "draw",
        "geometry",
        "load",
        "localize",
        "match_collection",
        "panorama",
        "reconstruct",
        "warp_image",
    ]
    assert all(hasattr(dualrc, name) for name in dualrc.__all__)
    assert dualrc.geometry.estimate and dualrc.draw.draw_matches and dualrc.localize.read_map
    assert dualrc.__version__ == metadata.version("dualrc") and dir(dualrc) == sorted(dualrc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dualrc.nothing


def test_every_error_is_a_dualrc_error():
    from dualrc import errors

    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert len(kinds) == 6 and all(issubclass(kind, dualrc.DualRCError) for kind in kinds)


IMPORT = """
import random, sys, warnings
import numpy, torch
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
def settings():
    return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
settings_before, filters = settings(), list(warnings.filters)
import dualrc
assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
assert settings_before == settings() and filters == list(warnings.filters)
heavy = {"matplotlib", "cv2", "pycolmap", "typer", "rich", "poselib", "scipy", "h5py", "fastapi", "httpx"}
heavy &= sys.modules.keys()
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""


def test_importing_does_nothing():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
