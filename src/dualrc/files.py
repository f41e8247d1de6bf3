"""Files: results appear whole or not at all, what can't be read or written is said in one line, and limits are kept."""

import hashlib
import json
import logging
import os
import secrets
import socket
import stat
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dualrc.errors import DataError, OutputError

logger = logging.getLogger(__name__)
_READERS = 4  # threads that read files to hash them
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


def content_hash(path: str | Path) -> str:
    """A hash of all bytes of a file; empty where it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except (OSError, ValueError):
        return ""


def content_hashes(paths: Mapping[str, Path], done: Callable[[int], None] = lambda count: None) -> dict[str, str]:
    """The hashes of several files by name, read in several threads; `done` is told how many there are so far."""
    hashes = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for name, found in zip(paths, pool.map(content_hash, paths.values()), strict=True):
            hashes[name] = found
            done(len(hashes))
    return hashes


# Lock files that this process holds, by the thread that holds them: a run may be a part of another.
_held: dict[Path, int] = {}


@contextmanager
def only_run(lock: str | Path) -> Iterator[None]:
    """Hold a lock file while the block runs; OutputError if another run holds it.

    The file names the process that holds it. The system releases the lock of a process that ends in whatever way, so a
    file that a killed run left behind is taken over.
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
        # While it is still locked, so that it is nobody else's.
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _take(lock: Path) -> int:
    """Open and lock a file, and write into it who has it."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"{lock} can't be written ({error.strerror}); write elsewhere.") from error
        try:
            owner = _owner(descriptor)
            is_ours = _try_lock(descriptor)
            if is_ours is None:  # a file system without locks: the file says whose it is
                is_ours = owner is None or (owner["host"] == socket.gethostname() and not _is_alive(owner["pid"]))
            if not is_ours or lock in _held:
                raise OutputError(_in_use(lock, owner))
            if _is_current(descriptor, lock):
                if owner is not None:
                    logger.info("Going on after process %s on %s, which did not end its run.", *owner.values())
                mine = {"pid": os.getpid(), "host": socket.gethostname()}
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, json.dumps(mine).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder ended and deleted it just now


def _in_use(lock: Path, owner: dict[str, Any] | None) -> str:
    who = "" if owner is None else f" (process {owner['pid']} on {owner['host']})"
    remedy = f"wait for it, stop it, or write elsewhere; if there is no such process, delete {lock}"
    return f"Another run{who} is writing to {lock.parent}; {remedy}."


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed: whether nobody else has, or None where files can't be locked."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 2**20, os.SEEK_SET)  # beyond the content, which others read
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
    """Whether this is still the file of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _owner(descriptor: int) -> dict[str, Any] | None:
    """Who wrote a lock file: the process and its host."""
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
    except OSError:  # somebody else's
        return True
    return True
