"""MkDocs hook: adds the reference pages that are made from the code, and the pages of optional parts."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import api
import commands

import configs

_MODEL_CARD = Path(__file__).parents[2] / "src" / "dualrc" / "weights" / "README.md"
# Units that stay on the line of their number.
_UNITS = "%|s|ms|px|m|mm|MB|GB|MiB|GiB|GHz"
# Number of characters of a name or an option that fit into a line, also on a phone.
_SHORT = 18
# Pages of parts that a checkout may lack; they are left out of the navigation where they are missing.
OPTIONAL = ("service.md", "onnx.md", "integrations.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    missing = {name for name in OPTIONAL if not (Path(config.docs_dir) / name).exists()}
    nav = _without(config.nav, missing)
    for section in nav:
        if "Reference" in section:
            section["Reference"][1:1] = [{"Python API": [{page.title: page.path} for page in api.pages()]}]
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {page.path: page.text for page in api.pages()}
    pages["reference/index.md"] = api.index()
    pages["reference/cli.md"] = commands.render()
    pages["reference/configs.md"] = configs.render()
    pages["reference/model-card.md"] = _MODEL_CARD.read_text(encoding="utf-8")
    for path, text in pages.items():
        files.append(File.generated(config, path, content=_link_pages(text, Path(config.docs_dir))))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Remove links to missing pages, keep units with numbers, and write pipes in tables as Python-Markdown does."""
    for name in OPTIONAL:
        if not (Path(config.docs_dir) / name).exists():
            markdown = re.sub(rf"\[([^\]]*)\]\((?:\.\./)*{re.escape(name)}[^)]*\)", r"\1", markdown)

    # Blocks of code, code in a line, and headings, whose addresses depend on their text, stay as they are.
    parts = re.split(r"(^ *```[\s\S]*?^ *```$|`[^`]*`|^#.*$)", markdown, flags=re.MULTILINE)
    space = re.compile(rf"(?<=\d)(?: |\n *)(?=(?:{_UNITS})(?!\w))")
    parts[::2] = [space.sub("\N{NO-BREAK SPACE}", text) for text in parts[::2]]
    markdown = "".join(parts)
    # GitHub needs a backslash before a pipe inside code in a table; Python-Markdown shows it.
    return re.sub(
        r"^\|.*$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        markdown,
        flags=re.MULTILINE,
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Keep short code in one line, and link documents that docstrings name."""
    html = re.sub(rf"<code>(?=(?:-[^<>]{{1,{_SHORT}}}|[^<>\s]{{1,{_SHORT}}})</code>)", '<code class="short">', html)
    if not page.file.src_uri.startswith("reference/"):
        return html
    return _link_pages(html, Path(config.docs_dir), lambda title, name: f'<a href="../{name}.html">{title}</a>')


def _markdown_link(title: str, name: str) -> str:
    return f"[{title}](../{name}.md)"


def _link_pages(text: str, docs: Path, link: Callable[[str, str], str] = _markdown_link) -> str:
    """Turn names of documents, such as docs/scores.md, into links with their titles, for pages in reference/."""

    def linked(found: re.Match[str]) -> str:
        page = docs / f"{found[1]}.md"
        if not page.exists():
            return found[0]
        return link(page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), found[1])

    return re.sub(r"`?\bdocs/([\w/-]+)\.md`?", linked, text)


def _without(nav: Any, missing: set[str]) -> Any:
    """The navigation without some pages."""
    if isinstance(nav, list):
        kept = (_without(item, missing) for item in nav)
        return [item for item in kept if item is not None]
    if isinstance(nav, dict):
        parts = {title: _without(item, missing) for title, item in nav.items()}
        return {title: item for title, item in parts.items() if item is not None} or None
    return None if nav in missing else nav
