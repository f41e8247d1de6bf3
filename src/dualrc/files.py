"""Files: results appear whole or not at all, and what can't be read or written is said in one line."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualrc.errors import DataError, OutputError


def is_file(path: str | Path) -> bool:
    """Whether this is a file; false also where that can't be found out."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, remedy: str = "copy it again") -> str:
    """The content of a text file; a DataError says what is wrong with it."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; check the path.") from error
    except (OSError, ValueError) as error:  # bytes that are no text, and names that are none
        raise DataError(f"{path} can't be read as text ({error}); {remedy}.") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file, whole or not at all; what JSON does not know is written as `str` shows it."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=1, default=str) + "\n")


def make_folder(path: str | Path) -> Path:
    """Make a folder with those above it, unless it is there."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = "a file is in its place" if is_file(path) else str(error)
        raise OutputError(f"The folder {path} can't be made ({reason}); choose another one.") from error
    return path


def check_writable(path: str | Path) -> Path:
    """Raise OutputError now if `path` could not be written later, so that no work is done in vain."""
    path = Path(path)
    try:
        is_folder, has_parent = path.is_dir(), path.parent.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be entered
        raise OutputError(f"{path} can't be written ({error}); write elsewhere.") from error
    if is_folder:
        raise OutputError(f"{path} is a folder; give the name of a file to write.")
    if not has_parent:
        raise OutputError(f"The folder {path.parent} does not exist; create it or write elsewhere.")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"The folder {path.parent} is not writable; write elsewhere.")
    return path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; what the block wrote there takes its place when the block succeeds."""
    path = check_writable(path)
    # The suffix is kept because writers such as numpy and Pillow choose the format by it.
    temporary = path.with_name(f".{path.stem[:100]}-{secrets.token_hex(6)}{path.suffix}")
    try:
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}); write elsewhere.") from error
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} can't be written ({reason}); make room or write elsewhere.") from error
    finally:
        temporary.unlink(missing_ok=True)
