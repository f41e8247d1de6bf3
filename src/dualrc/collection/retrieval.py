"""Which pictures probably show the same thing: one vector per picture, pooled from its coarse features.

Second-order pooling ranks neighbours better than means, maxima and generalized means of the same features, most of
all indoors: it says which features come together, not only how strong each is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from dualrc.files import limit_zip, replacing
from dualrc.matcher import PictureFeatures
from dualrc.types import FloatArray

_CHANNELS = 64  # after a fixed random projection; all of them rank a little better, for many times the memory
_ROWS = 1024  # queries compared at once


@torch.inference_mode()
def global_descriptor(features: PictureFeatures) -> FloatArray:
    """A unit vector (c,) float32 of the whole picture; the more alike two pictures are, the larger their product."""
    # On the CPU, so that every device gives the same projection; the map is small.
    cells = F.normalize(features.maps.coarse[0].flatten(1).float().cpu(), dim=0).T  # n c
    channels = cells.shape[1]
    random = torch.randn(channels, channels, generator=torch.Generator().manual_seed(0))
    cells = cells @ torch.linalg.qr(random).Q[:, :_CHANNELS]
    values, vectors = torch.linalg.eigh(cells.T @ cells / len(cells))
    # The square root keeps a texture that fills the picture from drowning the rest.
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    row, column = torch.triu_indices(*root.shape)
    return F.normalize(root[row, column], dim=0).numpy()


def most_similar(queries: FloatArray, database: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """Indices into the database (n, c) of the k most similar to each query (q, c), best first: (q, min(k, n)).

    What all of the database has in common is taken off first, because it tells nothing apart.
    """
    common = database.mean(0) if len(database) > 2 else np.zeros_like(database[:1])
    known, asked = _units(database - common), _units(queries - common)
    k = max(0, min(k, len(database)))
    found = np.empty((len(queries), k), np.int64)
    for start in range(0, len(queries), _ROWS):  # all against all of a large collection would fill the memory
        scores = asked[start : start + _ROWS] @ known.T
        found[start : start + _ROWS] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return found


def read_descriptors(
    path: Path, config: Mapping[str, Any], contents: Mapping[str, str] | None = None
) -> dict[str, FloatArray]:
    """Descriptors by picture name; none if the file is absent, broken, over 4 GiB, or made with another config.

    With `contents`, hashes of the pictures' files, only those of pictures that have not changed.
    """
    try:
        limit_zip(path, 4 << 30)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if json.loads(str(arrays["config"])) != json.loads(json.dumps(config)):
                return {}
            found = zip(arrays["names"].tolist(), arrays["contents"].tolist(), arrays["vectors"], strict=True)
            return {name: each for name, content, each in found if contents is None or contents.get(name) == content}
    except Exception:  # it is only a cache, and a damaged file can fail in any way
        return {}


def write_descriptors(
    path: Path, config: Mapping[str, Any], descriptors: Mapping[str, FloatArray], contents: Mapping[str, str]
) -> None:
    """Write them all, whole or not at all; `contents` are hashes of the pictures' files."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        vectors = np.stack([*descriptors.values()]) if descriptors else np.zeros((0, 0), np.float32)
        names, hashes = ([*descriptors], [contents[name] for name in descriptors])
        np.savez(
            file,
            names=np.array(names, dtype=str),
            contents=np.array(hashes, dtype=str),
            vectors=vectors,
            config=np.array(json.dumps(config)),
        )


def _units(vectors: FloatArray) -> FloatArray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
