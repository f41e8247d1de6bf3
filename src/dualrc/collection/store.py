"""A crash-safe store of matches between pictures, keyed by their names: one SQLite file in WAL mode.

A pair is there whole or not at all, whenever the process dies. One process at a time should write; any may read.
A file may come from anybody: one with views or triggers is refused, a value has at most 256 MiB, and a pair whose
arrays do not fit together is an error that names it.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.config import first_difference
from dualrc.errors import DataError, OutputError
from dualrc.files import parse_json
from dualrc.matches import Matches
from dualrc.types import FloatArray

Names = tuple[str, str]

_FORMAT = "dualrc-matches-1"
_BUSY_S = 60.0
_MOST_BYTES = 1 << 28  # of a value: a pair's points are a fraction of that
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS pairs (
    name0 TEXT NOT NULL, name1 TEXT NOT NULL,
    width0 INTEGER NOT NULL, height0 INTEGER NOT NULL, width1 INTEGER NOT NULL, height1 INTEGER NOT NULL,
    count INTEGER NOT NULL,
    points0 BLOB NOT NULL, points1 BLOB NOT NULL, scores BLOB NOT NULL, -- little-endian float32, row by row
    error TEXT, -- why there are no matches, where matching failed
    info TEXT NOT NULL, -- JSON
    UNIQUE (name0, name1)
)""",
    # A hash of each picture's file, as it was when its pairs were matched.
    "CREATE TABLE IF NOT EXISTS pictures (name TEXT PRIMARY KEY, content TEXT NOT NULL)",
)
_COLUMNS = "name0, name1, width0, height0, width1, height1, points0, points1, scores, error, info"
_INSERT = (
    "INSERT OR REPLACE INTO pairs "
    "(name0, name1, width0, height0, width1, height1, count, points0, points1, scores, error, info) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


class MatchStore:
    """Matches of many pairs, all made with one config; `with MatchStore(path, config) as store: ...`."""

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        """Open the store, or make it; without a config it must exist, and any config in it will do.

        The config holds everything that the matches depend on, the hash of the weights too, as plain JSON values.
        """
        self.path = Path(path)
        if config is None and not self.path.is_file():
            raise DataError(f"The store {self.path} does not exist; check the path, or match first.")
        if not self.path.parent.is_dir():
            raise OutputError(f"The folder {self.path.parent} does not exist; create it or write elsewhere.")
        with self._errors():
            self._refuse_foreign(may_be_empty=config is not None)
            # Autocommit: what is not inside an explicit transaction is durable when the call returns.
            self._connection = _distrust(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None))
        try:
            self._prepare(config)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "MatchStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file; everything put is in it already."""
        self._connection.close()

    @property
    def config(self) -> dict[str, Any]:
        """What the matches were made with."""
        try:
            config = parse_json(self._meta("config") or "{}")
            if not isinstance(config, dict):
                raise ValueError("it is no table of settings")
        except ValueError as error:
            raise DataError(f"{self.path}: its config is damaged ({error}); delete the file.") from error
        return config

    def put(self, name0: str, name1: str, matches: Matches) -> None:
        """Keep a pair's matches, in place of what was there; `info["error"]` marks a pair that failed."""
        self.put_many([(name0, name1, matches)])

    def put_many(self, pairs: Iterable[tuple[str, str, Matches]]) -> None:
        """Keep the matches of several pairs in one transaction: all or none of them survive a crash."""
        rows = [_to_row(*pair) for pair in pairs]
        with self._transaction():
            self._connection.executemany(_INSERT, rows)

    def forget_changed(self, contents: Mapping[str, str]) -> list[str]:
        """Drop the pairs of pictures whose content is no longer what it was, and note what it is now.

        `contents` are hashes of the pictures' files by name. Gives the names of those that have changed.
        """
        with self._transaction():
            known = dict(self._connection.execute("SELECT name, content FROM pictures"))
            changed = {name for name, content in contents.items() if known.get(name, content) != content}
            stale = [pair for pair in self.names() if changed & set(pair)] if changed else []
            self._connection.executemany("DELETE FROM pairs WHERE name0 = ? AND name1 = ?", stale)
            new = [item for item in contents.items() if known.get(item[0]) != item[1]]
            self._connection.executemany("INSERT OR REPLACE INTO pictures VALUES (?, ?)", new)
        return sorted(changed)

    @property
    def seconds(self) -> float:
        """How long matching took, in all runs together."""
        return float(self._meta("seconds") or 0.0)

    def add_seconds(self, seconds: float) -> None:
        """Count the time of a run, or of a part of it."""
        with self._transaction():
            text = repr(self.seconds + seconds)
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('seconds', ?)", (text,))

    def get(self, name0: str, name1: str) -> Matches | None:
        """A pair's matches; None if it is not there, no matches and `info["error"]` if it failed."""
        with self._errors():
            query = f"SELECT {_COLUMNS} FROM pairs WHERE name0 = ? AND name1 = ?"
            row = self._connection.execute(query, (name0, name1)).fetchone()
        return None if row is None else _from_row(row, self.path)

    def __iter__(self) -> Iterator[tuple[Names, Matches]]:
        """All pairs with their matches, in the order in which they came."""
        for names in self.names():
            matches = self.get(*names)
            if matches is not None:
                yield names, matches

    def __len__(self) -> int:
        with self._errors():
            return int(self._connection.execute("SELECT COUNT(*) FROM pairs").fetchone()[0])

    def names(self) -> list[Names]:
        """The pairs that are there, failed ones too."""
        with self._errors():
            return self._connection.execute("SELECT name0, name1 FROM pairs ORDER BY rowid").fetchall()

    def failures(self) -> dict[Names, str]:
        """Why pairs failed."""
        with self._errors():
            rows = self._connection.execute(
                "SELECT name0, name1, error FROM pairs WHERE error IS NOT NULL ORDER BY rowid"
            )
            return {(name0, name1): error for name0, name1, error in rows}

    def missing(self, pairs: Iterable[Names]) -> list[Names]:
        """Those of the pairs that are still to be matched, each once; failed ones are, as their cause may be mended."""
        done = set(self.names()) - self.failures().keys()
        return [pair for pair in dict.fromkeys(pairs) if pair not in done]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that the block changes, or nothing of it."""
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled back by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _prepare(self, config: Mapping[str, Any] | None) -> None:
        if config is None:
            return
        with self._errors():
            self._connection.execute("PRAGMA journal_mode = WAL")
            # In WAL mode this survives the death of the process; only a power cut can cost the latest pairs.
            self._connection.execute("PRAGMA synchronous = NORMAL")
            text = json.dumps(config, sort_keys=True, allow_nan=False)
            # In one transaction, because tables without the format would be those of a foreign file.
            self._connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                self._connection.execute(statement)
            self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (_FORMAT,))
            self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('config', ?)", (text,))
            self._connection.execute("COMMIT")
        if (difference := first_difference(self.config, json.loads(text))) is not None:
            raise DataError(
                f"{self.path} holds matches made with another config ({difference}); "
                "write to another place, delete the file to start over, or go back to its config."
            )

    def _refuse_foreign(self, *, may_be_empty: bool) -> None:
        """Raise DataError if the file is not a store, such as COLMAP's database, before anything is changed in it."""
        if not self.path.is_file():
            return
        # Immutable, because else SQLite makes files beside a database in WAL mode. Where they are, they must be read.
        wal = self.path.with_name(self.path.name + "-wal")
        how = "mode=ro" if wal.exists() else "mode=ro&immutable=1"
        connection = _distrust(sqlite3.connect(f"{self.path.resolve().as_uri()}?{how}", uri=True, timeout=_BUSY_S))
        try:
            kinds = {kind for (kind,) in connection.execute("SELECT DISTINCT type FROM sqlite_master")}
            if may_be_empty and not kinds:
                return
            if kinds & {"view", "trigger"}:  # these would run whatever their maker wrote
                raise DataError(f"{self.path} is not a store of matches; give another path.")
            found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        finally:
            connection.close()
        if found != (_FORMAT,):
            version = "" if found is None else f" that this version reads ({found[0]})"
            raise DataError(f"{self.path} is not a store of matches{version}; give another path.")

    def _meta(self, key: str) -> str | None:
        with self._errors():
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say in one line what SQLite can't do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "no such" in str(error):  # table or column
                raise DataError(f"{self.path} is not a store of matches; give another path.") from error
            remedy = "make room, or write elsewhere; what was stored is safe"
            raise OutputError(f"The store {self.path} can't be used ({error}); {remedy}.") from error
        except sqlite3.DatabaseError as error:
            what = "not a store of matches, or broken"
            raise DataError(f"{self.path} is {what} ({error}); give another path.") from error


def _distrust(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Settings for a file that somebody else may have made."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def _to_row(name0: str, name1: str, matches: Matches) -> tuple[Any, ...]:
    info = matches.stored_info()
    error = info.pop("error", None)
    arrays = (
        np.ascontiguousarray(a, dtype="<f4").tobytes() for a in (matches.points0, matches.points1, matches.scores)
    )
    return (name0, name1, *matches.size0, *matches.size1, len(matches), *arrays, error, json.dumps(info))


def _from_row(row: tuple[Any, ...], path: Path) -> Matches:
    name0, name1, width0, height0, width1, height1, points0, points1, scores, error, text = row

    def array(blob: bytes) -> FloatArray:
        return np.frombuffer(blob, dtype="<f4").copy()

    try:
        info = dict(parse_json(text)) | ({} if error is None else {"error": str(error)})
        return Matches(
            points0=array(points0).reshape(-1, 2),
            points1=array(points1).reshape(-1, 2),
            scores=array(scores),
            size0=(width0, height0),
            size1=(width1, height1),
            info=info,
        )
    except (ValueError, TypeError, OverflowError, DataError) as damage:
        raise DataError(f"{path}: the pair {name0}, {name1} is damaged ({damage}); delete the file.") from damage
