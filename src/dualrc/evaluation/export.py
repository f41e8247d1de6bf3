"""Matching once: every pair of a benchmark goes into a store, and what is there already is not done again."""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dualrc.collection.store import MatchStore
from dualrc.errors import DualRCError, ImageError, OutputError
from dualrc.evaluation.matchers import PairMatcher
from dualrc.files import replacing
from dualrc.image import read
from dualrc.matches import Matches


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two pictures to match, by the names that stand in stores and results."""

    name0: str
    name1: str
    path0: Path
    path1: Path
    group: str  # the sequence or scene
    crop1: tuple[int, int] | None = None  # columns and rows that picture 1 loses on the left and at the top


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Where a matcher's matches are, and what was done for that."""

    store: Path
    config: dict[str, Any]
    matched: int  # pairs matched now
    resumed: int  # pairs that were there
    others: tuple[str, ...]  # stores of the same matcher that were made with another config, left alone


def store_path(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    """A store for each config, so that matches made otherwise are never mixed in and never lost."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10]
    return folder / f"matches-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest}.sqlite"


def export(
    pairs: Sequence[Pair],
    matcher: PairMatcher,
    folder: Path,
    *,
    config: Mapping[str, Any],
    top: int,
    console: Console,
) -> Exported:
    """Match the pairs that the store lacks; a pair that can't be matched is stored with the reason."""
    make_folder(folder)
    whole = {**config, "matcher": matcher.config, "top": top}
    path = store_path(folder, matcher.name, whole)
    others = _other_stores(path)
    by_names = {(pair.name0, pair.name1): pair for pair in pairs}
    with MatchStore(path, whole) as store, progress_bar(console) as progress, _crops() as crops:
        missing = store.missing(by_names)
        task = progress.add_task(matcher.name, total=len(by_names), completed=len(by_names) - len(missing))
        for names in missing:
            store.put(*names, _matched(by_names[names], matcher, top, crops))
            progress.advance(task)
    return Exported(store=path, config=whole, matched=len(missing), resumed=len(by_names) - len(missing), others=others)


def make_folder(folder: Path) -> None:
    """Make a folder for results, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "move a file that is in its place, or write elsewhere"
        raise OutputError(f"The folder {folder} can't be made ({error.strerror}); {remedy}.") from error


def _other_stores(path: Path) -> tuple[str, ...]:
    """Stores of the same matcher beside this one."""
    stem = path.stem.rpartition("-")[0]
    names = sorted(other.name for other in path.parent.glob("matches-*.sqlite"))
    return tuple(name for name in names if name.rpartition("-")[0] == stem and name != path.name)


def cropped(path: Path, crop: tuple[int, int] | None) -> Any:
    """A picture without its first columns and rows: uint8 (h, w, 3)."""
    pixels = read(path)
    if crop is None:
        return pixels
    left, top = crop
    if left >= pixels.shape[1] or top >= pixels.shape[0]:
        size = f"{pixels.shape[1]}x{pixels.shape[0]}"
        raise ImageError(f"{path} has {size} pixels, and a crop of {left},{top} leaves nothing; crop less.")
    return np.ascontiguousarray(pixels[top:, left:])


def _matched(pair: Pair, matcher: PairMatcher, top: int, crops: "_Crops") -> Matches:
    try:
        return matcher.match(pair.path0, crops.path(pair.path1, pair.crop1)).top(top)
    except OutputError:
        raise  # a full disk is not the pair's fault, and would fail all that follow
    except DualRCError as error:
        return Matches.none({"error": str(error)})


class _Crops:
    """Cropped copies of pictures as files, because matchers take paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, path: Path, crop: tuple[int, int] | None) -> Path:
        if crop is None:
            return path
        name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        copy = self._folder / f"{name}.png"
        if not copy.exists():
            pixels = cropped(path, crop)
            with replacing(copy) as temporary:
                Image.fromarray(pixels).save(temporary, compress_level=1)
        return copy


@contextmanager
def _crops() -> Iterator[_Crops]:
    with tempfile.TemporaryDirectory(prefix="dualrc-crops-") as folder:
        yield _Crops(Path(folder))


def progress_bar(console: Console) -> Progress:
    """How many pairs are done, and how long the rest will take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pairs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
