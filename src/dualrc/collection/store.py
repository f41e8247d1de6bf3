"""Crash-safe store of matches, keyed by image names: one SQLite file in WAL mode.

A pair is stored completely or not at all, even if the process is killed. Only one process at a time should write; any
number may read. Files are not trusted: a file with views or triggers is rejected, a value has at most 256 MiB, and
inconsistent arrays raise an error that names the pair.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.errors import DataError, OutputError
from dualrc.files import parse_json
from dualrc.matches import Matches
from dualrc.toml import first_difference
from dualrc.types import FloatArray

Names = tuple[str, str]

_FORMAT = "dualrc-matches-1"
_BUSY_S = 60.0
# Maximum size of a value; the points of a pair take a small fraction of it.
_MOST_BYTES = 1 << 28
# Table of the hashes of image files at the time when their pairs were matched.
_HASHES = "pictures"
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
    f"CREATE TABLE IF NOT EXISTS {_HASHES} (name TEXT PRIMARY KEY, content TEXT NOT NULL)",
)
_COLUMNS = "name0, name1, width0, height0, width1, height1, points0, points1, scores, error, info"
_INSERT = f"INSERT OR REPLACE INTO pairs VALUES ({', '.join('?' * 12)})"


class MatchStore:
    """Matches of many pairs, all made with one config; `with MatchStore(path, config) as store: ...`."""

    def __init__(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        """Open or create the store; without a config it must exist, and its config is not checked.

        `config`: everything that the matches depend on, including the hash of the weights, as plain JSON values.
        """
        self.path = Path(path)
        if config is None and not self.path.is_file():
            raise DataError(f"The store {self.path} does not exist; check the path, or match first.")
        if not self.path.parent.is_dir():
            raise OutputError(f"The folder {self.path.parent} does not exist; create it, or write elsewhere.")
        with self._errors():
            self._refuse_foreign(may_be_empty=config is not None)
            # Autocommit: a statement outside of an explicit transaction is durable when the call returns.
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
        """Close the file; all pairs are already saved."""
        self._connection.close()

    @property
    def config(self) -> dict[str, Any]:
        """The config that the matches were made with."""
        try:
            config = parse_json(self._meta("config") or "{}")
            if not isinstance(config, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            raise DataError(f"{self.path}: the config is damaged ({error}); delete the file.") from error
        return config

    def put(self, name0: str, name1: str, matches: Matches) -> None:
        """Store the matches of a pair, replacing earlier ones; `info["error"]` marks a pair that failed."""
        self.put_many([(name0, name1, matches)])

    def put_many(self, pairs: Iterable[tuple[str, str, Matches]]) -> None:
        """Store the matches of several pairs in one transaction: all or none of them survive a crash."""
        rows = [_to_row(*pair) for pair in pairs]
        with self._transaction():
            self._connection.executemany(_INSERT, rows)

    def forget_changed(self, contents: Mapping[str, str]) -> list[str]:
        """Remove the pairs of images whose content has changed, record the new content, and return the names.

        `contents`: hashes of the image files by name.
        """
        with self._transaction():
            known = dict(self._connection.execute(f"SELECT name, content FROM {_HASHES}"))
            changed = {name for name, content in contents.items() if known.get(name, content) != content}
            stale = [pair for pair in self.names() if changed & set(pair)] if changed else []
            self._connection.executemany("DELETE FROM pairs WHERE name0 = ? AND name1 = ?", stale)
            new = [item for item in contents.items() if known.get(item[0]) != item[1]]
            self._connection.executemany(f"INSERT OR REPLACE INTO {_HASHES} VALUES (?, ?)", new)
        return sorted(changed)

    @property
    def seconds(self) -> float:
        """Matching time of all runs."""
        return float(self._meta("seconds") or 0.0)

    def add_seconds(self, seconds: float) -> None:
        """Add the time of a run, or of a part of it."""
        with self._transaction():
            text = repr(self.seconds + seconds)
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('seconds', ?)", (text,))

    def get(self, name0: str, name1: str) -> Matches | None:
        """Return the matches of a pair; None if it is not stored, no matches and `info["error"]` if it failed."""
        rows = self._rows(f"SELECT {_COLUMNS} FROM pairs WHERE name0 = ? AND name1 = ?", name0, name1)
        return _from_row(rows[0], self.path) if rows else None

    def __iter__(self) -> Iterator[tuple[Names, Matches]]:
        """Yield all pairs with their matches, in order of insertion."""
        for names in self.names():
            matches = self.get(*names)
            if matches is not None:
                yield names, matches

    def __len__(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM pairs")[0][0])

    def names(self) -> list[Names]:
        """Return all stored pairs, including failed ones."""
        return self._rows("SELECT name0, name1 FROM pairs ORDER BY rowid")

    def failures(self) -> dict[Names, str]:
        """Return the reasons of failed pairs."""
        rows = self._rows("SELECT name0, name1, error FROM pairs WHERE error IS NOT NULL ORDER BY rowid")
        return {(name0, name1): error for name0, name1, error in rows}

    def missing(self, pairs: Iterable[Names]) -> list[Names]:
        """Return the pairs that are not stored or failed, each once; failed pairs are retried."""
        done = self._matched()
        return [pair for pair in dict.fromkeys(pairs) if pair not in done]

    def usable(self, pairs: Iterable[Names]) -> list[Names]:
        """Return the stored pairs of two images that did not fail; of a pair in both orders, only the first one."""
        there, chosen = self._matched(), dict[frozenset[str], Names]()
        for names in pairs:
            if names in there and names[0] != names[1]:
                chosen.setdefault(frozenset(names), names)
        return list(chosen.values())

    def _matched(self) -> set[Names]:
        return set(self.names()) - self.failures().keys()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block in a transaction."""
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite may already have rolled back if the disk is full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _prepare(self, config: Mapping[str, Any] | None) -> None:
        if config is None:
            return
        with self._errors():
            self._connection.execute("PRAGMA journal_mode = WAL")
            # In WAL mode this survives the death of the process; a power failure can lose only the latest pairs.
            self._connection.execute("PRAGMA synchronous = NORMAL")
        text = json.dumps(config, sort_keys=True, allow_nan=False)
        # In one transaction: a file with tables but without the format entry would count as foreign.
        with self._transaction():
            for statement in _SCHEMA:
                self._connection.execute(statement)
            self._connection.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?), ('config', ?)", (_FORMAT, text))
        if (difference := first_difference(self.config, json.loads(text))) is not None:
            raise DataError(
                f"{self.path} has matches made with another config ({difference}); "
                "write to another folder, delete the file to start over, or use its config."
            )

    def _refuse_foreign(self, *, may_be_empty: bool) -> None:
        """Raise DataError if the file is not a store, for example a COLMAP database, before it is changed."""
        if not self.path.is_file():
            return
        # Immutable mode keeps SQLite from creating files beside the database. But an existing WAL file must be read.
        wal = self.path.with_name(self.path.name + "-wal")
        how = "mode=ro" if wal.exists() else "mode=ro&immutable=1"
        connection = _distrust(sqlite3.connect(f"{self.path.resolve().as_uri()}?{how}", uri=True, timeout=_BUSY_S))
        try:
            kinds = {kind for (kind,) in connection.execute("SELECT DISTINCT type FROM sqlite_master")}
            if may_be_empty and not kinds:
                return
            # Views and triggers could run arbitrary SQL.
            if kinds & {"view", "trigger"}:
                raise DataError(f"{self.path} is not a match store; pass another path.")
            found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        finally:
            connection.close()
        if found != (_FORMAT,):
            version = "" if found is None else f" that this version can read ({found[0]})"
            raise DataError(f"{self.path} is not a match store{version}; pass another path.")

    def _meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def _rows(self, query: str, *values: str) -> list[Any]:
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of SQLite to errors of this package."""
        try:
            yield
        except sqlite3.OperationalError as error:
            # SQLite reports a missing table or column.
            if "no such" in str(error):
                raise DataError(f"{self.path} is not a match store; pass another path.") from error
            remedy = "free disk space, or write elsewhere; stored pairs are safe"
            raise OutputError(f"The store {self.path} cannot be used ({error}); {remedy}.") from error
        except sqlite3.DatabaseError as error:
            what = "not a match store, or damaged"
            raise DataError(f"{self.path} is {what} ({error}); pass another path.") from error


def _distrust(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Apply settings for a file from an untrusted source."""
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
