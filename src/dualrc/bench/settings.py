"""What to measure, and the command line's words for it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dualrc.config import MIN_SIDE
from dualrc.errors import ConfigError
from dualrc.matcher import Precision
from dualrc.types import Size

Other = Literal["reference", "loftr", "sift"]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    sizes: tuple[Size, ...]  # of the pictures, (width, height)
    devices: tuple[str, ...] = ()  # none: the best there is
    engines: tuple[str, ...] = ()  # each is a method of its own; none: the best for the device
    preset: str = "default"
    weights: Path | None = None
    precision: Precision | None = None
    max_memory: float | None = None  # GiB for a pair; None: most of what is free
    pair: tuple[Path, Path] | None = None  # None: a rendered scene
    batch: int | None = None  # pairs; None: 32 on a GPU, 4 elsewhere, of pictures that are not large; 0: no batches
    others: tuple[Other, ...] = ()
    repeats: int | None = None  # None: 20 on a GPU, 5 elsewhere; 0: memory alone
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 0:
            raise ConfigError(f"--batch {self.batch} must not be negative; 0 leaves batches out.")
        if self.repeats is not None and self.repeats < 0:
            raise ConfigError(f"--repeats {self.repeats} must not be negative; 0 measures memory alone.")


def parse_sizes(texts: Sequence[str]) -> tuple[Size, ...]:
    """Picture sizes from WIDTHxHEIGHT, or those that a laptop does in a minute."""
    sizes = []
    for text in texts:
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip().lower())
        if found is None:
            raise ConfigError(f"--size {text} is no size; give WIDTHxHEIGHT in pixels, such as 640x480.")
        sizes.append((int(found[1]), int(found[2])))
        if min(sizes[-1]) < MIN_SIDE:
            raise ConfigError(f"--size {text} is too small; give at least {MIN_SIDE} pixels a side.")
    return tuple(dict.fromkeys(sizes)) or ((320, 240), (640, 480))


def parse_others(names: Sequence[str]) -> tuple[Other, ...]:
    """Methods that are measured beside this project's."""
    for name in names:
        if name not in get_args(Other):
            raise ConfigError(f"--with {name} is not known; choose from {', '.join(get_args(Other))}.")
    return tuple(other for other in get_args(Other) if other in names)
