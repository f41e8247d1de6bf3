"""Evidence that two images show the same scene, from their matches: scores, number and agreement.

The best match of each cell of a grid counts, so that one well-matched part does not dominate. Content at the same
position in both images (a stamp, a caption, bars, a frame, a watermark) is not evidence, unless the center of the
images is static too.
"""

from typing import NamedTuple

import numpy as np

from dualrc.types import BoolArray, FloatArray, IntArray, Size

# Number of best matches that are examined.
LOOKED_AT = 4000
# Cells along each side of an image.
_GRID = 16
# Number of best cells that count, a quarter of all.
_CELLS = 64
# Log-odds of a cell without a match.
_NOTHING = -5.0
# Upper bound of log-odds, because rounding can give a score of 1.
_LARGEST = 7.0
# Number of sampled motions and epipolar geometries.
_TRIALS = 200
# Number of neighboring cells from which a motion is sampled.
_NEIGHBORS = 6
# Inlier thresholds in units of the long side. The affine one is wide, because scenes are not planar.
_MOTION = 0.02
_EPIPOLAR = 0.004
# Largest motion of a static match, and of a match that slides along a border, in units of the side.
_STILL, _SLIDE = 0.03, 0.01
# Largest motion of a static match relative to a corner in pixels, for images of different sizes.
_STILL_PX = 3.0
# Width of the border in units of the side; the rest is the center.
_BORDER = 0.25
# The center has the same motion if at least these shares of all its cells and of its matched cells do.
_ALIKE_OF_ALL, _ALIKE_OF_MATCHED = 0.25, 0.6


class Evidence(NamedTuple):
    """Evidence in the matches of a pair."""

    # Mean log-odds of the scores of the best 64 cells.
    strength: float
    # Share of these cells that agree with one affine motion.
    motion: float
    # Share of these cells that agree with one epipolar geometry.
    epipolar: float


def collect(points0: FloatArray, points1: FloatArray, scores: FloatArray, size0: Size, size1: Size) -> Evidence:
    """Collect the evidence in matches (n, 2), (n, 2) with calibrated scores (n,)."""
    finite = _both(np.isfinite(points0)) & _both(np.isfinite(points1)) & (scores > 0)
    order = np.argsort(-scores, kind="stable")
    order = order[finite[order]][:LOOKED_AT]
    side0, side1 = (np.maximum(np.array(size, dtype=np.float64), 1) for size in (size0, size1))
    here, there = points0[order].astype(np.float64), points1[order].astype(np.float64)
    # Start from the image with the more compact matches, so that the result is symmetric in the images.
    if len(order) and (here / side0).std() > (there / side1).std():
        here, there, side0, side1 = there, here, side1, side0
    votes = np.flatnonzero(_voting(here, there, side0, side1))
    rows = np.sort(votes[_first_of_cells(here[votes] / side0)])[:_CELLS]
    here, there = here[rows] / side0.max(), there[rows] / side1.max()
    score = scores[order][rows].astype(np.float64)
    odds = np.minimum(np.log(np.maximum(score, 1e-12) / np.maximum(1 - score, 1e-12)), _LARGEST)
    strength = float((np.maximum(odds, _NOTHING).sum() + (_CELLS - len(odds)) * _NOTHING) / _CELLS)
    if len(rows) < 8:
        return Evidence(strength, 0.0, 0.0)
    random = np.random.default_rng(0)
    return Evidence(
        strength,
        _motion_cells(here, there, score, random) / _CELLS,
        _epipolar_cells(here, there, score, random) / _CELLS,
    )


def fills_few_cells(points: FloatArray, size: Size) -> bool:
    """Return whether points (n, 2) are in fewer cells of the image than count as evidence."""
    return len(points) < _CELLS or int(np.count_nonzero(np.bincount(_cell(points / np.array(size))))) < _CELLS


def _cell(unit: FloatArray) -> IntArray:
    """Return the cells of positions (n, 2) in units of the sides of the image."""
    column, row = np.clip(unit * _GRID, 0, _GRID - 1).astype(np.int64).T
    return column + _GRID * row


def _first_of_cells(unit: FloatArray) -> IntArray:
    """Return the index of the first position in each cell, which is the best one."""
    return np.unique(_cell(unit), return_index=True)[1]


# NumPy reduces short axes slowly, so x and y are combined explicitly.


def _both(flags: BoolArray) -> BoolArray:
    """Return whether x and y are both true: (n, 2) -> (n,)."""
    return flags[:, 0] & flags[:, 1]


def _squared_length(vectors: FloatArray) -> FloatArray:
    """Return x**2 + y**2 of vectors (..., 2 or more)."""
    return np.square(vectors[..., 0]) + np.square(vectors[..., 1])


def _voting(here: FloatArray, there: FloatArray, side0: FloatArray, side1: FloatArray) -> BoolArray:
    """Return which matches, best first, count as evidence.

    Static matches do not count, nor matches that slide along a border at a constant distance, unless the center of the
    image has the same motion.
    """
    unit0, unit1 = here / side0, there / side1
    # (n, 2)
    apart = np.abs(unit0 - unit1)
    still = _both(apart < _STILL)
    for corner in ((0, 0), (1, 0), (0, 1), (1, 1)):
        still |= _both(np.abs((here - corner * side0) - (there - corner * side1)) < _STILL_PX)
    at_border = (np.minimum(unit0, 1 - unit0) < _BORDER) & (apart < _SLIDE)
    inside = np.flatnonzero(_both(np.abs(unit0 - 0.5) < 0.5 - _BORDER))
    middle = inside[_first_of_cells(unit0[inside])]
    cells = (_GRID * (1 - 2 * _BORDER)) ** 2
    votes = np.ones(len(here), dtype=np.bool_)
    for suspect, motion in ((still, still), *((at_border[:, axis], apart[:, axis] < _SLIDE) for axis in (0, 1))):
        if motion[middle].sum() < max(_ALIKE_OF_ALL * cells, _ALIKE_OF_MATCHED * len(middle)):
            votes &= ~suspect
    return votes


def _motion_cells(here: FloatArray, there: FloatArray, weight: FloatArray, random: np.random.Generator) -> int:
    """Return the number of cells that agree with the most common affine motion."""
    apart = _squared_length(here[:, None] - here)
    np.fill_diagonal(apart, np.inf)
    near = np.argpartition(apart, _NEIGHBORS, axis=1)[:, :_NEIGHBORS]
    seed = random.choice(len(here), _TRIALS, p=weight / weight.sum())
    # Two different neighbors for each sample.
    half = _NEIGHBORS // 2
    chosen = np.stack([random.integers(0, half, _TRIALS), random.integers(half, _NEIGHBORS, _TRIALS)], axis=1)
    others = near[seed[:, None], chosen]
    # (t, 2, 2) One row per neighbor.
    before, after = here[others] - here[seed][:, None], there[others] - there[seed][:, None]
    area = before[:, 0, 0] * before[:, 1, 1] - before[:, 0, 1] * before[:, 1, 0]
    # Collinear neighbors do not determine the motion.
    known = np.abs(area) > 1e-5
    adjoint = np.stack([before[:, 1, 1], -before[:, 0, 1], -before[:, 1, 0], before[:, 0, 0]], axis=1)
    motion = adjoint.reshape(-1, 2, 2) / np.where(known, area, 1)[:, None, None] @ after
    moved = (here - here[seed][:, None]) @ motion + there[seed][:, None]
    agree = (_squared_length(moved - there) < _MOTION**2).sum(1)
    return int(np.where(known, agree, 0).max())


def _epipolar_cells(here: FloatArray, there: FloatArray, weight: FloatArray, random: np.random.Generator) -> int:
    """Return the number of cells that agree with the most common epipolar geometry."""
    scales = [max(float(points.std()), 1e-3) for points in (here, there)]
    here, there = ((points - points.mean(0)) / scale for points, scale in zip((here, there), scales, strict=True))
    limit = _EPIPOLAR**2 / (scales[0] * scales[1])
    ones = np.ones((len(here), 1))
    here, there = np.hstack([here, ones]), np.hstack([there, ones])
    products = (there[:, :, None] * here[:, None]).reshape(-1, 9)
    # The largest keys of a row are a weighted sample without replacement.
    keys = np.log(random.random((_TRIALS, len(here)))) / np.maximum(weight, 1e-6)
    sample = np.argpartition(-keys, 7, axis=1)[:, :8]

    def agreeing(equations: FloatArray) -> BoolArray:
        """Return the cells that agree with the solutions of equations (t, k, 9) of eight cells or more: (t, n)."""
        matrix = np.linalg.eigh(equations.swapaxes(1, 2) @ equations)[1][:, :, 0].reshape(-1, 3, 3)
        lines1, lines0 = here @ matrix.swapaxes(1, 2), there @ matrix
        slope = _squared_length(lines1) + _squared_length(lines0)
        residual = lines1[..., 0] * there[:, 0] + lines1[..., 1] * there[:, 1] + lines1[..., 2] * there[:, 2]
        # Sampson distance.
        return np.square(residual) < limit * slope

    found = agreeing(products[sample])
    best = found[found.sum(1).argmax()]
    for _ in range(3):
        better = agreeing(products[None, best])[0] if best.sum() >= 8 else best
        if better.sum() <= best.sum():
            break
        best = better
    return int(best.sum())
