"""Results appear whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualrc.errors import OutputError


def is_file(path: str | Path) -> bool:
    """Whether this is a file; false also where that can't be found out."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


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
