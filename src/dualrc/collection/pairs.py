"""Choice of pairs: each unordered pair occurs once, with its names in sorted order."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations
from pathlib import Path

import numpy as np

from dualrc.collection.config import CollectionConfig
from dualrc.collection.retrieval import most_similar
from dualrc.collection.store import Names
from dualrc.errors import ConfigError, DataError
from dualrc.files import read_text, write_text
from dualrc.types import FloatArray

# Largest collection that `auto` matches exhaustively, in images.
_FEW = 60
_WORD = re.compile(r'"([^"]*)"|(\S+)')


def choose(
    names: Sequence[str], config: CollectionConfig, describe: Callable[[], dict[str, FloatArray]]
) -> list[Names]:
    """Return the pairs that a config asks for.

    `describe`: returns the descriptors of the readable images; it is called only if they are needed.
    """
    how, overlap, loops = config.pairs, config.overlap, config.loops
    if how == "auto":
        how = "exhaustive" if len(names) <= _FEW else "retrieval"
    if how == "exhaustive":
        return exhaustive(names)
    if how == "sequential" and (loops == 0 or len(names) <= overlap + 1):
        return sequential(names, overlap)
    if how in ("sequential", "retrieval"):
        described = describe()
        if len(described) < 2:
            return []
        usable, vectors = [*described], np.stack([*described.values()])
        if how == "sequential":
            return sequential(usable, overlap, vectors, loops)
        return retrieval(usable, vectors, config.neighbors)
    if Path(how).is_dir():
        return covisible(names, how, config.neighbors)
    if Path(how).is_file():
        return from_file(names, how)
    known = "auto, exhaustive, sequential, retrieval, a text file or the folder of a COLMAP model"
    raise ConfigError(f"pairs = {how!r} is neither a strategy nor a file or folder; pass {known}.")


def exhaustive(names: Sequence[str]) -> list[Names]:
    """Return all pairs."""
    return list(combinations(sorted(set(names)), 2))


def sequential(
    names: Sequence[str], overlap: int, descriptors: FloatArray | None = None, loops: int = 0
) -> list[Names]:
    """Return the pairs of every image with the next `overlap` images, and with `loops` similar, distant images.

    The distant images close loops where a camera returns to a place; they need one descriptor per image.
    """
    near = [(names[i], names[j]) for i in range(len(names)) for j in range(i + 1, min(i + overlap + 1, len(names)))]
    return _once(near if descriptors is None else near + retrieval(names, descriptors, loops, overlap))


def retrieval(names: Sequence[str], descriptors: FloatArray, k: int, overlap: int = 0) -> list[Names]:
    """Return the pairs of every image with the `k` most similar images, of those more than `overlap` places away."""
    pairs = []
    for index, alike in enumerate(most_similar(descriptors, descriptors, k + 2 * overlap + 1)):
        others = [other for other in alike.tolist() if abs(other - index) > overlap]
        pairs += [(names[index], names[other]) for other in others[:k]]
    return _once(pairs)


def covisible(names: Iterable[str], model: str | Path, k: int) -> list[Names]:
    """Return the pairs of every image of a COLMAP model with the `k` images that share most 3D points with it."""
    from dualrc.colmap import read_model

    images = read_model(model).images
    known = sorted(images.keys() & set(names))
    if not known:
        raise DataError(f"The folder has no image of the model {model}; pass the folder with the images of the model.")
    seen_by: dict[int, list[str]] = {}
    for name in known:
        for point in np.unique(images[name].point_ids).tolist():
            seen_by.setdefault(point, []).append(name)
    pairs = []
    for name in known:
        points = np.unique(images[name].point_ids).tolist()
        shared = Counter(other for point in points for other in seen_by[point] if other != name)
        pairs += [(name, other) for other in sorted(shared, key=lambda other: (-shared[other], other))[:k]]
    return _once(pairs)


def from_file(names: Iterable[str], path: str | Path) -> list[Names]:
    """Return the pairs of a text file with `name0 name1` per line, as COLMAP and hloc write it.

    Names with spaces are separated by a tab, as `write_pairs` does, or enclosed in double quotes. A line with
    neither is accepted if only one pair of image names fits it.
    """
    known, pairs = set(names), []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        found = _readings(line, known)
        if len(found) == 1:
            pairs += found
        elif line.strip() and not line.startswith("#"):
            words = _words(line)
            problem = f"{line.strip()!r} is not a pair of images"
            remedy = 'separate two names by a tab, or quote names with spaces as "name"'
            if not found and len(words) == 2 and words[0] != words[1]:
                missing = next((word for word in words if word not in known), words[0])
                problem, remedy = f"{missing!r} is not in the folder", "write names relative to the folder"
            raise DataError(f"{path}, line {number}: {problem}; {remedy}.")
    if not pairs:
        raise DataError(f"{path} lists no pairs; write two names per line.")
    return _once(pairs)


def write_pairs(path: str | Path, pairs: Iterable[Names]) -> None:
    """Write a text file for `from_file`; COLMAP and hloc can read it too if no name has spaces."""
    lines = []
    for pair in pairs:
        plain = not any(re.search(r'[\s"]|^#', name) for name in pair)
        lines.append((" " if plain else "\t").join(pair) + "\n")
    write_text(path, "".join(lines))


def _readings(line: str, known: AbstractSet[str]) -> list[Names]:
    """Return the pairs of known names that a line can mean, by the strictest syntax that fits."""
    spaces = [at for at, character in enumerate(line) if character == " "]
    for readings in (
        [line.split("\t", 1)],
        [_words(line)],
        [(line[:at].strip(), line[at:].strip()) for at in spaces],
    ):
        # Lists of another length are no pairs.
        found = [(name[0], name[1]) for name in readings if len(name) == len(known & set(name)) == 2]
        if found:
            return list(dict.fromkeys(found))
    return []


def _words(line: str) -> list[str]:
    if "\t" in line:
        return [word.strip().strip('"') for word in line.split("\t")]
    return [quoted or plain for quoted, plain in _WORD.findall(line)]


def _once(pairs: Iterable[Names]) -> list[Names]:
    """Return each unordered pair once, in order of first occurrence."""
    return list(dict.fromkeys((min(pair), max(pair)) for pair in pairs))
