"""Image retrieval: one descriptor per image, pooled from its coarse features.

Second-order pooling ranks neighbors better than mean, maximum and generalized-mean pooling of the same features, most
of all indoors. It represents which features occur together, not only the strength of each.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from dualrc.files import limit_zip, replacing
from dualrc.matcher import ImageFeatures
from dualrc.types import FloatArray, IntArray

# Channels after a fixed random projection. All channels rank slightly better but take many times the memory.
_CHANNELS = 64
# Number of queries compared at once.
_ROWS = 1024


@torch.inference_mode()
def global_descriptor(features: ImageFeatures) -> FloatArray:
    """Return a unit descriptor (c,) float32 of an image; similar images have a large dot product."""
    # On the CPU, so that the projection is the same for every device; the map is small: (n, c).
    cells = F.normalize(features.maps.coarse[0].flatten(1).float().cpu(), dim=0).T
    channels = cells.shape[1]
    random = torch.randn(channels, channels, generator=torch.Generator().manual_seed(0))
    cells = cells @ torch.linalg.qr(random).Q[:, :_CHANNELS]
    values, vectors = torch.linalg.eigh(cells.T @ cells / len(cells))
    # The square root keeps a texture that fills the image from dominating.
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    row, column = torch.triu_indices(*root.shape)
    return F.normalize(root[row, column], dim=0).numpy()


def most_similar(queries: FloatArray, database: FloatArray, k: int) -> IntArray:
    """Return indices into the database (n, c) of the k most similar to each query (q, c), best first: (q, min(k, n)).

    The mean of the database is subtracted first, because it does not discriminate between images.
    """
    common = database.mean(0) if len(database) > 2 else np.zeros_like(database[:1])
    known, asked = _units(database - common), _units(queries - common)
    k = max(0, min(k, len(database)))
    found = np.empty((len(queries), k), np.int64)
    # The similarities of a large collection would not fit into memory at once.
    for start in range(0, len(queries), _ROWS):
        scores = asked[start : start + _ROWS] @ known.T
        found[start : start + _ROWS] = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return found


def read_descriptors(
    path: Path, config: Mapping[str, Any], contents: Mapping[str, str] | None = None
) -> dict[str, FloatArray]:
    """Return descriptors by image name; empty if the file is missing, broken, over 4 GiB, or made with another config.

    `contents`: hashes of the image files; descriptors of images that have changed are left out.
    """
    try:
        limit_zip(path, 4 << 30)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if json.loads(str(arrays["config"])) != json.loads(json.dumps(config)):
                return {}
            found = zip(arrays["names"].tolist(), arrays["contents"].tolist(), arrays["vectors"], strict=True)
            return {name: each for name, content, each in found if contents is None or contents.get(name) == content}
    # The file is only a cache, and a damaged file can raise any exception.
    except Exception:
        return {}


def write_descriptors(
    path: Path, config: Mapping[str, Any], descriptors: Mapping[str, FloatArray], contents: Mapping[str, str]
) -> None:
    """Write all descriptors atomically; `contents` are hashes of the image files."""
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
