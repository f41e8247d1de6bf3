"""File access: atomic writing, size limits, and one-line errors for files that cannot be read or written."""

import csv
import hashlib
import json
import logging
import math
import os
import pickle
import secrets
import socket
import stat
import struct
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

from dualrc.errors import DataError, OutputError

logger = logging.getLogger(__name__)
# Number of threads that hash files.
_READERS = 4
# Largest text file in bytes.
MOST_TEXT = 1 << 30
# Exceptions that reading a damaged file can raise.
BROKEN = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    ArithmeticError,
    # Wrong lengths can request any amount of memory.
    MemoryError,
    # The file is encrypted, or uses an unknown compression.
    RuntimeError,
    csv.Error,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or its type if there is none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or its type if there is none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def is_file(path: str | Path) -> bool:
    """Return whether this is a file; False also if that cannot be determined."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path, remedy: str = "copy it again") -> str:
    """Read a text file of at most 1 GiB; a DataError explains what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            content = b"" if (too_large := os.fstat(file.fileno()).st_size > MOST_TEXT) else file.read(MOST_TEXT)
        if too_large:
            raise DataError(f"{path} is larger than {MOST_TEXT >> 20} MiB, too large for a text file; {remedy}.")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; check the path.") from error
    except (OSError, ValueError) as error:
        # ValueError covers bytes that are not text, and invalid names.
        raise DataError(f"Cannot read {path} as text ({error}); {remedy}.") from error


def read_lines(path: str | Path, remedy: str = "copy it again", *, empty: bool = False) -> list[tuple[int, str]]:
    """Read the stripped lines of a text file with their numbers, without comments; `empty` keeps empty lines."""
    numbered = enumerate((line.strip() for line in read_text(path, remedy).splitlines()), start=1)
    return [(number, line) for number, line in numbered if (line or empty) and not line.startswith("#")]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def inside(folder: str | Path, name: str) -> Path:
    """Return the path of a name relative to a folder; raise DataError for names that lead outside.

    Symbolic links inside the folder are trusted and followed.
    """
    path = Path(name)
    if "\0" in name or path.is_absolute() or path.drive or ".." in path.parts:
        raise DataError(f"The name {name!r} leads outside {folder}; give names relative to that folder.")
    return Path(folder) / name


def limit_zip(file: str | Path | IO[bytes], most: int, *, stored: bool = False) -> None:
    """Raise ValueError if the members of a zip file have more than `most` bytes in total when unpacked.

    Readers stop at the declared sizes of the members, so these are checked. `stored` also rejects compressed members.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if (total := sum(member.file_size for member in members)) > most:
        raise ValueError(f"it needs {total / 2**30:.1f} GiB of memory, more than the {most / 2**30:.1f} allowed")
    if stored and any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def to_json(value: Any) -> Any:
    """Convert dataclasses, tuples, arrays and paths to JSON values; infinities and NaN become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {" ".join(key) if isinstance(key, tuple) else str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # NumPy arrays and scalars.
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return str(value) if isinstance(value, Path) else value


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file atomically; values that JSON cannot represent are converted by `str`."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=1, default=str) + "\n")


def make_folder(path: str | Path) -> Path:
    """Create a folder and its parents, unless it exists."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = "a file is in its place" if is_file(path) else str(error)
        raise OutputError(f"Cannot create the folder {path} ({reason}); choose another one.") from error
    return path


def check_writable(path: str | Path) -> Path:
    """Raise OutputError now if `path` could not be written later, before any work is done."""
    path = Path(path)
    try:
        is_folder, has_parent = path.is_dir(), path.parent.is_dir()
    except (OSError, ValueError) as error:
        # The name is too long, or the folder is not accessible.
        raise OutputError(f"Cannot write {path} ({error}); write elsewhere.") from error
    if is_folder:
        raise OutputError(f"{path} is a folder; give the name of a file to write.")
    if not has_parent:
        raise OutputError(f"The folder {path.parent} does not exist; create it or write elsewhere.")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"The folder {path.parent} is not writable; write elsewhere.")
    return path


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise an OutputError that names `path` if the block fails to write it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"Cannot write {path} ({reason}); free some space or write elsewhere.") from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` if the block succeeds.

    The file keeps the permissions of the previous file, or gets those of the umask.
    """
    path = check_writable(path)
    # Keep the suffix, because writers such as numpy and Pillow derive the format from it.
    temporary = path.with_name(f".{path.stem[:100]}-{secrets.token_hex(6)}{path.suffix}")
    try:
        temporary.touch(exist_ok=False)
        mode = stat.S_IMODE((path if path.exists() else temporary).stat().st_mode)
    except OSError as error:
        raise OutputError(f"Cannot write {path} ({error.strerror}); write elsewhere.") from error
    try:
        with writing(path):
            yield temporary
            if stat.S_IMODE(temporary.stat().st_mode) != mode:
                # Some libraries replace the file by one that only its owner can read.
                temporary.chmod(mode)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder next to `path`, which replaces `path` if the block succeeds."""
    with writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        yield new
        if path.exists():
            path.rename(Path(temporary, "old"))
        new.rename(path)


def content_hash(path: str | Path) -> str:
    """Return a hash of the content of a file; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except (OSError, ValueError):
        return ""


def content_hashes(paths: Mapping[str, Path], done: Callable[[int], None] = lambda count: None) -> dict[str, str]:
    """Hash files by name in several threads; `done` receives the number of finished files."""
    hashes = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for name, found in zip(paths, pool.map(content_hash, paths.values()), strict=True):
            hashes[name] = found
            done(len(hashes))
    return hashes


# Lock files held by this process, with the thread that holds them, because runs may be nested.
_held: dict[Path, int] = {}


@contextmanager
def only_run(lock: str | Path) -> Iterator[None]:
    """Hold a lock file while the block runs; raise OutputError if another run holds it.

    The file names the process that holds it. The system releases the lock however the process ends, so a file that a
    killed run left behind is taken over.
    """
    lock = Path(lock).resolve()
    if _held.get(lock) == threading.get_ident():
        yield
        return
    descriptor = _take(lock)
    _held[lock] = threading.get_ident()
    try:
        yield
    finally:
        del _held[lock]
        # Delete the file while it is still locked, so that it cannot belong to another process.
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _take(lock: Path) -> int:
    """Open and lock a file, and write the owner into it."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"Cannot write {lock} ({error.strerror}); write elsewhere.") from error
        try:
            owner = _owner(descriptor)
            is_ours = _try_lock(descriptor)
            # On a file system without locks, the content of the file identifies the owner.
            if is_ours is None:
                is_ours = owner is None or (owner["host"] == socket.gethostname() and not _is_alive(owner["pid"]))
            if not is_ours or lock in _held:
                raise OutputError(_in_use(lock, owner))
            if _is_current(descriptor, lock):
                if owner is not None:
                    logger.info("Continuing after process %s on %s, which did not finish its run.", *owner.values())
                mine = {"pid": os.getpid(), "host": socket.gethostname()}
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, json.dumps(mine).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Its owner finished and deleted the file in the meantime.
        os.close(descriptor)


def _in_use(lock: Path, owner: dict[str, Any] | None) -> str:
    who = "" if owner is None else f" (process {owner['pid']} on {owner['host']})"
    remedy = f"wait for it, stop it, or write elsewhere; if there is no such process, delete {lock}"
    return f"Another run{who} is writing to {lock.parent}; {remedy}."


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed; return whether this succeeded, or None if locks are not supported."""
    try:
        if sys.platform == "win32":
            import msvcrt

            # Lock a byte beyond the content, which other processes read.
            os.lseek(descriptor, 2**20, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file with this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _owner(descriptor: int) -> dict[str, Any] | None:
    """Return the process and host that wrote a lock file."""
    try:
        content = json.loads(os.read(descriptor, 4096))
        return {"pid": int(content["pid"]), "host": str(content["host"])}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # The process belongs to another user.
        return True
    return True
