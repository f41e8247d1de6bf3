"""Matching of all pairs into a store; stored pairs are not matched again."""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from dualrc.collection.progress import show_progress
from dualrc.collection.store import MatchStore
from dualrc.errors import DualRCError, ImageError, OutputError
from dualrc.evaluation.matchers import PairMatcher
from dualrc.files import content_hashes, make_folder, replacing
from dualrc.image import read
from dualrc.matches import Matches


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two images to match, with the names used in stores and results."""

    name0: str
    name1: str
    path0: Path
    path1: Path
    # Sequence or scene.
    group: str
    # Number of columns and rows that are cut off image 1, on the left and at the top.
    crop1: tuple[int, int] | None = None

    @property
    def names(self) -> str:
        """Both names, as in the results."""
        return f"{self.name0} {self.name1}"


def file_name(text: str) -> str:
    """Convert a text to a valid part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def export(
    pairs: Sequence[Pair],
    matcher: PairMatcher,
    folder: Path,
    *,
    config: Mapping[str, Any],
    top: int,
    console: Console,
) -> Path:
    """Match the pairs that the store lacks, and return its path; pairs that fail are stored with the reason."""
    make_folder(folder)
    whole = {**config, "matcher": matcher.config, "top": top}
    # Each config has its own store, so that matches of different configs are neither mixed nor overwritten.
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:10]
    path = folder / f"matches-{file_name(matcher.name)}-{digest}.sqlite"
    by_names = {(pair.name0, pair.name1): pair for pair in pairs}
    with (
        MatchStore(path, whole) as store,
        show_progress(console.quiet) as tell,
        tempfile.TemporaryDirectory(prefix="dualrc-crops-") as crops,
    ):
        paths = {name: path for pair in pairs for name, path in ((pair.name0, pair.path0), (pair.name1, pair.path1))}
        if changed := store.forget_changed(content_hashes(paths)):
            console.print(f"{len(changed)} images have changed; their pairs are matched again.")
        missing = store.missing(by_names)
        present = len(by_names) - len(missing)
        step = f"{matcher.name}, matching"
        tell(step, present, len(by_names))
        for done, names in enumerate(missing, start=present + 1):
            store.put(*names, _match(by_names[names], matcher, top, Path(crops)))
            tell(step, done, len(by_names))
    if present:
        console.print(f"{matcher.name}: {present} pairs were in {path.name}, {len(missing)} new.")
    for other in sorted(folder.glob("matches-*.sqlite")):
        if other.name != path.name and other.stem.rpartition("-")[0] == path.stem.rpartition("-")[0]:
            words = f"{other.name} was made with another config or dataset and is not used."
            console.print(f"{matcher.name}: {words}", style="yellow")
    return path


def _match(pair: Pair, matcher: PairMatcher, top: int, crops: Path) -> Matches:
    try:
        path1 = pair.path1 if pair.crop1 is None else _cropped_copy(pair.path1, pair.crop1, crops)
        return matcher.match(pair.path0, path1).top(top)
    except OutputError:
        # A full disk is not a failure of the pair, and would fail all pairs that follow.
        raise
    except DualRCError as error:
        return Matches.none({"error": str(error)})


def _cropped_copy(path: Path, crop: tuple[int, int], folder: Path) -> Path:
    """Write a cropped image to a file, because matchers take paths."""
    copy = folder / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}.png"
    if not copy.exists():
        pixels = read_cropped(path, crop)
        with replacing(copy) as temporary:
            Image.fromarray(pixels).save(temporary, compress_level=1)
    return copy


def read_cropped(path: Path, crop: tuple[int, int] | None) -> Any:
    """Read an image without its first columns and rows: uint8 (h, w, 3)."""
    pixels = read(path)
    left, top = crop or (0, 0)
    if left >= pixels.shape[1] or top >= pixels.shape[0]:
        size = f"{pixels.shape[1]}x{pixels.shape[0]}"
        raise ImageError(f"{path} has {size} pixels, and a crop of {left},{top} leaves none; crop less.")
    return np.ascontiguousarray(pixels[top:, left:])
