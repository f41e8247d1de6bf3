"""InLoc's score: how far poses are from the reference poses, and which share is near enough."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np

from dualrc.evaluation.inloc_poses import Tried
from dualrc.geometry import rotation_error_deg
from dualrc.types import FloatArray

THRESHOLDS_M = (0.25, 0.5, 1.0)
# Where the published curves have their dots.
CURVE_M = (*(step / 16 for step in range(17)), *(1 + step / 8 for step in range(1, 9)))
WITHIN_DEG = 10.0
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class QueryScore:
    """One query; errors are inf without a pose, or with one on another floor."""

    query: str
    floor: str | None  # None: it has no reference pose and is not scored
    distance_m: float = float("inf")
    rotation_deg: float = float("inf")
    candidates: tuple[Tried, ...] = ()  # best first

    @property
    def lost(self) -> bool:
        """Whether there is no pose."""
        return not self.candidates or self.candidates[0].cam_from_world is None

    @property
    def error_m(self) -> float:
        """The distance, if the rotation is right."""
        return self.distance_m if self.rotation_deg <= WITHIN_DEG else float("inf")


@dataclass(frozen=True, kw_only=True)
class FloorScore:
    """The queries of a floor, or all."""

    queries: int
    without_pose: int
    within: tuple[float, ...]  # shares at 0.25, 0.5 and 1 m
    curve: tuple[float, ...]  # shares at CURVE_M


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All figures of a matcher or of a stored list."""

    floors: dict[str, FloorScore]  # and "all"
    matches: float  # a pair
    queries: tuple[QueryScore, ...]


def query_score(query: str, floor: str, reference: FloatArray, tried: tuple[Tried, ...]) -> QueryScore:
    """A query by the pose of its best candidate."""
    score = QueryScore(query=query, floor=floor, candidates=tried)
    pose = tried[0].pose if tried else None
    # Each floor has a frame of its own, so a pose on another one is wrong wherever it is.
    if pose is None or tried[0].candidate.split("/", maxsplit=1)[0] != floor:
        return score
    centers = [-pose[:, :3].T @ pose[:, 3] for pose in (pose, reference)]
    return replace(
        score,
        distance_m=float(np.linalg.norm(centers[0] - centers[1])),
        rotation_deg=rotation_error_deg(pose[:, :3], reference[:, :3]),
    )


def floor_score(scores: Sequence[QueryScore]) -> FloorScore:
    """The shares of queries within each distance."""
    errors = np.array([score.error_m for score in scores])

    def within(thresholds: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(np.mean(errors < threshold)) if len(errors) else 0.0 for threshold in thresholds)

    lost = sum(score.lost for score in scores)
    return FloorScore(queries=len(scores), without_pose=lost, within=within(THRESHOLDS_M), curve=within(CURVE_M))


def in_words(score: QueryScore) -> str:
    """A query that has candidates, for a reader."""
    best = score.candidates[0]
    if best.pose is None:
        return f"no pose: {best.reason}"
    where = f"{score.distance_m:.2f} m, {score.rotation_deg:.1f}°" if np.isfinite(score.distance_m) else "another floor"
    return f"{where}, {best.inliers} of {best.correspondences} inliers"


def published() -> dict[str, dict[str, list[float]]]:
    """Published curves: method -> DUC1, DUC2 or all -> share of queries at CURVE_M."""
    text = (resources.files("dualrc.evaluation") / "inloc_published.json").read_text(encoding="utf-8")
    methods: dict[str, dict[str, list[float]]] = json.loads(text)["methods"]
    return methods
