"""Reading that the data sets share: folders, lists of names, poses, and published results."""

import json
from collections.abc import Collection
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dualrc.errors import ConfigError, DataError
from dualrc.geometry import rotation_error_deg
from dualrc.types import FloatArray


def import_extra(module: str, *, needed_for: str, extra: str) -> ModuleType:
    """A module of an optional dependency, or an error that says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = {"cv2": "OpenCV", "scipy.io": "SciPy"}.get(module, module)
        remedy = f"pip install 'dualrc[{extra}]'"
        raise ConfigError(f"{package} is not installed, and {needed_for} need it; {remedy}.") from error


def check_folder(root: Path) -> None:
    """Raise DataError if there is no such folder."""
    if not root.is_dir():
        raise DataError(f"The folder {root} does not exist; check the path.")


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file with their numbers, without empty ones and comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text ({error}); check the path.") from error
    numbered = enumerate((line.strip() for line in text.splitlines()), start=1)
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]


def read_name_pairs(path: Path, known: Collection[str] | None = None, *, what: str) -> list[tuple[str, str]]:
    """Two names a line, of those that are known if any are given; with a tab between them names may hold spaces."""
    pairs = []
    for number, line in read_lines(path):
        names = line.split("\t") if "\t" in line else line.split()
        if len(names) != 2 or (known is not None and not set(known).issuperset(names)):
            raise DataError(f"{path}, line {number}: {line!r} is not {what}; write NAME0 NAME1.")
        pairs.append((names[0], names[1]))
    return pairs


def as_pose(value: Any, *, tolerance: float) -> FloatArray:
    """A pose (3, 4), checked: ValueError where it is none, or where its rotation is off by more than the tolerance."""
    pose = np.asarray(value, dtype=np.float64)
    if pose.shape != (3, 4):
        raise ValueError(f"a pose has the shape {pose.shape}")
    if not np.isfinite(pose).all():
        raise ValueError("a pose has values that are not numbers")
    R = pose[:, :3]
    if np.abs(R @ R.T - np.eye(3)).max() > tolerance or np.linalg.det(R) < 0:
        raise ValueError("a pose has no rotation")
    return pose


def pose_errors(pose: FloatArray, true_pose: FloatArray) -> tuple[float, float]:
    """Between two poses cam_from_world: the distance of the cameras, and the angle in degrees."""
    center, true_center = (-one[:, :3].T @ one[:, 3] for one in (pose, true_pose))
    return float(np.linalg.norm(center - true_center)), rotation_error_deg(pose[:, :3], true_pose[:, :3])


def read_published(file: str) -> dict[str, Any]:
    """Published results by method, from a JSON file of the package."""
    methods: dict[str, Any] = json.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))["methods"]
    return methods
