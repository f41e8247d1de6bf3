"""Tests of long runs in real processes: threads, progress, JSON, signals, locks and changed images."""

import json
import logging
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, texture, tiny_matcher
from docs_data import documented_keys
from PIL import Image
from typer.testing import CliRunner

import dualrc
from dualrc import cli, files, machine
from dualrc.collection import allocation, local, progress
from dualrc.collection.config import CollectionConfig
from dualrc.collection.matching import LOCK, match_collection
from dualrc.collection.ray_cluster import _threads
from dualrc.collection.store import MatchStore
from dualrc.errors import ConfigError, OutputError
from dualrc.evaluation.export import Pair, export
from dualrc.files import only_run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
PATIENCE_S = 120


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "my images"
    folder.mkdir()
    for number in range(4):
        Image.fromarray(texture(number, 96, 64)).save(folder / f"{number}.png", compress_level=0)
    return folder


def change(path: Path) -> None:
    """Replace the image in a file; name, size and time of the file stay the same."""
    before = path.stat()
    Image.fromarray(texture(99, 96, 64)).save(path, compress_level=0)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def arguments(images: Path, out: Path, weights: Path) -> list[str]:
    options = ["--weights", str(weights), "--size", "96", "--top", "50", "--device", "cpu", "--workers", "1"]
    return ["collection", str(images), "--out", str(out), *options]


def run(*given: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dualrc", *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE_S, check=False)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Threads


def test_a_matcher_keeps_to_its_threads(monkeypatch):
    seen = []
    matcher = tiny_matcher()
    matcher.threads = 2
    extract, match = matcher.network.extract, matcher.network.match
    monkeypatch.setattr(matcher.network, "extract", lambda x: seen.append(torch.get_num_threads()) or extract(x))
    monkeypatch.setattr(
        matcher.network, "match", lambda *x, **y: seen.append(torch.get_num_threads()) or match(*x, **y)
    )
    matcher.match(texture(0, 96, 64), texture(1, 96, 64))
    # The previous setting is restored.
    assert set(seen) == {2} and torch.get_num_threads() == 1


def test_threads_are_checked(weights):
    assert dualrc.load(weights=weights, device="cpu", threads=1).threads == 1
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
            dualrc.load(weights=weights, device="cpu", threads=wrong)
    with pytest.raises(ConfigError, match="threads"):
        CollectionConfig(threads=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1] * 8),
        ({"workers": 3}, [2] * 3),
        ({"workers": 1}, [8]),
        ({"threads": 4}, [1] * 4),
        ({"threads": 5, "workers": 2}, [2] * 2),
        ({"workers": 20}, [1] * 20),
    ],
)
def test_workers_share_the_cores(images, weights, monkeypatch, options, expected):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(allocation, "LocalExecutor", lambda settings: settings)
    matcher = dualrc.load(weights=weights, device="cpu", size=96)
    config = CollectionConfig(weights=weights, device="cpu", max_memory=100.0, **options)
    assert [each.threads for each in allocation.start_executor(images, [], config, matcher)] == expected


@pytest.mark.parametrize(
    ("cores", "workers", "expected"), [([16], 4, 4), ([16, 2], 2, 8), ([16, 2], 3, 5), ([2, 2], 4, 1), ([2], 3, 1)]
)
def test_workers_of_a_cluster_fit_onto_its_machines(cores, workers, expected):
    assert _threads(cores, workers) == expected


def test_the_command_line_lets_waiting_threads_block():
    """The OpenMP runtime reads the setting once, so it is set before torch is imported; a user's setting is kept."""
    code = "import os, sys, {}; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    plain = {key: value for key, value in ENVIRONMENT.items() if key not in machine.PASSIVE_THREADS}

    def told(module: str, **environment: str) -> list[str]:
        command = [sys.executable, "-c", code.format(module)]
        done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    # Importing the library changes nothing.
    assert told("dualrc") == ["None", "False"]
    assert told("dualrc.cli")[0] == "PASSIVE"
    assert told("dualrc.machine; dualrc.machine.block_idle_threads()", OMP_WAIT_POLICY="ACTIVE")[0] == "ACTIVE"


# Progress and output


def test_lines_where_there_is_no_terminal(caplog, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.05)
    caplog.set_level(logging.INFO, "dualrc")
    with progress.show_progress() as tell:
        tell("Matching", 2, 6)
        # Without progress, lines still show that the step runs.
        wait_for(lambda: len(caplog.messages) >= 2)
        tell("Matching", 4, 6)
        wait_for(lambda: any("4/6" in line for line in caplog.messages))
        tell("Matching", 6, 6)
        tell("Writing", 1, 1)
    assert caplog.messages[0] == "Matching: 2/6"
    assert any(re.fullmatch(r"Matching: 4/6, [\d.]+/s, [\d:]+ left", line) for line in caplog.messages)
    assert re.fullmatch(r"Matching: 6/6, [\d.]+/s, took [\d:]+", caplog.messages[-2])
    assert caplog.messages[-1] == "Writing: 1/1"
    caplog.clear()
    with progress.show_progress(quiet=True) as tell:
        tell("Matching", 1, 2)
    with progress.show_status("Loading..."):
        # A short step.
        pass
    assert not caplog.messages


@pytest.mark.parametrize(
    ("speed", "text"), [(0.7944, "0.794/s"), (999.4, "999/s"), (999.6, "1,000/s"), (2180, "2,180/s")]
)
def test_rates_have_no_exponent(speed, text):
    assert progress._rate(speed) == text


def test_the_library_prints_nothing(images, weights, tmp_path, capfd):
    (images / "broken.png").write_text("no image")
    config = CollectionConfig(weights=weights, size=96, top=50, device="cpu", workers=1)
    result = match_collection(images, tmp_path / "out", config)
    assert list(result.broken) == ["broken.png"]
    assert capfd.readouterr() == ("", "")


def test_one_pair_is_not_called_pairs(images, weights, tmp_path):
    first, second = sorted(path.name for path in images.iterdir())[:2]
    (tmp_path / "pairs.txt").write_text(f"{first} {second}\n")
    command = [*arguments(images, tmp_path / "out", weights), "--pairs", str(tmp_path / "pairs.txt")]
    assert "1 pair matched in" in run(*command).stdout


def test_collection_tells_quietly_or_as_json(images, weights, tmp_path):
    (images / "broken.png").write_text("no image")
    command = arguments(images, tmp_path / "out", weights)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "6 pairs matched" in done.stdout and "Matching: 0/10" in done.stderr and "Matching: 10/10" in done.stderr
    assert "Left out: " in done.stderr and "\x1b" not in done.stdout + done.stderr
    again = run(*command, "--quiet", "--json")
    assert "Left out" in again.stderr and "Matching" not in again.stderr
    result = json.loads(again.stdout)
    assert set(result) == documented_keys("collection")
    assert result["images"] == 5 and result["pairs"] == 10 and result["skipped"] == 6 and result["matched"] == 0
    assert list(result["left_out"]) == ["broken.png"] and result["failed"] == {}
    assert 0 < result["seconds"] < result["seconds_all_runs"]
    assert Path(result["store"]).is_file()


def test_match_as_json(images, weights, tmp_path):
    pair = (images / "0.png", images / "1.png")
    # The CPU, because a GPU says that its kernels are being prepared.
    options = ("--weights", weights, "--json", "-o", tmp_path / "m.npz", "--threads", 1, "--device", "cpu")
    done = run("match", *pair, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == documented_keys("match")
    assert result["matches"] == len(dualrc.Matches.load(tmp_path / "m.npz")) and result["size0"] == [96, 64]
    assert result["estimate"] is None and result["files"] == [str(tmp_path / "m.npz")]
    # Untrained weights find no consistent matches; both outputs have the warning.
    assert "do not agree" in result["warning"] and done.stderr.strip() == f"Note: {result['warning']}"
    wrong = CliRunner().invoke(cli.app, ["match", *map(str, pair), "--threads", "0"])
    assert wrong.exit_code == 2 and "--threads" in wrong.output
    quiet = CliRunner().invoke(cli.app, ["match", *map(str, pair), "--weights", str(weights), "--quiet"])
    # Only warnings are printed.
    assert (quiet.exit_code, quiet.output) == (0, f"Note: {result['warning']}\n")


def test_a_bar_on_a_terminal(images, weights, tmp_path):
    (images / "broken.png").write_text("no image")
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "dualrc", *arguments(images, tmp_path / "out", weights)]
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 2**16):
            shown += part
    # The other end is closed.
    except OSError:
        pass
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    text = shown.decode()
    assert "━" in text and "10/10" in text and "Matching: 0/10" not in text
    # The message has its own line, above the bar.
    line = next(line for line in re.split(r"[\r\n]+", text) if "Left out" in line)
    assert "━" not in line


def test_native_output_goes_to_a_file(tmp_path):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from dualrc.cli import common, running\n"
        "with running._native_output_to(Path(sys.argv[1]) / 'native.log'):\n"
        "    os.write(2, b'I2026 native.cc] something\\n')\n"
        "    common.note('told to the user')\n"
        "common.note('told later')\n"
        "with running._native_output_to(Path(sys.argv[1]) / 'empty.log'): pass\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stderr == "told to the user\ntold later\n"
    assert (tmp_path / "native.log").read_text() == "I2026 native.cc] something\n"
    assert not (tmp_path / "empty.log").exists()


# Ctrl-C and SIGTERM


@contextmanager
def slow_run(images: Path, out: Path, weights: Path):
    """Run a slow collection, to be stopped after its first pairs and before its last."""
    code = (
        "import sys, time\n"
        "from dualrc import cli\n"
        "from dualrc.collection.local import LocalExecutor\n"
        "next_event = LocalExecutor.next\n"
        "def slow(executor):\n"
        "    time.sleep(0.5)\n"
        "    return next_event(executor)\n"
        "LocalExecutor.next = slow\n"
        "sys.argv[0] = 'dualrc'\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", code, *arguments(images, out, weights)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while stored(out) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def stored(out: Path) -> int:
    try:
        with MatchStore(out / "matches.sqlite") as store:
            return len(store)
    except dualrc.DualRCError:
        return 0


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 30
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_what_is_kept_and_how_to_go_on(images, weights, tmp_path, number, status):
    out = tmp_path / "out"
    with slow_run(images, out, weights) as process:
        workers = children(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == status, errors
        wait_until_gone(*workers)
    count = stored(out)
    assert 2 <= count < 6 and len(workers) == 1
    assert f"Stopped. {count} matched pairs are in {out / 'matches.sqlite'}. Continue with:" in errors
    assert "Traceback" not in errors and "stack trace" not in errors and not (out / LOCK).exists()
    typed = shlex.split(errors.strip().splitlines()[-1])
    assert typed[0] == "dualrc" and typed[1:] == arguments(images, out, weights)
    done = CliRunner().invoke(cli.app, typed[1:])
    assert done.exit_code == 0 and f"6, {count} of them matched before" in done.output and "all runs" in done.output
    with MatchStore(out / "matches.sqlite") as store:
        # The time of the stopped run counts.
        assert store.seconds > 0.5


def test_ctrl_c_while_pytorch_is_imported_is_no_crash():
    code = """
import sys
class Stops:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stops())
import dualrc.cli
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_a_worker_starts_is_not_shown():
    """Ctrl-C reaches workers too, which import PyTorch for seconds."""
    code = f"""
import os, signal, sys
class Stops:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stops())
{local._START}
"""
    # The worker ends because its standard input ends.
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_sigterm_after_pycolmap_is_no_crash():
    """pycolmap's own handler prints a native stack trace."""
    pytest.importorskip("pycolmap")
    code = "import os, signal; from dualrc.colmap import import_pycolmap; import_pycolmap(); {}"
    end = "os.kill(os.getpid(), signal.SIGTERM)"
    command = [sys.executable, "-c", code.format(end)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_native_code_that_does_not_come_back_is_ended():
    """A signal that Python cannot handle, because a library blocks the main thread, still ends the run."""
    code = (
        "import ctypes, sys, threading, os, signal\n"
        "from dualrc.cli import running\n"
        "running._GRACE_S = 0.2\n"
        "sys.argv = ['dualrc', 'x y']\n"
        "with running._stopping(lambda options: 'All is kept.', {}, waits=True):\n"
        "    library = ctypes.CDLL(None)\n"
        "    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"
        "    for _ in range(100): library.usleep(900000)\n"
    )
    # Each call returns at the signal, when Python would handle it; the test prevents that.
    code = code.replace("    for _", "    signal.signal(signal.SIGTERM, lambda *_: None)\n    for _")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 143
    assert done.stderr == "Stopped. All is kept. Continue with:\ndualrc 'x y'\n"


# No processes or files are left over


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kill_9_leaves_no_worker_and_no_lock(images, weights, tmp_path):
    out = tmp_path / "out"
    with slow_run(images, out, weights) as process:
        workers = children(process.pid)
        process.kill()
        process.wait()
        wait_until_gone(*workers)
    # The next run takes the lock over.
    assert len(workers) == 1 and (out / LOCK).exists()
    config = CollectionConfig(weights=weights, size=96, top=50, device="cpu", workers=1)
    result = match_collection(images, out, config, quiet=True)
    assert result.skipped >= 2 and result.matched + result.skipped == 6 and not (out / LOCK).exists()


MEASURING = """
import sys; sys.path.insert(0, sys.argv[1])
import test_running
from dualrc.measure import in_new_process
in_new_process(test_running.say_and_wait, sys.argv[2])
"""
POOL = """
import sys; sys.path.insert(0, sys.argv[1])
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import test_running
from dualrc.machine import end_with_parent
with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
    list(pool.map(test_running.say_and_wait, [sys.argv[2]]))
"""


def say_and_wait(file: str) -> None:
    """Write the id of this process to a file, and wait."""
    Path(file).with_suffix(".new").write_text(str(os.getpid()))
    Path(file).with_suffix(".new").rename(file)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("code", [MEASURING, POOL], ids=["measuring", "pool"])
def test_processes_end_with_a_killed_parent(tmp_path, code):
    file = tmp_path / "pid"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(file)]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started = {int(file.read_text()), *children(process.pid)}
    process.kill()
    process.wait()
    wait_until_gone(*started)


# One run at a time

HOLDING = """
import sys, time
from dualrc.files import only_run
with only_run(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holding(lock: Path):
    """Run another process that holds a lock."""
    command = [sys.executable, "-c", HOLDING, str(lock)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_run_on_a_folder_is_refused(images, weights, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    config = CollectionConfig(weights=weights, size=96, top=50, device="cpu", workers=1)
    with holding(out / LOCK) as other:
        message = rf"Another run \(process {other.pid} on .*\) is writing to {re.escape(str(out))}; wait for it"
        with pytest.raises(OutputError, match=message):
            match_collection(images, out, config, quiet=True)
        done = run(*arguments(images, out, weights))
        assert done.returncode == 1 and f"Another run (process {other.pid}" in done.stderr
        assert not (out / "matches.sqlite").exists()
    # The process was killed.
    assert (out / LOCK).exists()
    assert match_collection(images, out, config, quiet=True).matched == 6
    assert not (out / LOCK).exists()


def test_a_run_may_be_part_of_another_but_not_of_another_thread(tmp_path):
    lock, refused = tmp_path / "lock", []

    def try_it() -> None:
        try:
            with only_run(lock):
                pass
        except OutputError as error:
            refused.append(str(error))

    with only_run(lock):
        with only_run(lock):
            assert lock.exists()
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    assert len(refused) == 1 and not lock.exists()


def test_where_files_can_not_be_locked_the_file_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_try_lock", lambda descriptor: None)
    lock, host = tmp_path / "lock", files.socket.gethostname()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    # No owner, a damaged file, and a dead process.
    for text in ("", "{", json.dumps({"pid": ended.pid, "host": host})):
        lock.write_text(text)
        with only_run(lock):
            assert json.loads(lock.read_text())["pid"] == os.getpid()
    for owner in ({"pid": os.getppid(), "host": host}, {"pid": 1, "host": "elsewhere"}):
        lock.write_text(json.dumps(owner))
        with pytest.raises(OutputError, match="if there is no such process, delete"), only_run(lock):
            pass


# Changed images


def content(store: Path) -> dict:
    with MatchStore(store) as opened:
        return {names: matches.points1.tobytes() for names, matches in opened}


@pytest.mark.parametrize("pairs", ["exhaustive", "retrieval"])
def test_an_image_with_another_content_is_matched_again(images, weights, tmp_path, pairs, caplog):
    config = CollectionConfig(
        weights=weights, size=96, top=50, device="cpu", workers=1, pairs=pairs, neighbors=3, threads=1
    )
    first = content(match_collection(images, tmp_path / "out", config, quiet=True).store)
    again = match_collection(images, tmp_path / "out", config, quiet=True)
    assert (again.matched, again.skipped, again.extracted) == (0, 6, 0)
    change(images / "2.png")
    changed = match_collection(images, tmp_path / "out", config, quiet=True)
    assert (changed.matched, changed.skipped) == (3, 3)
    assert "Matching again because images changed (1): 2.png." in caplog.messages
    found, fresh = content(changed.store), content(match_collection(images, tmp_path / "new", config, quiet=True).store)
    assert found == fresh
    assert {pair for pair in first if first[pair] != found[pair]} == {pair for pair in first if "2.png" in pair}
    if pairs == "retrieval":
        arrays = [np.load(tmp_path / folder / "descriptors.npz") for folder in ("out", "new")]
        order = [np.argsort(each["names"]) for each in arrays]
        assert np.array_equal(*(each["vectors"][rows] for each, rows in zip(arrays, order, strict=True)))


def test_evaluation_matches_changed_images_again(images, tmp_path, caplog):
    from rich.console import Console

    matched = []

    class Counting:
        name, config = "counting", {}

        def match(self, path0, path1):
            matched.append((path0.name, path1.name))
            return dualrc.Matches.none({})

    names = [("0.png", "1.png"), ("0.png", "2.png")]
    pairs = [Pair(name0=a, name1=b, path0=images / a, path1=images / b, group="x") for a, b in names]
    for expected in (names, [], names[1:]):
        matched.clear()
        export(pairs, Counting(), tmp_path / "out", config={}, top=10, console=Console(quiet=True))
        assert matched == expected
        if expected == []:
            change(images / "2.png")


def test_stores_of_earlier_versions_go_on(tmp_path):
    with MatchStore(tmp_path / "a.sqlite", {}) as store:
        store.put("a", "b", dualrc.Matches.none({}))
        store._connection.execute("DROP TABLE pictures")
    with MatchStore(tmp_path / "a.sqlite", {}) as store:
        assert store.forget_changed({"a": "1", "b": "2"}) == [] and len(store) == 1 and store.seconds == 0
        assert store.forget_changed({"a": "1", "b": "3"}) == ["b"] and len(store) == 0
        # The file cannot be read now.
        assert store.forget_changed({"a": "", "b": "3"}) == ["a"]
        store.add_seconds(1.5)
        store.add_seconds(2)
        assert store.seconds == 3.5
