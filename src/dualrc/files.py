"""Files: results appear whole or not at all, what can't be read or written is said in one line, and limits are kept."""

import json
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dualrc.errors import DataError, OutputError

MOST_TEXT = 1 << 30  # bytes of a text file; more is none that we or others write


def is_file(path: str | Path) -> bool:
    """Whether this is a file; false also where that can't be found out."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, remedy: str = "copy it again") -> str:
    """The content of a text file of at most 1 GiB; a DataError says what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            content = b"" if (too_large := os.fstat(file.fileno()).st_size > MOST_TEXT) else file.read(MOST_TEXT)
        if too_large:
            raise DataError(f"{path} has more than {MOST_TEXT >> 20} MiB, which is no text file for this; {remedy}.")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; check the path.") from error
    except (OSError, ValueError) as error:  # bytes that are no text, and names that are none
        raise DataError(f"{path} can't be read as text ({error}); {remedy}.") from error


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError where it is none, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def inside(folder: str | Path, name: str) -> Path:
    """The file of a name that is relative to a folder; DataError for names that lead out of it.

    Links inside the folder are the user's own and are followed.
    """
    path = Path(name)
    if "\0" in name or path.is_absolute() or path.drive or ".." in path.parts:
        raise DataError(f"The name {name!r} leads out of {folder}; names must be relative to that folder.")
    return Path(folder) / name


def limit_zip(file: str | Path | IO[bytes], most: int, *, stored: bool = False) -> None:
    """Raise ValueError if a zip file's members have more than `most` bytes together, however small the file is.

    Readers stop at the sizes that the members are declared with, so that these are what counts. `stored` also refuses
    members that are compressed.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if (total := sum(member.file_size for member in members)) > most:
        raise ValueError(f"it would take {total / 2**30:.1f} GiB of memory, more than the {most / 2**30:.1f} allowed")
    if stored and any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed")


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
    """Give a temporary path beside `path`; what the block wrote there takes its place when the block succeeds.

    The file may be read and written by those who may by the umask, or by those who might do so with the file before.
    """
    path = check_writable(path)
    # The suffix is kept because writers such as numpy and Pillow choose the format by it.
    temporary = path.with_name(f".{path.stem[:100]}-{secrets.token_hex(6)}{path.suffix}")
    try:
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE((path if path.exists() else temporary).stat().st_mode)
    except OSError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}); write elsewhere.") from error
    try:
        yield temporary
        if stat.S_IMODE(temporary.stat().st_mode) != mode:
            temporary.chmod(mode)  # some libraries put a file of their own there, which only its owner may read
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path} can't be written ({reason}); make room or write elsewhere.") from error
    finally:
        temporary.unlink(missing_ok=True)
