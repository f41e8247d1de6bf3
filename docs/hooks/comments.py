"""Griffe extension: the comments above or beside the fields of a dataclass are their documentation."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

# A field without a default.
_FIELD = re.compile(r" +\w+: [\w |\[\], .]+")


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def comment_of(lines: list[str], number: int, last: int | None = None) -> str:
    """The comment beside the statement that spans these lines, counted from 1, or the one above it."""
    beside = lines[(last or number) - 1].split("  # ", 1)
    above: list[str] = []
    for line in reversed(lines[: number - 1]):
        # A comment also explains the fields that follow without one: `size0`, then `size1`.
        if not above and _FIELD.fullmatch(line):
            continue
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    texts = [" ".join(above), beside[1].strip() if len(beside) == 2 and "noqa" not in beside[1] else ""]
    return " ".join(text[:1].upper() + text[1:] for text in texts if text)


class Comments(griffe.Extension):
    """Gives attributes without a docstring the comment that explains them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for every attribute that griffe finds."""
        # A signature shows the same default.
        factory = re.fullmatch(r"field\(default_factory=(\w+)\)", str(attr.value))
        if factory is not None:
            attr.value = f"{factory[1]}()"
        if attr.docstring is None and attr.lineno is not None and isinstance(attr.filepath, Path):
            text = comment_of(_lines(attr.filepath), attr.lineno, attr.endlineno)
            if text:
                attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)
