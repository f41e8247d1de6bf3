"""Tracks: sets of keypoints that show the same point, at most one in each image."""

from collections.abc import Iterator, Mapping

import numpy as np

from dualrc.types import BoolArray, IntArray


class Tracks:
    """Joins keypoints to tracks, pair by pair. Memory grows with the number of keypoints only."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        """`counts`: number of keypoints of each image."""
        starts = np.cumsum([0, *counts.values()])
        self._start = dict(zip(counts, starts.tolist(), strict=False))
        self._image = np.repeat(np.arange(len(counts)), list(counts.values()))
        # A track is a circular list of keypoints with the same label.
        self._label = np.arange(starts[-1])
        self._next = np.arange(starts[-1])

    def join(self, name0: str, name1: str, indices: IntArray) -> BoolArray:
        """Join keypoints (n, 2) of two images, one to one, and return which of them are now in the same track.

        Keypoints are not joined if their tracks have different keypoints of the same image.
        """
        first, second = indices.T + np.array([[self._start[name0]], [self._start[name1]]])
        joined: BoolArray = self._label[first] == self._label[second]
        rows = np.flatnonzero(~joined)
        seen = [np.zeros(0, np.int64)]
        for start in (first[rows], second[rows]):
            seen.extend(row * len(self._start) + self._image[member] for row, member in self._members(start))
        places, counts = np.unique(np.concatenate(seen), return_counts=True)
        clash = np.zeros(len(rows), dtype=np.bool_)
        clash[places[counts > 1] // len(self._start)] = True
        # Each track has at most one of these keypoints, so the order of the links does not matter.
        rows = rows[~clash]
        first, second = first[rows], second[rows]
        for row, member in self._members(second):
            self._label[member] = self._label[first[row]]
        self._next[first], self._next[second] = self._next[second], self._next[first]
        joined[rows] = True
        return joined

    def _members(self, start: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield the keypoints of the tracks of `start`, one of each track at a time, with their rows in `start`."""
        row, member = np.arange(len(start)), start
        while len(row):
            yield row, member
            member = self._next[member]
            more = member != start[row]
            row, member = row[more], member[more]
