"""Rotation averaging: absolute rotations of all images from relative rotations of pairs.

The weight of a pair depends on the agreement of the triples that it is part of. A maximum spanning tree gives initial
rotations; robust averaging over all pairs refines them.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from dualrc.collection.store import Names
from dualrc.geometry import rotation_error_deg
from dualrc.types import FloatArray, IntArray

_ROUNDS = 10
# Maximum number of triples per pair.
_TRIPLES = 50
# Scale of the robust weights: a pair with this error has a quarter of its weight.
_SCALE_DEG = 5.0


class RotationGraph:
    """Absolute rotations of images, defined within each connected component."""

    def __init__(self, edges: Mapping[Names, tuple[FloatArray, float]]) -> None:
        """`edges`: the relative rotation R1 R0^T (3, 3) and a weight, by two names."""
        names = sorted({name for pair in edges for name in pair})
        index = {name: number for number, name in enumerate(names)}
        ends = np.array([[index[a], index[b]] for a, b in edges], dtype=np.int64).reshape(-1, 2)
        relative = np.array([R for R, _ in edges.values()]).reshape(-1, 3, 3)
        weights = np.array([weight for _, weight in edges.values()], dtype=np.float64)
        weights *= _triple_support(ends, relative)
        component, rotations = _spanning_tree(len(names), ends, relative, weights)
        _average(rotations, ends, relative, weights)
        self._component = dict(zip(names, component.tolist(), strict=True))
        self._rotation: dict[str, FloatArray] = dict(zip(names, rotations, strict=True))

    def between(self, name0: str, name1: str) -> FloatArray | None:
        """Return the rotation (3, 3) from image 0 to image 1, or None if they are not connected."""
        if name0 not in self._component or self._component[name0] != self._component.get(name1):
            return None
        return self._rotation[name1] @ self._rotation[name0].T


def _triple_support(ends: IntArray, relative: FloatArray) -> FloatArray:
    """Return for each pair the share (n,) of its triples whose rotations cancel; one half for pairs without triples."""
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
    """Return components (n,), and rotations (n, 3, 3) along a maximum spanning tree."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree

    # Ranks, because weights may be 0, which a sparse graph cannot hold.
    ranks = np.argsort(np.argsort(-weights, kind="stable")) + 1
    # With int32 indices, because functions for graphs of SciPy 1.13 accept no others.
    tree = minimum_spanning_tree(coo_array((ranks, ends.T.astype(np.int32)), shape=(count, count)))
    _, component = connected_components(tree, directed=False)
    rows = {(a, b): row for row, (a, b) in enumerate(ends.tolist())}
    rotations = np.tile(np.eye(3), (count, 1, 1))
    for start in np.unique(component, return_index=True)[1]:
        order, parents = breadth_first_order(tree, start, directed=False)
        for node, parent in zip(order[1:].tolist(), parents[order[1:]].tolist(), strict=True):
            step = relative[rows[parent, node]] if (parent, node) in rows else relative[rows[node, parent]].T
            rotations[node] = step @ rotations[parent]
    return component, rotations


def _average(rotations: FloatArray, ends: IntArray, relative: FloatArray, weights: FloatArray) -> None:
    """Refine rotations in place so that they fit all pairs, with Geman-McClure weights."""
    from scipy.sparse import coo_array, diags_array
    from scipy.sparse.linalg import splu
    from scipy.spatial.transform import Rotation

    count = len(rotations)
    if not len(ends) or len(ends) < count:
        # A tree fits its pairs exactly.
        return
    first, second = ends.T
    base = weights / max(float(weights.max()), 1e-12)
    for _ in range(_ROUNDS):
        # Residuals in the world frame.
        turns = Rotation.from_matrix(rotations[second].transpose(0, 2, 1) @ relative @ rotations[first])
        residual = turns.as_rotvec()
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
        rotations[:] = rotations @ Rotation.from_rotvec(step).as_matrix()
        if np.abs(step).max() < 1e-4:
            break
