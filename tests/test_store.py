"""Tests of the match store: stored pairs survive the death of the process."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from dualrc.collection.store import MatchStore
from dualrc.errors import DataError, OutputError
from dualrc.matches import Matches


def matches(seed: int, count: int = 5, **info) -> Matches:
    rng = np.random.default_rng(seed)
    return Matches(
        points0=rng.uniform(0, 1e4, (count, 2)),
        points1=rng.uniform(0, 1e4, (count, 2)),
        scores=rng.random(count),
        size0=(10_000, 10_001),
        size1=(640, 480),
        info=info,
    )


def same(a: Matches, b: Matches) -> bool:
    arrays = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("points0", "points1", "scores"))
    return arrays and (a.size0, a.size1, dict(a.info)) == (b.size0, b.size1, dict(b.info))


def test_round_trip_to_the_bit(tmp_path):
    with MatchStore(tmp_path / "m.sqlite", {"size": 640}) as store:
        store.put("a/1.jpg", "b/é ü.jpg", matches(1, seconds=0.5, seen0=[64, 48]))
        store.put("a", "b", matches(2, count=0))
    with MatchStore(tmp_path / "m.sqlite") as store:
        assert same(store.get("a/1.jpg", "b/é ü.jpg"), matches(1, seconds=0.5, seen0=[64, 48]))
        assert len(store.get("a", "b")) == 0
        assert store.get("b", "a") is None
        assert store.config == {"size": 640}
        assert len(store) == 2
        assert [names for names, _ in store] == [("a/1.jpg", "b/é ü.jpg"), ("a", "b")]


def test_put_again_replaces(tmp_path):
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", matches(1))
        store.put("a", "b", matches(2))
        assert len(store) == 1
        assert same(store.get("a", "b"), matches(2))


def test_only_what_is_missing_or_failed_is_to_be_done(tmp_path):
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", matches(1))
        store.put("a", "c", matches(2, count=0, error="c.jpg is broken"))
        assert store.missing([("a", "b"), ("a", "c"), ("b", "c"), ("b", "c")]) == [("a", "c"), ("b", "c")]
        assert store.failures() == {("a", "c"): "c.jpg is broken"}
        assert store.get("a", "c").info == {"error": "c.jpg is broken"}
        store.put("a", "c", matches(3))
        assert store.failures() == {}


def test_another_config_is_refused_with_what_differs(tmp_path):
    path = tmp_path / "m.sqlite"
    MatchStore(path, {"network": {"size": 640}, "weights": "abc"}).close()
    MatchStore(path, {"weights": "abc", "network": {"size": 640}}).close()
    with pytest.raises(DataError, match=r"network\.size is 640 there and 1024 now.*delete the file"):
        MatchStore(path, {"network": {"size": 1024}, "weights": "abc"})
    with pytest.raises(DataError, match="weights is 'abc' there and 'abd' now"):
        MatchStore(path, {"network": {"size": 640}, "weights": "abd"})


def test_files_that_are_not_stores(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        MatchStore(tmp_path / "nothing.sqlite")
    with pytest.raises(OutputError, match="does not exist"):
        MatchStore(tmp_path / "nowhere" / "m.sqlite", {})
    (tmp_path / "text.sqlite").write_text("hello " * 1000)
    with pytest.raises(DataError, match="not a match store"):
        MatchStore(tmp_path / "text.sqlite", {})
    with sqlite3.connect(tmp_path / "other.sqlite") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(DataError, match="not a match store"):
        MatchStore(tmp_path / "other.sqlite")
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(OutputError):
        MatchStore(tmp_path / "folder.sqlite", {})


COLMAP = "CREATE TABLE cameras (camera_id INTEGER PRIMARY KEY); CREATE TABLE images (name TEXT);"
FOREIGN = {
    "colmap": COLMAP,
    "colmap_wal": f"PRAGMA journal_mode = WAL; {COLMAP}",
    "meta": "CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('version', '3');",
    "other_meta": "CREATE TABLE meta (id INTEGER);",
    "newer": "CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('format', 'dualrc-matches-9');",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("config", [None, {"size": 640}])
def test_a_foreign_database_is_refused_and_not_touched(tmp_path, name, config):
    path = tmp_path / "database #1?.db"
    foreign = sqlite3.connect(path)
    foreign.executescript(FOREIGN[name])
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"not a match store.*pass another path"):
        MatchStore(path, config)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_foreign_database_in_use_is_refused_and_not_touched(tmp_path):
    path = tmp_path / "database.db"
    foreign = sqlite3.connect(path)
    # The tables are only in its -wal file.
    foreign.executescript(FOREIGN["colmap_wal"])
    before = {file.name: file.read_bytes() for file in (path, tmp_path / "database.db-wal")}
    with pytest.raises(DataError, match="not a match store"):
        MatchStore(path, {})
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    foreign.close()


def test_an_empty_file_becomes_a_store(tmp_path):
    (tmp_path / "m.sqlite").touch()
    with pytest.raises(DataError, match="not a match store"):
        MatchStore(tmp_path / "m.sqlite")
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        assert len(store) == 0


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path):
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", matches(1))
        store._connection.execute("PRAGMA max_page_count = 20")
        with pytest.raises(OutputError, match="full"):
            store.put_many([("a", "c", matches(2)), ("a", "d", matches(3, count=100_000))])
        store._connection.execute("PRAGMA max_page_count = 1000000")
        assert store.names() == [("a", "b")]
        store.put("a", "c", matches(2))
    with MatchStore(tmp_path / "m.sqlite") as store:
        assert same(store.get("a", "b"), matches(1))
        assert same(store.get("a", "c"), matches(2))


WRITER = """
import sys
import numpy as np
from dualrc.collection.store import MatchStore
from dualrc.matches import Matches

with MatchStore(sys.argv[1], {"size": 1}) as store:
    for number in range(int(sys.argv[2]), 100_000):
        points = np.full((500, 2), number)
        store.put("a", str(number), Matches(points0=points, points1=points, scores=np.full(500, number),
                                            size0=(1, 1), size1=(1, 1)))
        print(number, flush=True)
"""


def test_kill_9_loses_at_most_the_pair_in_work(tmp_path):
    path, start = tmp_path / "m.sqlite", 0
    for count in (3, 20, 41):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(start)], stdout=subprocess.PIPE, text=True
        )
        told = [int(process.stdout.readline()) for _ in range(count)]
        os.kill(process.pid, signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split("\n") if line.strip()]
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        with MatchStore(path, {"size": 1}) as store:
            numbers = sorted(int(name) for _, name in store.names())
            # All reported pairs are stored completely; one more may be.
            assert numbers[: told[-1] + 1] == list(range(told[-1] + 1))
            assert len(numbers) <= told[-1] + 2
            assert all(len(found) == 500 and (found.points1 == int(name)).all() for (_, name), found in store)
            start = len(numbers)
