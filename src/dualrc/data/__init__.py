"""Training data: every reader gives the same kind of batch."""

from dualrc.data.pairs import PairBatch
from dualrc.data.photos import PhotoPairs, read_photos

__all__ = ["PairBatch", "PhotoPairs", "read_photos"]
