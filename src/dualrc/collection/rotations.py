"""Rotations of all pictures from rotations between two.

A pair counts as much as the triples that it is part of agree. The best pairs that connect all pictures give the first
rotations, which robust averaging over all pairs refines.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dualrc.collection.store import Names
from dualrc.geometry import rotation_error_deg
from dualrc.types import FloatArray

IntArray = npt.NDArray[np.int64]

_ROUNDS = 10
_TRIPLES = 50  # of a pair that are looked at
_SCALE_DEG = 5.0  # a pair that is off by this counts a quarter


class RotationGraph:
    """Rotations of pictures, each known within its component."""

    def __init__(self, edges: Mapping[Names, tuple[FloatArray, float]]) -> None:
        """`edges` gives, for two names, R1 R0^T (3, 3) and a weight."""
        names = sorted({name for pair in edges for name in pair})
        self._index = {name: number for number, name in enumerate(names)}
        ends = np.array([[self._index[a], self._index[b]] for a, b in edges], dtype=np.int64).reshape(-1, 2)
        relative = np.array([R for R, _ in edges.values()]).reshape(-1, 3, 3)
        weights = np.array([weight for _, weight in edges.values()], dtype=np.float64)
        weights *= _triple_support(ends, relative)
        self._component, self._rotations = _spanning_tree(len(names), ends, relative, weights)
        _average(self._rotations, ends, relative, weights)

    def component(self, name: str) -> int:
        """The number of a picture's component; -1 for a picture without pairs."""
        return int(self._component[self._index[name]]) if name in self._index else -1

    def between(self, name0: str, name1: str) -> FloatArray | None:
        """The rotation (3, 3) from picture 0 to picture 1; None where they are not connected."""
        if not 0 <= self.component(name0) == self.component(name1):
            return None
        rotation: FloatArray = self._rotations[self._index[name1]] @ self._rotations[self._index[name0]].T
        return rotation

    def absolute(self, name: str) -> FloatArray:
        """The rotation (3, 3) of a picture in its component."""
        rotation: FloatArray = self._rotations[self._index[name]]
        return rotation


def _triple_support(ends: IntArray, relative: FloatArray) -> FloatArray:
    """For each pair, the share of its triples of pictures whose rotations cancel out; half where it has none: (n,)."""
    rotations: dict[int, dict[int, FloatArray]] = defaultdict(dict)
    for (a, b), rotation in zip(ends.tolist(), relative, strict=True):
        rotations[a][b], rotations[b][a] = rotation, rotation.T
    support = np.empty(len(ends))
    for row, (a, b) in enumerate(ends.tolist()):
        between = sorted(rotations[a].keys() & rotations[b].keys())[:_TRIPLES]
        turns = [rotation_error_deg(rotations[c][b] @ rotations[a][c], relative[row]) for c in between]
        support[row] = (sum(turn < _SCALE_DEG for turn in turns) + 0.5) / (len(turns) + 1)
    return support


def _spanning_tree(
    count: int, ends: IntArray, relative: FloatArray, weights: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Components (n,), and rotations (n, 3, 3) along the pairs of largest weight."""
    component, rotations = np.full(count, -1, np.int64), np.tile(np.eye(3), (count, 1, 1))
    parent = np.arange(count)

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = int(parent[node])
        return node

    neighbors: list[list[tuple[int, FloatArray]]] = [[] for _ in range(count)]
    for row in np.argsort(-weights, kind="stable"):
        a, b = ends[row]
        if root(a) != root(b):
            parent[root(a)] = root(b)
            neighbors[a].append((b, relative[row]))
            neighbors[b].append((a, relative[row].T))
    number = 0
    for start in range(count):
        if component[start] < 0:
            component[start], todo = number, [start]
            while todo:
                node = todo.pop()
                for other, rotation in neighbors[node]:
                    if component[other] < 0:
                        component[other] = number
                        rotations[other] = rotation @ rotations[node]
                        todo.append(other)
            number += 1
    return component, rotations


def _average(rotations: FloatArray, ends: IntArray, relative: FloatArray, weights: FloatArray) -> None:
    """Change the rotations so that all pairs fit, those that don't counting less (Geman-McClure)."""
    from scipy.sparse import coo_array, diags_array
    from scipy.sparse.linalg import splu

    count = len(rotations)
    if not len(ends) or len(ends) < count:
        return  # a tree fits its pairs exactly
    first, second = ends.T
    base = weights / max(float(weights.max()), 1e-12)
    for _ in range(_ROUNDS):
        # What is left over, as seen from the world: R1 = exp(residual) applied between the two.
        residual = _logarithm(rotations[second].transpose(0, 2, 1) @ relative @ rotations[first])
        off = np.degrees(np.linalg.norm(residual, axis=1))
        weight = base / (1 + (off / _SCALE_DEG) ** 2) ** 2
        entries = np.concatenate([weight, weight, -weight, -weight])
        rows = np.concatenate([first, second, first, second])
        columns = np.concatenate([first, second, second, first])
        laplacian = coo_array((entries, (rows, columns)), shape=(count, count)) + diags_array(np.full(count, 1e-9))
        right = np.zeros((count, 3))
        np.add.at(right, second, weight[:, None] * residual)
        np.add.at(right, first, -weight[:, None] * residual)
        step = splu(laplacian.tocsc()).solve(right)
        rotations[:] = rotations @ _exponential(step)
        if np.abs(step).max() < 1e-4:
            break


def _logarithm(rotations: FloatArray) -> FloatArray:
    """Axes times angles: (n, 3, 3) -> (n, 3)."""
    from scipy.spatial.transform import Rotation

    return np.asarray(Rotation.from_matrix(rotations).as_rotvec())


def _exponential(vectors: FloatArray) -> FloatArray:
    from scipy.spatial.transform import Rotation

    return np.asarray(Rotation.from_rotvec(vectors).as_matrix())
