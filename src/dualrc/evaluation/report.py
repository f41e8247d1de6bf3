"""Reports: tables on the terminal, a JSON file, figures, and one HTML page with all of them."""

import base64
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from PIL import Image
from rich.console import Console
from rich.text import Text

from dualrc.draw import save
from dualrc.files import make_folder, to_json, write_text
from dualrc.types import ImageArray

_IMAGE_WIDTH, _FIGURE_WIDTH = 1100, 1600


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns, for the terminal and for the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    # Left-aligned columns; the others contain numbers.
    text_columns: Sequence[str] = ("matcher",)

    def is_text(self, index: int) -> bool:
        """Return whether a column contains text."""
        return self.columns[index] in self.text_columns


@dataclass(frozen=True, kw_only=True)
class PairImage:
    """Drawing of the matches of a pair."""

    # Shown once above successive drawings with the same heading.
    heading: str
    caption: str
    image: ImageArray
    # File name, without number and extension.
    file: str
    # Sort key of the drawings of all matchers.
    order: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tables, figures and notes of a benchmark."""

    # The main table first.
    tables: Sequence[Table]
    # Diagrams by file name, without extension.
    figures: Mapping[str, ImageArray] = field(default_factory=dict)
    notes: Sequence[str] = ()
    # Additional entries of results.json.
    content: Mapping[str, Any] = field(default_factory=dict)


def share(value: float) -> str:
    """Format a share between 0 and 1 for tables: .456."""
    return "1.000" if value >= 0.9995 else f"{value:.3f}".removeprefix("0")


def seconds(value: float | None) -> str:
    """Format a time for tables."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.0f} ms"


def print_tables(tables: Sequence[Table], notes: Sequence[str], console: Console) -> None:
    """Print tables and notes to the terminal."""
    for table in tables:
        shown = rich.table.Table(
            title=table.title,
            caption=Text(table.note, style="table.caption") if table.note else None,
            title_justify="left",
            caption_justify="left",
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
            # Terminals of 80 columns have no space for padding.
            padding=(0, int(console.width >= 110)),
        )
        for index, column in enumerate(table.columns):
            if table.is_text(index):
                shown.add_column(Text(column), min_width=10, overflow="fold")
            else:
                shown.add_column(Text(column), justify="right", no_wrap=True)
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))
        console.print(shown)
    for note in notes:
        console.print(Text(f"Note: {note}"), style="yellow")


def write_figures(folder: Path, figures: Mapping[str, ImageArray]) -> None:
    """Write each figure to a PNG file with a portable name."""
    make_folder(folder)
    for name, figure in figures.items():
        save(figure, folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.png")


def write_page(
    path: Path, *, title: str, report: Report, images: Sequence[PairImage], notes: Sequence[str], config: Any
) -> None:
    """Write one self-contained HTML file."""
    main, *tables = map(_table_html, report.tables)
    parts = [f"<h1>{escape(title)}</h1>", main]
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f'<div class="notes"><b>Notes</b><ul>{items}</ul></div>')
    parts += [f"<figure>{_image(figure, _FIGURE_WIDTH, name)}</figure>" for name, figure in report.figures.items()]
    parts += tables
    heading = ""
    for item in images:
        if item.heading != heading:
            heading = item.heading
            parts.append(f"<h2>{escape(heading)}</h2>")
        image = _image(item.image, _IMAGE_WIDTH, item.caption)
        parts.append(f"<figure>{image}<figcaption>{escape(item.caption)}</figcaption></figure>")
    text = json.dumps(to_json(config), indent=1, ensure_ascii=False)
    parts.append(f"<details><summary>Config</summary><pre>{escape(text)}</pre></details>")
    style = (resources.files(__package__) / "report.css").read_text(encoding="utf-8")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    write_text(path, page)


def _table_html(table: Table) -> str:
    kinds = [" class=text" if table.is_text(index) else "" for index in range(len(table.columns))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head = f"<thead><tr>{cells('th', table.columns)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.note)}</caption>" if table.note else ""
    return f'<h2>{escape(table.title)}</h2><div class="wide"><table>{caption}{head}<tbody>{body}</tbody></table></div>'


def _image(pixels: ImageArray, width: int, alt: str) -> str:
    """Return an <img> with embedded data: PNG for diagrams, JPEG for photos."""
    image = Image.fromarray(pixels)
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    kind, options = ("png", {}) if width == _FIGURE_WIDTH else ("jpeg", {"quality": 80})
    file = io.BytesIO()
    image.save(file, kind, optimize=True, **options)
    data = base64.b64encode(file.getvalue()).decode()
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img src="data:image/{kind};base64,{data}" alt="{escape(alt)}" {size}>'
