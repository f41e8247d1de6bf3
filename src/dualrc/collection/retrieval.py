"""Which pictures probably show the same thing: one vector per picture, pooled from its coarse features."""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from dualrc.matcher import PictureFeatures
from dualrc.matches import FloatArray

_POWER = 3.0


@torch.inference_mode()
def global_descriptor(features: PictureFeatures) -> FloatArray:
    """A unit vector (c,) float32 of the whole picture; the more alike two are, the larger their dot product."""
    cells = F.normalize(features.network.coarse[0].flatten(1).float(), dim=0).T  # n c
    pooled = (cells.sign() * cells.abs() ** _POWER).mean(0)
    vector = pooled.sign() * pooled.abs() ** (1 / _POWER)
    return F.normalize(vector, dim=0).cpu().numpy()


def most_similar(queries: FloatArray, database: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """Indices into the database (n, c) of the k most similar to each query (q, c), best first: (q, min(k, n))."""
    k = min(k, len(database))
    found = np.empty((len(queries), k), np.int64)
    for start in range(0, len(queries), 1024):  # all against all of a large collection would not fit into memory
        scores = queries[start : start + 1024] @ database.T
        found[start : start + 1024] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return found
