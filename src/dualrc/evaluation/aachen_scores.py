"""What localizing the queries of Aachen Day-Night came to, in figures, tables and curves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dualrc.draw import Picture
from dualrc.evaluation.benchmark import COST_COLUMNS, Result, Table, cost_cells
from dualrc.evaluation.figures import Panel, curve_panels
from dualrc.metrics import share_within

THRESHOLDS = ((0.5, 2.0), (1.0, 5.0), (5.0, 10.0))  # metres and degrees
# The paper's table: percent of the 98 night-time queries of v1.0 within each of the thresholds.
PUBLISHED = {
    "ASLFeat+OANet": (77.6, 89.8, 100.0),
    "SP+SG": (79.6, 90.8, 100.0),
    "D2-Net": (74.5, 86.7, 100.0),
    "R2D2 (K=20k)": (76.5, 90.8, 100.0),
    "Sparse-NCNet": (76.5, 84.7, 98.0),
    "DualRC-Net": (79.6, 88.8, 100.0),
}
UNKNOWN = float("nan")  # an error where the true pose is not known
_SHOWN_LOST = 20


@dataclass(frozen=True, kw_only=True)
class QueryScore:
    """One query; errors are inf where it was not localized, NaN where the true pose is not known."""

    name: str
    condition: str
    reason: str | None  # why it was not localized
    candidates: int
    correspondences: int
    inliers: int
    error_m: float = UNKNOWN
    error_deg: float = UNKNOWN

    def in_words(self) -> str:
        """Its result for a caption."""
        if self.reason is not None:
            return f"not localized: {self.reason}"
        error = "" if np.isnan(self.error_m) else f"{self.error_m:.2f} m and {self.error_deg:.2f}° off, "
        return f"{error}{self.inliers} inliers"


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """All queries of a condition."""

    queries: int
    localized: int
    inliers: float  # median over those localized
    scored: int  # whose true pose is known
    shares: tuple[float, ...]  # of those, within each threshold; none where no true pose is known
    median_error_m: float
    median_error_deg: float


@dataclass(frozen=True, kw_only=True)
class MapScore:
    """The map that the matches made."""

    pictures: int  # with at least one point
    points: int
    track_length: float
    error_px: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All figures of a matcher."""

    conditions: dict[str, GroupScore]
    map: MapScore
    matches: float  # a pair
    queries: tuple[QueryScore, ...]
    submission: str  # the file of poses


def group_score(queries: Sequence[QueryScore]) -> GroupScore:
    """The score of the queries of a condition; those that were not localized count as wrong."""
    localized, known = [query for query in queries if query.reason is None], _known(queries)
    shares = [
        np.mean([q.error_m <= metres and q.error_deg <= deg for q in known]) for metres, deg in THRESHOLDS if known
    ]
    return GroupScore(
        queries=len(queries),
        localized=len(localized),
        inliers=float(np.median([query.inliers for query in localized])) if localized else 0.0,
        scored=len(known),
        shares=tuple(float(share) for share in shares),
        median_error_m=float(np.median([query.error_m for query in known])) if known else UNKNOWN,
        median_error_deg=float(np.median([query.error_deg for query in known])) if known else UNKNOWN,
    )


def main_table(results: Sequence[Result], title: str) -> Table:
    """What was localized, in which map, at what cost."""
    rows = []
    for result in results:
        scores: Scores = result.figures
        for condition, group in scores.conditions.items():
            counts = [str(group.queries), str(group.localized), f"{group.inliers:.0f}"]
            world = [f"{scores.map.points}", f"{scores.map.track_length:.1f}"]
            cost = cost_cells(scores.matches, result.cost)
            rows.append([result.matcher, condition, *counts, *world, *cost])
    files = ", ".join(result.figures.submission for result in results)
    return Table(
        title=title,
        columns=["matcher", "condition", "queries", "localized", "inliers", "points", "track", *COST_COLUMNS],
        rows=rows,
        note=(
            "Inliers: median of the localized queries; points: of the map, triangulated from the matches between "
            "database pictures with their known poses; track: pictures that see a point on average; matches and "
            f"time a pair. Poses for the benchmark's service: {files}."
        ),
    )


def recall_table(results: Sequence[Result]) -> Table:
    """The paper's table, below our rows where true poses are known."""
    rows = []
    for result in results:
        for condition, group in result.figures.conditions.items():
            if group.scored:
                cells = [f"{100 * value:.1f}" for value in group.shares]
                errors = [_unless_infinite(group.median_error_m, " m"), _unless_infinite(group.median_error_deg, "°")]
                rows.append([result.matcher, condition, str(group.scored), *cells, *errors])
    scored = bool(rows)
    for name, values in PUBLISHED.items():
        rows.append([f"{name} (paper)", "night", "98", *(f"{value:.1f}" for value in values), "", ""])
    limits = [f"{metres:g} m, {degrees:g}°" for metres, degrees in THRESHOLDS]
    service = "send the file of poses to the benchmark's service, or score it here with --truth"
    return Table(
        title="Correctly localized queries (%)",
        columns=["matcher", "condition", "queries", *limits, "median", "error"],
        rows=rows,
        note=(
            "Queries that were not localized count as wrong. The paper's figures are of v1.0's night-time queries."
            if scored
            else f"The true poses are not public: {service}."
        ),
    )


def lost_table(results: Sequence[Result]) -> Table:
    """The queries without a pose, and why."""
    lost = [
        [result.matcher, query.name, query.reason]
        for result in results
        for query in result.figures.queries
        if query.reason is not None
    ]
    note = f"And {len(lost) - _SHOWN_LOST} more, in results.json." if len(lost) > _SHOWN_LOST else ""
    columns = ["matcher", "query", "reason"]
    return Table(title="Queries that were not localized", columns=columns, rows=lost[:_SHOWN_LOST], note=note)


def recall_curves(results: Sequence[Result]) -> Picture:
    """The share of queries within a distance, at most 10 degrees off, one panel for each condition."""
    most_m, degrees = THRESHOLDS[-1]
    metres = np.linspace(0, most_m, 201).tolist()
    panels = []
    for condition in results[0].figures.conditions:
        ours = {}
        for result in results:
            known = _known([query for query in result.figures.queries if query.condition == condition])
            errors = [query.error_m if query.error_deg <= degrees else float("inf") for query in known]
            ours[result.matcher] = share_within(errors, metres).tolist()
        panels.append(Panel(title=condition, x=metres, ours=ours))
    return curve_panels(panels, title=f"Share of queries within a distance and {degrees:g}°", x_label="metres")


def _known(queries: Sequence[QueryScore]) -> list[QueryScore]:
    return [query for query in queries if not np.isnan(query.error_m)]


def _unless_infinite(value: float, unit: str) -> str:
    return f"{value:.3f}{unit}" if np.isfinite(value) else "-"
