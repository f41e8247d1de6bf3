"""Readers that several datasets share: folders, damaged files, lists of names, poses, and published results."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.errors import DataError, DualRCError
from dualrc.files import one_line, read_lines
from dualrc.geometry import rotation_error_deg
from dualrc.types import FloatArray


def check_folder(root: Path) -> None:
    """Raise DataError if a folder does not exist."""
    if not root.is_dir():
        raise DataError(f"The folder {root} does not exist; check the path.")


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Convert any exception of a missing or damaged file to a DataError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; copy the published file there.") from error
    except DualRCError:
        raise
    # A damaged file can raise any exception.
    except Exception as error:
        raise DataError(
            f"{path} is not {what}, or damaged ({one_line(error)}); download the published file."
        ) from error


def read_name_pairs(path: Path, known: Collection[str] | None = None, *, what: str) -> list[tuple[str, str]]:
    """Read two names per line, checked against `known` if given; names may have spaces if a tab separates them."""
    pairs = []
    for number, line in read_lines(path):
        names = line.split("\t") if "\t" in line else line.split()
        if len(names) != 2 or (known is not None and not set(known).issuperset(names)):
            raise DataError(f"{path}, line {number}: {line!r} is not {what}; write NAME0 NAME1.")
        pairs.append((names[0], names[1]))
    return pairs


def as_pose(value: Any, *, tolerance: float) -> FloatArray:
    """Return a pose (3, 4); raise ValueError if it is invalid or its rotation is off by more than the tolerance."""
    pose = np.asarray(value, dtype=np.float64)
    if pose.shape != (3, 4):
        raise ValueError(f"a pose has the shape {pose.shape}")
    if not np.isfinite(pose).all():
        raise ValueError("a pose has values that are not finite")
    R = pose[:, :3]
    if np.abs(R @ R.T - np.eye(3)).max() > tolerance or np.linalg.det(R) < 0:
        raise ValueError("a pose has no valid rotation")
    return pose


def pose_errors(pose: FloatArray, true_pose: FloatArray) -> tuple[float, float]:
    """Return the distance between the cameras of two poses cam_from_world, and their angle in degrees."""
    center, true_center = (-one[:, :3].T @ one[:, 3] for one in (pose, true_pose))
    return float(np.linalg.norm(center - true_center)), rotation_error_deg(pose[:, :3], true_pose[:, :3])


def read_published(file: str) -> dict[str, Any]:
    """Read published results by method from a JSON file of the package."""
    return dict(json.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))["methods"])
