"""Files of matches: .npz, .json and .csv."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.errors import DataError, OutputError
from dualrc.files import BROKEN, check_writable, limit_zip, parse_json, read_text, replacing, write_json
from dualrc.matches import Estimate, Matches, RelativePose

_COLUMNS: tuple[str, ...] = ("x0", "y0", "x1", "y1", "score")
_COVARIANCE_COLUMNS = ("var_x1", "var_y1", "cov_x1_y1")
# Largest size of the arrays in an .npz file, unpacked: about 40 million matches.
_MOST_BYTES = 1 << 30


def save(matches: Matches, path: Path) -> None:
    """Write matches; see `Matches.save`."""
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise OutputError(f"{path}: matches are written as .npz, .json or .csv; choose one of these suffixes.")
    if path.suffix.lower() == ".csv":
        check_writable(_beside(path))
    with replacing(path) as temporary:
        writer(matches, temporary)
    if path.suffix.lower() == ".csv":
        write_json(_beside(path), _header(matches))


def load(path: Path) -> Matches:
    """Read matches; see `Matches.load`."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: matches are read from .npz, .json or .csv files; give one of these.")
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path.")
    try:
        return reader(path)
    except (*BROKEN, DataError) as error:
        raise DataError(f"{path} does not contain matches ({error}); write it again with Matches.save.") from error


def _header(matches: Matches) -> dict[str, Any]:
    """Return everything except the arrays with one row per match."""
    header: dict[str, Any] = {"size0": matches.size0, "size1": matches.size1, "info": matches.stored_info()}
    if matches.estimate is not None:
        matrix, pose = matches.estimate.matrix, matches.estimate.pose
        header["estimate"] = {
            "kind": matches.estimate.kind,
            "matrix": None if matrix is None else np.asarray(matrix, dtype=np.float64).tolist(),
            "cam1_from_cam0": None if pose is None else pose.cam1_from_cam0.tolist(),
            "rotation_only": matches.estimate.rotation_only,
            "warnings": list(matches.estimate.warnings),
            "info": dict(matches.estimate.info),
        }
    return header


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _arrays(matches: Matches) -> dict[str, Any]:
    """Return the arrays with one row per match."""
    arrays: dict[str, Any] = {"points0": matches.points0, "points1": matches.points1, "scores": matches.scores}
    if matches.covariance is not None:
        arrays["covariance"] = matches.covariance
    if matches.estimate is not None:
        arrays["inliers"] = matches.estimate.inliers
    return arrays


def _from_parts(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Matches:
    estimate = None
    if "estimate" in header and "inliers" in arrays:
        stored = header["estimate"]
        pose = stored["cam1_from_cam0"]
        estimate = Estimate(
            kind=stored["kind"],
            matrix=None if stored["matrix"] is None else np.array(stored["matrix"], dtype=np.float64),
            inliers=arrays["inliers"],
            pose=None if pose is None else RelativePose(cam1_from_cam0=np.array(pose, dtype=np.float64)),
            rotation_only=bool(stored["rotation_only"]),
            warnings=tuple(map(str, stored["warnings"])),
            info=dict(stored["info"]),
        )
    return Matches(
        points0=arrays["points0"],
        points1=arrays["points1"],
        scores=arrays["scores"],
        size0=tuple(header["size0"]),
        size1=tuple(header["size1"]),
        estimate=estimate,
        covariance=arrays.get("covariance"),
        info=header["info"],
    )


def _write_npz(matches: Matches, path: Path) -> None:
    arrays = {**_arrays(matches), "header": np.array(json.dumps(_header(matches)))}
    if matches.estimate is not None and matches.estimate.matrix is not None:
        arrays["matrix"] = matches.estimate.matrix
    # With a path, numpy would append .npz to a name that ends with .NPZ.
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _read_npz(path: Path) -> Matches:
    limit_zip(path, _MOST_BYTES)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return _from_parts(parse_json(str(arrays["header"])), arrays)


def _write_json(matches: Matches, path: Path) -> None:
    content = _header(matches)
    for name, values in _arrays(matches).items():
        plain = values.astype(object)
        # JSON has no NaN, which marks a point without a counterpart.
        plain[np.isnan(values)] = None
        content[name] = plain.tolist()
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _read_json(path: Path) -> Matches:
    content = parse_json(read_text(path))
    shapes = {"points0": (-1, 2), "points1": (-1, 2), "scores": (-1,), "covariance": (-1, 2, 2), "inliers": (-1,)}
    arrays = {
        name: np.array(content[name], dtype=bool if name == "inliers" else np.float32).reshape(shape)
        for name, shape in shapes.items()
        if name in content
    }
    return _from_parts(content, arrays)


def _write_csv(matches: Matches, path: Path) -> None:
    columns, parts = _COLUMNS, [matches.points0, matches.points1, matches.scores]
    if matches.covariance is not None:
        columns += _COVARIANCE_COLUMNS
        parts.append(matches.covariance.reshape(-1, 4)[:, [0, 3, 1]])
    # str of a float32 is the shortest text that reads back to the same float32.
    rows = ([str(value) for value in row] for row in np.column_stack(parts))
    if matches.estimate is not None:
        columns += ("inlier",)
        rows = ([*row, str(int(inlier))] for row, inlier in zip(rows, matches.estimate.inliers, strict=True))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _read_csv(path: Path) -> Matches:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        columns = tuple(next(reader, ()))
        if columns[:5] != _COLUMNS:
            raise ValueError(f"its columns are not {', '.join(_COLUMNS)}")
        table = np.array(list(reader), dtype=np.float32).reshape(-1, len(columns))
    header: dict[str, Any] = {"size0": (0, 0), "size1": (0, 0), "info": {}}
    if _beside(path).exists():
        header = parse_json(read_text(_beside(path)))
    arrays: dict[str, Any] = {"points0": table[:, 0:2], "points1": table[:, 2:4], "scores": table[:, 4]}
    if columns[5:8] == _COVARIANCE_COLUMNS:
        arrays["covariance"] = table[:, [5, 7, 7, 6]].reshape(-1, 2, 2)
    if columns[-1] == "inlier":
        arrays["inliers"] = table[:, -1] != 0
    return _from_parts(header, arrays)


_WRITERS = {".npz": _write_npz, ".json": _write_json, ".csv": _write_csv}
_READERS = {".npz": _read_npz, ".json": _read_json, ".csv": _read_csv}
SUFFIXES = tuple(_WRITERS)
