"""Lens distortion: COLMAP's camera models, without focal lengths and principal points.

A lens maps the undistorted position (x / z, y / z) of a ray on the plane z = 1 to a distorted position; K then gives
the pixel. Both positions are (n, 2) and independent of any pixel convention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.types import BoolArray, FloatArray, IntArray

# Step of the finite differences.
_STEP = 1e-6
# Largest residual of a converged position, in focal lengths.
_CONVERGED = 1e-11
_ITERATIONS, _HALVINGS = 100, 20


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A camera model of COLMAP."""

    # Distorts positions by the coefficients.
    bend: Callable[[FloatArray, Sequence[float]], FloatArray]
    # Names of the coefficients in COLMAP's order.
    coefficients: str = ""
    # Whether the model has one focal length for both axes. `wide` is the equivalent model with two, zero-padded.
    one_focal: bool = False
    wide: str = ""
    # Whether `bend` uses angles: a position at angle theta from the axis has the distance theta.
    fisheye: bool = False
    # Pairs of coefficients (x, y) that are image vectors and rotate with the image.
    vectors: tuple[tuple[int, int], ...] = ()
    # Whether all coefficients 0 give a pinhole.
    straight: bool = True


def _squares(places: FloatArray) -> FloatArray:
    return np.sum(places**2, axis=1, keepdims=True)


def _polynomial(squares: FloatArray, coefficients: Sequence[float]) -> FloatArray:
    """Return 1 + c1 s + c2 s^2 + ..."""
    total = np.zeros_like(squares)
    for coefficient in reversed(coefficients):
        total = (total + coefficient) * squares
    return 1 + total


def _tangential(places: FloatArray, x: float, y: float) -> FloatArray:
    """Return the shift by a lens that is not parallel to the sensor; (x, y) is its tilt."""
    tilt = np.array([x, y])
    return _squares(places) * tilt + 2 * (places @ tilt)[:, None] * places


def _radial(places: FloatArray, k: Sequence[float]) -> FloatArray:
    return places * _polynomial(_squares(places), k)


def _opencv(places: FloatArray, c: Sequence[float]) -> FloatArray:
    # Only the full model has k3 and the three coefficients of the denominator.
    k1, k2, p1, p2, *more = c
    squares = _squares(places)
    ratio = _polynomial(squares, (k1, k2, *more[:1])) / _polynomial(squares, more[1:])
    return places * ratio + _tangential(places, p2, p1)


def _thin_prism(places: FloatArray, c: Sequence[float]) -> FloatArray:
    k1, k2, p1, p2, k3, k4, sx, sy = c
    prism = _squares(places) * np.array([sx, sy])
    return _radial(places, (k1, k2, k3, k4)) + _tangential(places, p2, p1) + prism


def _rad_tan_thin_prism(places: FloatArray, c: Sequence[float]) -> FloatArray:
    # Unlike in the other models, tilt and prism act on the radially distorted position.
    bent = _radial(places, c[:6])
    px, py, sx1, sx2, sy1, sy2 = c[6:]
    squares = _squares(bent)
    return bent + _tangential(bent, px, py) + squares * np.array([sx1, sy1]) + squares**2 * np.array([sx2, sy2])


def _fov(places: FloatArray, c: Sequence[float]) -> FloatArray:
    (omega,) = c
    if omega == 0:
        return places
    radius = np.maximum(np.sqrt(_squares(places)), 1e-12)
    return places * np.arctan(2 * radius * np.tan(omega / 2)) / (omega * radius)


def _division(places: FloatArray, c: Sequence[float]) -> FloatArray:
    # The model defines the inverse: an image position at radius r has the ray (x, y, 1 + k r^2).
    with np.errstate(invalid="ignore"):
        return places * (2 / (1 + np.sqrt(1 - 4 * c[0] * _squares(places))))


def _unified(places: FloatArray, c: Sequence[float]) -> FloatArray:
    alpha, beta = c
    return places / (alpha * np.sqrt(beta * _squares(places) + 1) + 1 - alpha)


_MODELS = {
    "SIMPLE_PINHOLE": _Model(bend=_radial, one_focal=True, wide="PINHOLE"),
    "PINHOLE": _Model(bend=_radial),
    "SIMPLE_RADIAL": _Model(bend=_radial, coefficients="k", one_focal=True, wide="OPENCV"),
    "RADIAL": _Model(bend=_radial, coefficients="k1 k2", one_focal=True, wide="OPENCV"),
    "OPENCV": _Model(bend=_opencv, coefficients="k1 k2 p1 p2", vectors=((3, 2),)),
    "OPENCV_FISHEYE": _Model(bend=_radial, coefficients="k1 k2 k3 k4", fisheye=True),
    "FULL_OPENCV": _Model(bend=_opencv, coefficients="k1 k2 p1 p2 k3 k4 k5 k6", vectors=((3, 2),)),
    "FOV": _Model(bend=_fov, coefficients="omega"),
    "SIMPLE_RADIAL_FISHEYE": _Model(
        bend=_radial, coefficients="k", one_focal=True, wide="OPENCV_FISHEYE", fisheye=True
    ),
    "RADIAL_FISHEYE": _Model(bend=_radial, coefficients="k1 k2", one_focal=True, wide="OPENCV_FISHEYE", fisheye=True),
    "THIN_PRISM_FISHEYE": _Model(
        bend=_thin_prism, coefficients="k1 k2 p1 p2 k3 k4 sx1 sy1", fisheye=True, vectors=((3, 2), (6, 7))
    ),
    "RAD_TAN_THIN_PRISM_FISHEYE": _Model(
        bend=_rad_tan_thin_prism,
        coefficients="k0 k1 k2 k3 k4 k5 p0 p1 s0 s1 s2 s3",
        fisheye=True,
        vectors=((6, 7), (8, 10), (9, 11)),
    ),
    "SIMPLE_DIVISION": _Model(bend=_division, coefficients="k", one_focal=True, wide="DIVISION"),
    "DIVISION": _Model(bend=_division, coefficients="k"),
    "SIMPLE_FISHEYE": _Model(bend=_radial, one_focal=True, wide="FISHEYE", fisheye=True),
    "FISHEYE": _Model(bend=_radial, fisheye=True),
    "EUCM": _Model(bend=_unified, coefficients="alpha beta", straight=False),
}


def _model(name: str) -> _Model:
    if name not in _MODELS:
        remedy = f"undistort the images, or give one of {', '.join(_MODELS)}"
        raise DataError(f"The camera model {name} is not supported; {remedy}.")
    return _MODELS[name]


@dataclass(frozen=True)
class Lens:
    """Lens distortion: the name of a COLMAP camera model, and its coefficients after f, cx and cy."""

    # Name of a COLMAP camera model.
    model: str = "PINHOLE"
    # Coefficients in the order of COLMAP.
    distortion: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        values = tuple(float(value) for value in self.distortion)
        names = _model(self.model).coefficients.split()
        if len(values) != len(names):
            expected = f"{len(names)} ({', '.join(names)})" if names else "none"
            raise DataError(f"{self.model} has {expected} distortion coefficients, not {len(values)}; correct them.")
        if not np.isfinite(values).all():
            raise DataError(f"{self.model} has distortion coefficients that are not finite; correct them.")
        object.__setattr__(self, "distortion", values)

    @property
    def distorts(self) -> bool:
        """Whether it differs from a pinhole."""
        model = _MODELS[self.model]
        return model.fisheye or not model.straight or any(self.distortion)

    def distort(self, places: npt.ArrayLike) -> FloatArray:
        """Distort positions (n, 2); NaN beyond the field of view, where the model is not one-to-one."""
        inner = self._inner(np.asarray(places, dtype=np.float64).reshape(-1, 2))
        return np.where(self._folds(inner)[:, None], np.nan, self._bend(inner)) if self.distorts else inner.copy()

    def undistort(self, places: npt.ArrayLike) -> FloatArray:
        """Invert `distort`, (n, 2); NaN for positions that correspond to nothing in front of the camera."""
        target = np.asarray(places, dtype=np.float64).reshape(-1, 2)
        if not self.distorts:
            return target.copy()
        inner = self._unbend(target)
        if _MODELS[self.model].fisheye:
            angle = np.linalg.norm(inner, axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):
                ratio = np.tan(angle) / np.maximum(angle, 1e-12)
                inner = np.where(angle < np.pi / 2, inner * np.where(angle < 1e-9, 1.0, ratio), np.nan)
        return inner

    def jacobian(self, places: npt.ArrayLike) -> FloatArray:
        """Return derivatives of `distort`: (n, 2) -> (n, 2, 2), one row per coordinate of the result."""
        points = np.asarray(places, dtype=np.float64).reshape(-1, 2)
        if not self.distorts:
            return np.broadcast_to(np.eye(2), (len(points), 2, 2))
        # Positions diverge at the edge of a fisheye's view, so the step grows with them.
        step = _STEP * (1 + np.linalg.norm(points, axis=1, keepdims=True))
        return _differences(lambda at: self._bend(self._inner(at)), points, step)

    def rotated(self, rotation: npt.ArrayLike) -> "Lens":
        """Return the lens of the same image rotated by a matrix (2, 2)."""
        values = np.array(self.distortion)
        for pair in _MODELS[self.model].vectors:
            values[list(pair)] = np.asarray(rotation, dtype=np.float64) @ values[list(pair)]
        return Lens(self.model, tuple(values.tolist()))

    def with_two_focals(self) -> "Lens":
        """Return the same lens in a COLMAP model with two focal lengths."""
        if not (wide := _MODELS[self.model].wide):
            return self
        zeros = len(_MODELS[wide].coefficients.split()) - len(self.distortion)
        return Lens(wide, (*self.distortion, *[0.0] * zeros))

    @staticmethod
    def layout(model: str) -> tuple[int, int]:
        """Return the number of focal lengths and of distortion coefficients of a COLMAP model."""
        kind = _model(model)
        return 1 if kind.one_focal else 2, len(kind.coefficients.split())

    def _inner(self, places: FloatArray) -> FloatArray:
        """Return the inputs of `bend`: the positions, or for a fisheye positions whose distances are angles."""
        if not _MODELS[self.model].fisheye:
            return places
        radius = np.linalg.norm(places, axis=1, keepdims=True)
        return places * np.where(radius < 1e-9, 1.0, np.arctan(radius) / np.maximum(radius, 1e-12))

    def _bend(self, inner: FloatArray) -> FloatArray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return _MODELS[self.model].bend(inner, self.distortion)

    def _folds(self, inner: FloatArray) -> BoolArray:
        """Return positions (n,) where `bend` is not one-to-one.

        Polynomials turn back beyond some radius. Without this check, points outside the view would appear in the image.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            (a, b), (c, d) = np.moveaxis(_differences(self._bend, inner, _STEP), 0, -1)
            outwards = np.sum(self._bend(inner) * inner, axis=1)
            upright: BoolArray = (a * d - b * c > 0) & ((outwards > 0) | ~inner.any(axis=1))
        return ~upright

    def _unbend(self, target: FloatArray) -> FloatArray:
        """Invert `bend` by damped Newton steps, halved until the residual decreases; NaN if there is no solution."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            inner = target.copy()
            away = _distances(self._bend(inner), target)
            todo = np.flatnonzero(away > _CONVERGED)
            for _ in range(_ITERATIONS):
                if not len(todo):
                    break
                step = solve(_differences(self._bend, inner[todo], _STEP), target[todo] - self._bend(inner[todo]))
                todo = todo[self._descend(inner, away, target, todo, step)]
                todo = todo[away[todo] > _CONVERGED]
            # For steep models, rounding stops the descent slightly above _CONVERGED.
            found = (away <= 100 * _CONVERGED * (1 + np.linalg.norm(target, axis=1))) & ~self._folds(inner)
        return np.where(found[:, None], inner, np.nan)

    def _descend(
        self, inner: FloatArray, away: FloatArray, target: FloatArray, rows: IntArray, step: FloatArray
    ) -> BoolArray:
        """Move rows of `inner` by their steps, halved until the residual decreases; return which rows moved."""
        moved = np.zeros(len(rows), dtype=np.bool_)
        for halving in range(_HALVINGS):
            left = np.flatnonzero(~moved)
            if not len(left):
                break
            trial = inner[rows[left]] + step[left] / 2**halving
            distances = _distances(self._bend(trial), target[rows[left]])
            nearer = distances < away[rows[left]]
            inner[rows[left[nearer]]], away[rows[left[nearer]]] = trial[nearer], distances[nearer]
            moved[left[nearer]] = True
        return moved


# No distortion.
PINHOLE = Lens()


def _distances(points0: FloatArray, points1: FloatArray) -> FloatArray:
    """Return distances (n,); infinite if a point is not finite."""
    distances = np.linalg.norm(points0 - points1, axis=1)
    return np.where(np.isfinite(distances), distances, np.inf)


def solve(J: FloatArray, residuals: FloatArray) -> FloatArray:
    """Solve J (n, 2, 2) step = residual for steps (n, 2); not finite if J is singular."""
    (a, b), (c, d) = np.moveaxis(J, 0, -1)
    x, y = residuals.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack([d * x - b * y, a * y - c * x], axis=1) / (a * d - b * c)[:, None]


def _differences(
    function: Callable[[FloatArray], FloatArray], points: FloatArray, step: FloatArray | float
) -> FloatArray:
    """Return derivatives (n, 2, 2) of a function of points (n, 2) by central differences."""
    columns = []
    for axis in np.eye(2):
        columns.append((function(points + step * axis) - function(points - step * axis)) / (2 * step))
    return np.stack(columns, axis=2)
