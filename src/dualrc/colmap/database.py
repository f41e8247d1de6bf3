"""Safe writing of COLMAP's SQLite databases."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualrc.errors import OutputError
from dualrc.files import one_line

# Suffixes of files that SQLite keeps beside a database.
_LEFTOVERS = ("-wal", "-shm", "-journal")


@contextmanager
def writing_database(path: str | Path, temporary: Path) -> Iterator[None]:
    """Raise OutputError if COLMAP cannot write the database `temporary`, which replaces `path` later.

    Do not use a transaction of pycolmap in this block: it aborts the process if it cannot be committed, as on a full
    disk.
    """
    try:
        yield
        # Closing a database deletes its log, unless the disk is too full to include it in the database.
        if any(file.exists() for file in _leftovers(temporary)):
            raise RuntimeError("it is not complete")
    except RuntimeError as error:
        raise OutputError(f"Cannot write {path} ({one_line(error)}); free disk space, or write elsewhere.") from error
    finally:
        remove_leftovers(temporary)


def remove_leftovers(path: str | Path) -> None:
    """Remove the files that SQLite left beside a database that is replaced or deleted."""
    for file in _leftovers(path):
        file.unlink(missing_ok=True)


def _leftovers(path: str | Path) -> list[Path]:
    return [Path(f"{path}{suffix}") for suffix in _LEFTOVERS]
