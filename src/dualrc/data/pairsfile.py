"""Pairs files as published with the paper: each line has two image names and x0 y0 x1 y1 of each correspondence."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from dualrc.data.pairs import LazyPair, PairSample
from dualrc.data.views import CutConfig
from dualrc.errors import DataError
from dualrc.files import inside, is_file, read_text, replacing
from dualrc.formats import SUFFIXES
from dualrc.types import FloatArray

_FORM = "write `image0 image1 x0 y0 x1 y1 ...`, four numbers per correspondence"


@dataclass(frozen=True, kw_only=True)
class PairsFileConfig(CutConfig):
    """Pairs from a file with lines `image0 image1 x0 y0 x1 y1 ...`."""

    # Pairs file: `image0 image1 x0 y0 x1 y1 ...` in each line.
    file: str
    # Folder to which the names in the file are relative.
    images: str
    # Selects this source.
    kind: Literal["pairs"] = "pairs"


@dataclass(frozen=True, kw_only=True, eq=False)
class PairLine:
    """One line of a pairs file."""

    name0: str
    name1: str
    # (n, 2), in pixels of the original image.
    points0: FloatArray
    points1: FloatArray


class TooFewPointsError(DataError):
    """The images of a pair share too few points."""


def read_pairs(file: str | Path, images: str | Path) -> list[LazyPair]:
    """Return the pairs of a file; lines are parsed when their pair is loaded."""
    file, images = Path(file), Path(images)
    if not images.is_dir():
        raise DataError(f"The image folder {images} does not exist; check the path.")
    pairs = [
        LazyPair(name=f"{file.name}, line {number}", load=partial(_load, line, images))
        for number, line in enumerate(read_text(file).splitlines(), start=1)
        if line.strip()
    ]
    if not pairs:
        raise DataError(f"The pairs file {file} is empty; {_FORM}.")
    return pairs


def _load(line: str, images: Path) -> PairSample:
    pair = parse_line(line)
    return PairSample(
        image0=inside(images, pair.name0),
        image1=inside(images, pair.name1),
        points0=pair.points0,
        points1=pair.points1,
    )


def parse_line(line: str) -> PairLine:
    """Parse a line; names may have spaces if both end like image files."""
    words = line.split()
    numbers = len(words)
    while numbers and _is_number(words[numbers - 1]):
        numbers -= 1
    # Numbers that do not form a group of four belong to the second name.
    numbers += (len(words) - numbers) % 4
    names = _split_names(words[:numbers])
    values = np.array([float(word) for word in words[numbers:]]).reshape(-1, 2, 2)
    if not np.isfinite(values).all():
        raise DataError(f"A coordinate is not a finite number; {_FORM}.")
    return PairLine(name0=names[0], name1=names[1], points0=values[:, 0], points1=values[:, 1])


def format_line(pair: PairLine) -> str:
    """Format a pair as a line."""
    values = np.concatenate([pair.points0, pair.points1], axis=1).ravel().tolist()
    line = " ".join([pair.name0, pair.name1, *(f"{value:.3f}" for value in values)])
    try:
        told = parse_line(line)
        same = (told.name0, told.name1) == (pair.name0, pair.name1)
    except DataError:
        same = False
    if not same or len(line.splitlines()) != 1:
        raise DataError(f"{pair.name0} and {pair.name1} are ambiguous in a pairs file; rename them without spaces.")
    return line


def write_pairs(path: str | Path, lines: Iterable[str]) -> int:
    """Write a pairs file of formatted lines atomically, and return the number of pairs."""
    count = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
            count += 1
    return count


def lines_of(
    pairs: Sequence[LazyPair], images: str | Path, *, points: int, seed: int, skipped: dict[str, str]
) -> Iterator[str]:
    """Yield lines for pairs, with names relative to `images`; `skipped` gets unusable pairs."""
    for number, pair in enumerate(pairs):
        try:
            line = line_of(pair.load(), images, points=points, seed=[seed, number])
        except DataError as error:
            skipped[pair.name] = str(error)
            continue
        yield line
    if len(skipped) == len(pairs):
        name, reason = next(iter(skipped.items()))
        raise DataError(f"None of the {len(pairs)} pairs can be used; correct the data. The first, {name}: {reason}")


def line_of(sample: PairSample, images: str | Path, *, points: int, seed: list[int]) -> str:
    """Return a line with `points` random correspondences of a pair, with names relative to `images`."""
    names = []
    for image in (sample.image0, sample.image1):
        if not isinstance(image, Path) or not is_file(image):
            raise DataError(f"{image} does not exist; copy it there.")
        names.append(image.relative_to(images).as_posix())
    if len(sample.points0) < points:
        raise TooFewPointsError(f"{len(sample.points0)} corresponding points are too few.")
    chosen = np.random.default_rng(seed).choice(len(sample.points0), points, replace=False)
    points0, points1 = sample.points0[chosen], sample.points1[chosen]
    return format_line(PairLine(name0=names[0], name1=names[1], points0=points0, points1=points1))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _split_names(words: list[str]) -> tuple[str, str]:
    """Split the words before the numbers into two names."""
    if len(words) == 2:
        return words[0], words[1]
    splits = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    found = [names for names in splits if all(name.lower().endswith(SUFFIXES) for name in names)]
    if len(found) == 1:
        return found[0]
    problem = "The names are ambiguous" if len(words) > 2 else "A name is missing"
    raise DataError(f"{problem}; {_FORM}.")
