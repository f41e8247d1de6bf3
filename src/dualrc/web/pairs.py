"""Results of pairs and of collections, and their JSON representation."""

import math
import secrets
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualrc.matches import Estimate, Matches
from dualrc.web.uploads import Upload

if TYPE_CHECKING:
    from dualrc.web.schemas import EstimateBody, MatchOptions

# Minimum pair scores of the verdicts `same` and `unsure`.
SAME, UNSURE = 0.9, 0.1
# Approximate memory of a pair in addition to its arrays, in bytes.
_OVERHEAD = 4096


@dataclass(kw_only=True, eq=False)
class Pair:
    """Matches of two images."""

    images: tuple[Upload, Upload]
    matches: Matches
    settings: "MatchOptions"
    seconds: float
    device: str
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))

    @property
    def bytes(self) -> int:
        """Memory of the result, in bytes."""
        sets = [self.matches] + ([] if self.matches.whole is None else [self.matches.whole])
        arrays = [array for one in sets for array in (one.points0, one.points1, one.scores, one.covariance)]
        return _OVERHEAD + sum(array.nbytes for array in arrays if array is not None)


@dataclass(kw_only=True, eq=False)
class Collection:
    """Set of images whose pairs are all matched, one after the other, and the results so far."""

    images: tuple[Upload, ...]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    # Score and id of the result of each matched pair.
    results: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the JSON of a collection; scores are symmetric, null on the diagonal and for unmatched pairs."""
        # A copy: the worker thread adds results.
        results = dict(self.results)
        matrix: list[list[float | None]] = [[None] * len(self.images) for _ in self.images]
        for (i, j), (score, _) in results.items():
            matrix[i][j] = matrix[j][i] = finite(score)
        return {
            "images": [image.describe() for image in self.images],
            "scores": matrix,
            "pairs": {f"{i},{j}": number for (i, j), (_, number) in results.items()},
        }


def describe(pair: Pair, fit: "EstimateBody | None" = None) -> dict[str, Any]:
    """Return the JSON of a result; coordinates are rounded to 1e-4 px, npz files contain the exact values."""
    matches, info = pair.matches, pair.matches.info
    score = matches.pair_score
    return {
        "pair": pair.id,
        "image0": pair.images[0].id,
        "image1": pair.images[1].id,
        "name0": pair.images[0].name,
        "name1": pair.images[1].name,
        "size0": matches.size0,
        "size1": matches.size1,
        "count": len(matches),
        "points0": rounded(matches.points0),
        "points1": rounded(matches.points1),
        "scores": rounded(matches.scores, 6),
        "covariance": None if matches.covariance is None else rounded(matches.covariance, 6),
        "pair_score": finite(score),
        "verdict": verdict(score, calibrated=info.get("pair_model") is not None),
        "warning": info.get("warning"),
        "zoom": info.get("zoom"),
        "tilted": info.get("tilted", False),
        "estimate": None if matches.estimate is None else describe_estimate(matches.estimate),
        "seconds": round(pair.seconds, 4),
        "device": pair.device,
        "network_size0": info.get("network_size0"),
        "network_size1": info.get("network_size1"),
        "commands": commands(pair, fit),
    }


def describe_estimate(model: Estimate) -> dict[str, Any]:
    """Return the JSON of an estimate; `fundamental` gives epipolar lines in pixels."""
    warnings = list(model.warnings)
    if model.matrix is None:
        warnings.append(f"No model was found: {model.info.get('reason', 'no model fits')}.")
    return {
        "kind": model.kind,
        "matrix": None if model.matrix is None else model.matrix.tolist(),
        "fundamental": fundamental(model),
        "inliers": model.inliers.tolist(),
        "inlier_count": int(model.inliers.sum()),
        "threshold_px": model.info.get("threshold_px"),
        "cameras": model.info.get("cameras"),
        "cam1_from_cam0": None if model.pose is None else model.pose.cam1_from_cam0.tolist(),
        "warnings": warnings,
    }


def fundamental(model: Estimate) -> list[list[float]] | None:
    """Return the fundamental matrix of an estimate, in pixels and without lens distortion, or None."""
    if model.matrix is None or model.kind == "homography":
        return None
    if model.kind == "fundamental":
        return model.matrix.tolist()
    if "K0" not in model.info:
        return None
    K0, K1 = (np.linalg.inv(np.array(model.info[key], dtype=np.float64)) for key in ("K0", "K1"))
    F = K1.T @ model.matrix @ K0
    return (F / np.linalg.norm(F)).tolist()


def verdict(score: float, *, calibrated: bool) -> dict[str, str]:
    """Return a pair score as a level and a phrase."""
    if not calibrated:
        return {"level": "unsure", "text": "Not sure: these weights have no calibration"}
    if score >= SAME:
        return {"level": "same", "text": "The same place"}
    if score >= UNSURE:
        return {"level": "unsure", "text": "Not sure"}
    return {"level": "different", "text": "Probably not the same place"}


def commands(pair: Pair, fit: "EstimateBody | None" = None) -> dict[str, str]:
    """Return the shell command and the Python code that find the same matches and fit the same model.

    With a `min_score` or `top` of the model, the shell command writes only the matches to which it was fitted.
    """
    from dualrc.web.schemas import EstimateBody, MatchOptions

    names, settings = [image.name for image in pair.images], pair.settings
    options = {name: getattr(settings, name) for name in ("quality", "size", "top", "min_score", "covariance")}
    given = {key: value for key, value in options.items() if value != getattr(MatchOptions(), key)}
    arguments = [*map(repr, names), *(f"{key}={value!r}" for key, value in given.items())]
    lines = ["import dualrc", "", "matcher = dualrc.load()", f"matches = matcher.match({', '.join(arguments)})"]
    if fit is None and settings.estimate is not None:
        fit = EstimateBody(kind=settings.estimate, threshold_px=settings.threshold_px)
    # The command line has no option for covariances.
    given.pop("covariance", None)
    if fit is not None:
        narrowed = "matches"
        if fit.min_score > settings.min_score:
            narrowed += f".above({fit.min_score!r})"
            given["min_score"] = fit.min_score
        if fit.top is not None:
            narrowed += f".top({fit.top})"
            given["top"] = min(fit.top, settings.top or fit.top)
        chosen = [narrowed, repr(fit.kind), f"threshold_px={fit.threshold_px:g}"]
        if fit.kind == "essential":
            lines += [f"camera{n} = dualrc.geometry.camera_from_exif({name!r})" for n, name in enumerate(names)]
            chosen += ["camera0=camera0", "camera1=camera1"]
        lines.append(f"model = dualrc.geometry.estimate({', '.join(chosen)})")
    flags = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    if fit is not None:
        flags += ["--estimate", fit.kind, "--threshold", f"{fit.threshold_px:g}"]
    # A name that begins with a dash would be parsed as an option.
    files = [f"./{name}" if name.startswith("-") else name for name in names]
    return {"shell": shlex.join(["dualrc", "match", *files, *flags, "-o", "matches.npz"]), "python": "\n".join(lines)}


def rounded(values: npt.NDArray[Any], digits: int = 4) -> list[Any]:
    """Return an array as nested lists of rounded numbers, with None for NaN."""
    plain = np.round(values.astype(np.float64), digits)
    if np.isfinite(plain).all():
        return plain.tolist()
    found = plain.astype(object)
    found[~np.isfinite(plain)] = None
    return found.tolist()


def finite(value: float) -> float | None:
    """Return a number that JSON can represent, or None."""
    return value if math.isfinite(value) else None
