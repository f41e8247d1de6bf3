"""Matches between two images, the common data type of the package."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from dualrc.calibration import PairModel
from dualrc.errors import DataError
from dualrc.evidence import collect
from dualrc.extras import require
from dualrc.notebook import matches_html, warp_png
from dualrc.types import BoolArray, FloatArray, Size

EstimateKind = Literal["homography", "fundamental", "essential"]

# Number of best matches that score a pair without a calibration.
_PAIR_TOP = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativePose:
    """Relative pose of two cameras: x1 = R x0 + t, up to the unknown scale of t."""

    # (3, 4) [R | t]; t has length 1.
    cam1_from_cam0: FloatArray

    @property
    def R(self) -> FloatArray:  # noqa: N802
        """Rotation (3, 3)."""
        return self.cam1_from_cam0[:, :3]

    @property
    def t(self) -> FloatArray:
        """Direction of the translation (3,)."""
        return self.cam1_from_cam0[:, 3]


class Match(NamedTuple):
    """One pair of corresponding points, as iteration over Matches yields it."""

    # Point in image 0, in pixels.
    x0: float
    y0: float
    # Point in image 1, in pixels.
    x1: float
    y1: float
    # As in `Matches.scores`.
    score: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Estimate:
    """A two-view model fitted to matches, and the matches that agree with it."""

    # Type of the model.
    kind: EstimateKind
    # (3, 3) From image 0 to image 1: x1 ~ H x0, or x1' F x0 = 0. An essential matrix applies to normalized rays.
    # None if no model could be fitted.
    matrix: FloatArray | None
    # (n,) Whether each match agrees with the model.
    inliers: BoolArray
    # Pose of an essential matrix.
    pose: RelativePose | None = None
    # Whether a rotation alone explains the motion. The direction of the pose is then arbitrary.
    rotation_only: bool = False
    # Sentences for the user about limitations, such as a guessed focal length.
    warnings: tuple[str, ...] = ()
    # Provenance as plain JSON values: threshold, iterations, cameras.
    info: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        if self.matrix is None:
            return f"Estimate({self.kind}: none, {self.info.get('reason', 'no model fits')})"
        return f"Estimate({self.kind}, {int(self.inliers.sum())} of {len(self.inliers)} matches agree)"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Matches:
    """Corresponding points of two images in their original pixels, best first.

    Points are (x, y) in the upright image; the center of the first pixel is (0, 0).
    """

    # (n, 2) float32, (x, y) in pixels of the upright image 0; (0, 0) is the center of the first pixel.
    points0: FloatArray
    # (n, 2) float32, the corresponding points of image 1.
    points1: FloatArray
    # (n,) float32, higher is better. With calibrated weights, the probability of an error of at most 3 px.
    # The error is measured in pixels of the network input.
    scores: FloatArray
    # (width, height) of the upright image; (0, 0) if a file does not contain it.
    size0: Size
    size1: Size
    # Model fitted to the matches, as `with_estimate` attaches it.
    estimate: Estimate | None = None
    # (n, 2, 2) float32, in squared pixels of image 1: covariance of points1, if the match is correct within 3 px.
    # None if it was not requested; NaN for a point without a counterpart.
    covariance: FloatArray | None = None
    # Plain JSON values: versions, config, hash of the weights, sizes of the network inputs, and, where they apply,
    # zoom, tilted and warning; see docs/guides/match.md.
    info: Mapping[str, Any] = field(default_factory=dict)
    # All matches of the pair, if these are a selection of them.
    whole: "Matches | None" = None

    def __post_init__(self) -> None:
        count = len(np.atleast_1d(self.scores))
        shapes = {"points0": (count, 2), "points1": (count, 2), "scores": (count,), "covariance": (count, 2, 2)}
        for name, shape in shapes.items():
            if name == "covariance" and self.covariance is None:
                continue
            try:
                array = np.asarray(getattr(self, name), dtype=np.float32)
            except (TypeError, ValueError) as error:
                raise DataError(f"{name} is not an array of numbers ({error}); give one row per match.") from error
            if array.shape != shape:
                raise DataError(f"{name} has shape {array.shape}, not {shape}; give one row per match.")
            object.__setattr__(self, name, array)
        for name in ("size0", "size1"):
            width, height = getattr(self, name)
            object.__setattr__(self, name, (int(width), int(height)))
        if self.estimate is not None and self.estimate.inliers.shape != (count,):
            raise DataError(
                f"The estimate has {len(self.estimate.inliers)} inlier flags for {count} matches; give one per match."
            )

    @staticmethod
    def none(info: Mapping[str, Any]) -> "Matches":
        """Return empty matches for images that could not be read; `info` has the reason."""
        empty = np.zeros((0, 2), np.float32)
        return Matches(points0=empty, points1=empty, scores=empty[:, 0], size0=(0, 0), size1=(0, 0), info=info)

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        scores = f", scores {self.scores.max():.3g} to {self.scores.min():.3g}" if len(self) else ""
        sizes = " and ".join(f"{width}x{height}" for width, height in (self.size0, self.size1))
        return f"Matches({len(self)} of {sizes}{scores})"

    def _repr_html_(self) -> str:
        """What a notebook shows: lines between empty frames; `dualrc.draw.draw_matches` draws them on the images."""
        return matches_html(self.points0, self.points1, self.scores, (self.size0, self.size1), repr(self))

    def __iter__(self) -> Iterator[Match]:
        """Iterate over matches as named tuples (x0, y0, x1, y1, score)."""
        rows = np.concatenate([self.points0, self.points1, self.scores[:, None]], axis=1)
        return (Match(*row) for row in rows.tolist())

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> Match: ...
    @overload
    def __getitem__(self, index: slice | npt.NDArray[np.bool_ | np.signedinteger[Any]] | list[int]) -> "Matches": ...
    def __getitem__(self, index: Any) -> "Match | Matches":
        """Return one match by index, or the matches that a slice, a boolean mask or an array of indices selects."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            (x0, y0), (x1, y1) = self.points0[index].tolist(), self.points1[index].tolist()
            return Match(x0, y0, x1, y1, float(self.scores[index]))
        estimate = self.estimate
        if estimate is not None:
            estimate = replace(estimate, inliers=estimate.inliers[index])
        return replace(
            self,
            points0=self.points0[index],
            points1=self.points1[index],
            scores=self.scores[index],
            covariance=None if self.covariance is None else self.covariance[index],
            estimate=estimate,
            whole=self if self.whole is None else self.whole,
        )

    @property
    def pair_score(self) -> float:
        """Probability that the images overlap, for a prior of one in two.

        It is computed from the scores of the best matches, and from the shares of them, spread over the images, that
        agree with one affine motion and one epipolar geometry. Content at the same position in both images, such as
        stamps and bars, does not count unless the center is static too. A selection of matches has the score of the
        whole pair. Without calibrated weights it is not a probability and may exceed 1. It then only ranks pairs: it
        is the squared mean of the square roots of the best 100 scores.
        """
        if self.whole is not None:
            return self.whole.pair_score
        # Stored with a selection of matches.
        if (known := self.info.get("pair_score")) is not None:
            return float(known)
        if (model := self.info.get("pair_model")) is not None:
            evidence = collect(self.points0, self.points1, self.scores, self.size0, self.size1)
            return PairModel(**model)(evidence)
        best = np.sort(self.scores)[::-1][:_PAIR_TOP]
        return float((np.sqrt(best.clip(min=0)).sum() / _PAIR_TOP) ** 2)

    def top(self, count: int) -> "Matches":
        """Return the best `count` matches, or all if there are fewer."""
        return self[np.argsort(-self.scores, kind="stable")[: max(count, 0)]]

    def above(self, min_score: float) -> "Matches":
        """Return the matches with at least this score."""
        return self[self.scores >= min_score]

    def inside(self, mask0: npt.ArrayLike | None = None, mask1: npt.ArrayLike | None = None) -> "Matches":
        """Return the matches whose points lie on true pixels of the masks (height, width)."""
        keep = np.ones(len(self), dtype=bool)
        for mask, points in ((mask0, self.points0), (mask1, self.points1)):
            if mask is not None:
                keep &= inside_mask(points, np.asarray(mask, dtype=bool))
        return self[keep]

    def with_estimate(self, estimate: Estimate) -> "Matches":
        """Return the same matches with a fitted model."""
        return replace(self, estimate=estimate)

    def swapped(self) -> "Matches":
        """Return the same matches with the images swapped; a fitted model and covariances are dropped."""
        sizes = {"network_size0": "network_size1", "network_size1": "network_size0"}
        info = {sizes.get(key, key): value for key, value in self.info.items()}
        if "zoom" in info:
            info["zoom"] = round(1 / info["zoom"], 3)
        return replace(
            self,
            info=info,
            points0=self.points1,
            points1=self.points0,
            size0=self.size1,
            size1=self.size0,
            estimate=None,
            # It is the covariance of the points of image 1 only.
            covariance=None,
            whole=None if self.whole is None else self.whole.swapped(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the dictionary that other matching libraries expect."""
        return {
            "keypoints0": self.points0,
            "keypoints1": self.points1,
            "confidence": self.scores,
            "image_size0": np.array(self.size0),
            "image_size1": np.array(self.size1),
        }

    def to_cv2(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return OpenCV's keypoints of image 0 and of image 1 (cv2.KeyPoint), and its matches (cv2.DMatch).

        A keypoint's response is the score. A match's distance is 1 - score, because OpenCV sorts by rising distance.
        Points without a counterpart, as `match_points` returns them, are left out.
        """
        cv2 = require("cv2", "baselines", "OpenCV's keypoints")
        found = self[np.flatnonzero(np.isfinite(self.points1).all(axis=1))]
        keypoints0, keypoints1 = (
            [
                cv2.KeyPoint(x=x, y=y, size=1.0, response=score)
                for (x, y), score in zip(points.tolist(), found.scores.tolist(), strict=True)
            ]
            for points in (found.points0, found.points1)
        )
        matches = [cv2.DMatch(row, row, 1 - score) for row, score in enumerate(found.scores.tolist())]
        return keypoints0, keypoints1, matches

    def save(self, path: str | Path) -> None:
        """Write .npz, .json or .csv atomically.

        A .csv has the columns x0, y0, x1, y1, score, then var_x1, var_y1, cov_x1_y1 if there are covariances, and
        inlier if there is an estimate. Sizes, model and info go to a second file next to it, FILE.csv.json.
        """
        from dualrc.matches.files import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> "Matches":
        """Read a file of `save`, with at most 1 GiB of arrays or text; never unpickles."""
        from dualrc.matches.files import load

        return load(Path(path))

    def stored_info(self) -> dict[str, Any]:
        """Return the info to store with these matches; a selection includes the pair_score of the whole pair."""
        return dict(self.info) if self.whole is None else {**self.info, "pair_score": self.pair_score}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Warp:
    """Position in image 1 of every pixel of image 0, with a certainty."""

    # (height, width, 2) float32; NaN where unknown.
    points1: FloatArray
    # (height, width) float32, on the scale of match scores; 0 where unknown.
    certainty: FloatArray
    # (width, height) of image 1.
    size1: Size

    def __repr__(self) -> str:
        height, width = self.certainty.shape
        sizes = "{}x{} to {}x{}".format(width, height, *self.size1)
        return f"Warp({sizes}, {np.mean(self.certainty > 0):.0%} of the pixels found)"

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: motions as colors."""
        return warp_png(self.points1, self.certainty)


def inside_mask(points: FloatArray, mask: BoolArray) -> BoolArray:
    """Return whether points (n, 2) lie on true pixels of a mask (height, width)."""
    if mask.ndim != 2:
        raise DataError(f"A mask must have two axes (height, width), not shape {mask.shape}.")
    height, width = mask.shape
    # Clip first, because infinite values cannot be converted to integers.
    near = np.clip(np.nan_to_num(points, nan=-1), -1, max(height, width))
    column, row = np.floor(near + 0.5).astype(np.int64).T
    valid = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    inside = np.zeros(len(points), dtype=bool)
    inside[valid] = mask[row[valid], column[valid]]
    return inside
