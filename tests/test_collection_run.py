"""Tests of matching collections in real processes: complete, deterministic, and crash-safe."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import match_set, same_matches, texture, tiny_network
from PIL import Image
from typer.testing import CliRunner

import dualrc
from dualrc import cli, machine
from dualrc.collection import allocation
from dualrc.collection.config import CollectionConfig
from dualrc.collection.executor import Event
from dualrc.collection.local import LocalExecutor
from dualrc.collection.matching import CollectionResult, match_collection
from dualrc.collection.retrieval import read_descriptors
from dualrc.collection.store import MatchStore
from dualrc.collection.worker import Failure, Worker, WorkerSettings
from dualrc.errors import ConfigError, DataError, OutputError, WeightsError
from dualrc.matches import Matches
from dualrc.model.checkpoint import file_hash, save_weights

GOOD = ["a/1.png", "a/é ü.png", "b/1.png", "b/with space.jpg", "c.png", "d.png", "e.png"]
BROKEN = ["broken.jpg", "text.jpg", "thin.png"]


def content(store: Path) -> dict:
    """Return the content of a store, independent of the order of insertion."""
    with MatchStore(store) as opened:
        return {
            names: (*(getattr(m, key).tobytes() for key in ("points0", "points1", "scores")), m.size0, m.size1, m.info)
            for names, m in opened
        }


@pytest.fixture(scope="module")
def config(weights) -> CollectionConfig:
    return CollectionConfig(weights=weights, size=96, top=200, device="cpu", workers=1)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Write images of several shapes; three of them are broken in different ways."""
    root = tmp_path_factory.mktemp("images")
    for number, name in enumerate(GOOD):
        (root / name).parent.mkdir(exist_ok=True)
        Image.fromarray(texture(number, 96 - 16 * (number % 2), 64)).save(root / name)
    whole = (root / "b" / "with space.jpg").read_bytes()
    (root / "broken.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "text.jpg").write_text("this is no image")
    Image.fromarray(texture(0, 96, 8)).save(root / "thin.png")
    (root / "notes.txt").write_text("left alone")
    return root


@pytest.fixture(scope="module")
def undisturbed(images, config, tmp_path_factory) -> CollectionResult:
    return match_collection(images, tmp_path_factory.mktemp("out") / "new" / "folder", config, quiet=True)


def test_every_pair_is_matched_as_the_matcher_does_it(images, config, weights, undisturbed):
    assert undisturbed.names == tuple(sorted(GOOD + BROKEN))
    assert undisturbed.pairs == tuple(itertools.combinations(sorted(GOOD + BROKEN), 2))
    # Each image is read once.
    assert (undisturbed.matched, undisturbed.skipped, undisturbed.extracted) == (21, 0, 10)
    matcher = dualrc.load(weights=weights, device="cpu", size=config.size, top=config.top)
    with MatchStore(undisturbed.store) as store:
        assert len(store) == 45
        for name0, name1 in itertools.combinations(sorted(GOOD), 2):
            found, expected = store.get(name0, name1), matcher.match(images / name0, images / name1)
            assert 0 < len(found) <= config.top and found.size0 == expected.size0
            if matcher.engine.startswith("native"):
                assert same_matches(found, expected)
            # Workers have fewer threads, which changes rounding with torch: near ties may differ.
            assert len(match_set(found, 1) & match_set(expected, 1)) >= 0.98 * len(expected)
            assert np.allclose(found.scores, expected.scores, atol=1e-4)
            assert found.info["network_size0"] == list(expected.info["network_size0"])
        assert store.config["weights"] == file_hash(weights)


def test_pair_scores_are_those_of_the_matcher(tmp_path):
    """With calibrated weights, the store has the probability that two images overlap."""
    photos = resources.files("dualrc") / "photos"
    images, names = tmp_path / "images", ("a.png", "b.png", "noise.png")
    images.mkdir()
    for name, photo in zip(names, ("leuven-0.jpg", "leuven-1.jpg"), strict=False):
        Image.open(BytesIO((photos / photo).read_bytes())).resize((192, 144)).save(images / name)
    noise = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((192, 144), Image.Resampling.BICUBIC).save(images / names[2])
    found = match_collection(images, tmp_path / "out", CollectionConfig(device="cpu", workers=1), quiet=True)
    with MatchStore(found.store) as store:
        scores = {pair: store.get(*pair).pair_score for pair in found.pairs}
    matcher = dualrc.load(device="cpu")
    expected = {pair: matcher.match(*(images / name for name in pair)).pair_score for pair in found.pairs}
    assert scores == pytest.approx(expected, abs=0.02)
    assert scores["a.png", "b.png"] > 0.5 and max(scores[name, "noise.png"] for name in names[:2]) < 0.05


def test_broken_images_are_reported_and_left_out(images, undisturbed):
    assert sorted(undisturbed.broken) == BROKEN and undisturbed.failed == {}
    assert "truncated" in undisturbed.broken["broken.jpg"] and "too thin" in undisturbed.broken["thin.png"]
    assert str(images / "text.jpg") in undisturbed.broken["text.jpg"]
    with MatchStore(undisturbed.store) as store:
        assert all(set(pair) & set(BROKEN) for pair in store.failures()) and len(store.failures()) == 24


def test_several_processes_give_the_same(images, config, undisturbed, tmp_path):
    result = match_collection(images, tmp_path, replace(config, workers=2, cache=0.0), quiet=True)
    assert content(result.store) == content(undisturbed.store)
    assert sorted(result.broken) == BROKEN


def test_a_second_run_does_what_is_missing(images, config, undisturbed, tmp_path):
    some = tmp_path / "images"
    shutil.copytree(images, some)
    for name in ("broken.jpg", "thin.png", "d.png", "e.png"):
        (some / name).unlink()
    first = match_collection(some, tmp_path / "out", config, quiet=True)
    assert (first.matched, first.skipped, list(first.broken)) == (10, 0, ["text.jpg"])
    shutil.copy(images / "d.png", some)
    # The file is repaired.
    Image.fromarray(texture(9, 96, 64)).save(some / "text.jpg")
    more = match_collection(some, tmp_path / "out", config, quiet=True)
    assert (more.matched, more.skipped, more.broken) == (5 + 6, 10, {})
    again = match_collection(some, tmp_path / "out", config, quiet=True)
    assert (again.matched, again.skipped, again.extracted) == (0, 21, 0)
    found, expected = content(more.store), content(undisturbed.store)
    old = [*itertools.combinations(sorted(GOOD[:6]), 2)]
    assert {pair: found[pair] for pair in old} == {pair: expected[pair] for pair in old}
    assert len(found) == 21 and not any("error" in str(row[-1]) for row in found.values())


def test_pairs_by_retrieval_keep_their_descriptors(images, config, undisturbed, tmp_path):
    chosen = replace(config, pairs="retrieval", neighbors=1)
    result = match_collection(images, tmp_path, chosen, quiet=True)
    assert 4 <= len(result.pairs) <= 7 and all(set(pair) <= set(GOOD) for pair in result.pairs)
    # Described and matched, but still read once each.
    assert result.extracted == 10 and sorted(result.broken) == BROKEN
    expected = content(undisturbed.store)
    assert content(result.store) == {pair: expected[pair] for pair in result.pairs}
    with MatchStore(result.store) as store:
        assert sorted(read_descriptors(tmp_path / "descriptors.npz", store.config)) == sorted(GOOD)
        assert read_descriptors(tmp_path / "descriptors.npz", {**store.config, "weights": "other"}) == {}
        (tmp_path / "broken.npz").write_bytes(b"broken")
        assert read_descriptors(tmp_path / "broken.npz", store.config) == {}


def run_to_be_killed(images: Path, out: Path, config: CollectionConfig) -> None:
    """Run with a delay between pairs, so that the process can be killed before it is finished."""
    next_event = LocalExecutor.next

    def slow_next(executor: LocalExecutor) -> Event:
        time.sleep(0.05)
        return next_event(executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExecutor, "next", slow_next)
        match_collection(images, out, config, quiet=True)


def children(pid: int) -> list[int]:
    """Return the child processes of a process; Linux only."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stored(out: Path) -> int:
    """Return the number of pairs in a store, while another process writes to it."""
    try:
        with MatchStore(out / "matches.sqlite") as store:
            return len(store)
    # The store does not exist yet.
    except DataError:
        return 0


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kill_9_at_ten_random_moments_loses_nothing(images, config, undisturbed, tmp_path):
    rng = random.Random(0)
    # The parent is forked from a process with all imports; its workers start fresh, as always.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["test_collection_run"])
    total, counts = len(undisturbed.pairs), []
    for number in range(10):
        process = processes.Process(target=run_to_be_killed, args=(images, tmp_path, config))
        process.start()
        # Kill alternately during the start, and after some more pairs, so that each run makes progress.
        before, soon = stored(tmp_path), rng.uniform(0, 1.5)
        wanted = before + (rng.randint(1, 6) if number % 2 else 1)
        deadline = time.monotonic() + (60 if number % 2 else soon)
        while time.monotonic() < deadline and stored(tmp_path) < wanted and process.is_alive():
            time.sleep(0.02)
        workers = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (-signal.SIGKILL, 0)
        deadline = time.monotonic() + 10
        # Workers end with their parent.
        while not all(map(gone, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        counts.append(stored(tmp_path))
    assert counts == sorted(counts) and 0 < counts[-1] < total, counts
    result = match_collection(images, tmp_path, config, quiet=True)
    assert content(result.store) == content(undisturbed.store)
    assert result.matched + result.skipped == 21 and result.skipped > 0


def test_a_worker_that_is_killed_is_replaced(images, config, undisturbed, tmp_path, monkeypatch):
    events = []
    next_event = LocalExecutor.next

    def watched_next(executor: LocalExecutor) -> Event:
        # The worker was ready, and has matched three pairs.
        if len(events) == 4:
            executor._processes[0].kill()
        events.append(next_event(executor))
        return events[-1]

    monkeypatch.setattr(LocalExecutor, "next", watched_next)
    result = match_collection(images, tmp_path, config, quiet=True)
    assert [event.kind for event in events].count("died") == 1
    assert content(result.store) == content(undisturbed.store)
    assert result.failed == {} and result.extracted < 20


def test_other_settings_are_refused_with_the_remedy(images, config, undisturbed, tmp_path):
    with pytest.raises(DataError, match=r"matcher\.size is 96 there and 64 now.*write to another folder"):
        match_collection(images, undisturbed.store.parent, replace(config, size=64), quiet=True)
    other = tmp_path / "other.safetensors"
    save_weights(tiny_network(seed=1), other)
    with pytest.raises(DataError, match=f"weights is '{file_hash(config.weights)}' there and '{file_hash(other)}' now"):
        match_collection(images, undisturbed.store.parent, replace(config, weights=other), quiet=True)


def test_folders_that_can_not_be_matched(config, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no images"):
        match_collection(tmp_path / "empty", tmp_path / "out", config, quiet=True)
    Image.fromarray(texture(0, 64, 64)).save(tmp_path / "empty" / "one.png")
    with pytest.raises(DataError, match="only one image; pass a folder with at least two"):
        match_collection(tmp_path / "empty", tmp_path / "out", config, quiet=True)
    assert not (tmp_path / "out").exists()


def test_settings_without_meaning():
    for changes in ({"top": 0}, {"workers": 0}, {"cache": -1.0}, {"max_memory": 0.0}, {"executor": "x"}, {"loops": -1}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            CollectionConfig(**changes)
    with pytest.raises(ConfigError, match="executor ray"):
        CollectionConfig(address="auto")


def test_out_that_is_a_file(images, config, tmp_path):
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(OutputError, match=r"a file is in its place\); choose another"):
        match_collection(images, tmp_path / "out", config, quiet=True)


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a separate small file system, if that is permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can't be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_folder(images, config, tmp_path):
    with (
        small_disk(tmp_path / "disk", "ro") as disk,
        pytest.raises(OutputError, match="not writable; write elsewhere"),
    ):
        match_collection(images, disk, config, quiet=True)


def test_a_full_disk_loses_nothing(images, config, undisturbed, tmp_path):
    with small_disk(tmp_path / "disk", "size=160k") as disk:
        with pytest.raises(OutputError, match=r"free disk space, or write elsewhere; stored pairs are safe"):
            match_collection(images, disk, config, quiet=True)
        assert 0 < stored(disk) < len(undisturbed.pairs)
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        result = match_collection(images, disk, config, quiet=True)
        assert result.skipped > 0 and content(result.store) == content(undisturbed.store)


def settings(images: Path, weights: Path, **changes) -> WorkerSettings:
    known = {
        "images": str(images),
        "preset": "default",
        "weights": weights.read_bytes(),
        "weights_hash": file_hash(weights),
        "device": "cpu",
        "matcher": {"size": 96, "top": 200},
        "cache_bytes": 2**20,
    }
    return WorkerSettings(**(known | changes))


def test_a_worker_that_does_not_see_the_folder_gets_the_files(images, weights, tmp_path):
    items = [("c.png", "d.png"), ("c.png", "text.jpg"), ("c.png",), ("c.png", "missing.png")]
    here, elsewhere = Worker(settings(images, weights)), Worker(settings(tmp_path, weights))
    sizes = {"c.png": (images / "c.png").stat().st_size}
    assert here.sees(sizes) and not elsewhere.sees(sizes) and not here.sees({"c.png": 1})
    contents = {name: (images / name).read_bytes() for name in ("c.png", "d.png", "text.jpg")}
    found, expected = dict(elsewhere.work(items, contents)), dict(here.work(items))
    assert (found[items[0]].points0 == expected[items[0]].points0).all() and len(found[items[0]])
    assert (found[items[2]] == expected[items[2]]).all()
    assert found[items[1]] == Failure(
        image="text.jpg", reason=expected[items[1]].reason.replace(str(images), str(tmp_path))
    )
    assert "does not exist" in found[items[3]].reason


def test_a_worker_keeps_what_fits(images, weights):
    pairs = [*itertools.combinations(["a/1.png", "b/1.png", "c.png"], 2)] * 2
    for limit, extracted in ((0, 8), (2**20, 3)):
        worker = Worker(settings(images, weights, cache_bytes=limit))
        assert len(list(worker.work(pairs))) == 6
        assert worker.extracted == extracted
    assert torch.get_num_threads() == 1


def test_a_worker_in_high_quality_looks_at_the_images(images, weights):
    items = [("c.png", "d.png"), ("c.png", "text.jpg")]
    found = dict(Worker(settings(images, weights, matcher={"size": 96, "quality": "high"})).work(items))
    matcher = dualrc.load(weights=weights, device="cpu", size=96, quality="high")
    expected = matcher.match(images / "c.png", images / "d.png")
    assert (found[items[0]].points1 == expected.points1).all() and len(expected)
    assert found[items[1]].image == "text.jpg"
    with pytest.raises(ConfigError, match="choose standard, high, search"):
        CollectionConfig(quality="best")


def test_reading_ahead_changes_nothing(images, weights):
    """A worker with a GPU uses batches, and threads that read images ahead."""
    items = [*itertools.combinations(["a/1.png", "b/1.png", "c.png", "text.jpg", "d.png"], 2), ("c.png",)]
    plain, ahead = Worker(settings(images, weights)), Worker(settings(images, weights))
    ahead.prefetches, ahead.at_once = True, 3
    expected, found = dict(plain.work(items)), dict(ahead.work(items))
    assert list(expected) == items and set(found) == set(items)
    for item in items:
        if isinstance(expected[item], Matches):
            assert (found[item].points1 == expected[item].points1).all() and len(found[item])
        elif isinstance(expected[item], Failure):
            assert found[item] == expected[item]
    assert ahead.extracted == plain.extracted == 5


def test_a_worker_with_other_weights_refuses(images, weights):
    with pytest.raises(WeightsError, match="same version of dualrc on all machines"):
        Worker(settings(images, weights, weights_hash="0123"))


def test_what_a_worker_refuses_is_said_once(images, config, tmp_path):
    with pytest.raises(ConfigError, match="Cannot use the device 'abacus'"):
        match_collection(images, tmp_path, replace(config, device="abacus"), quiet=True)


def test_the_command(images, config, undisturbed, tmp_path):
    arguments = ["collection", str(images), "--out", str(undisturbed.store.parent), "--size", "96", "--top", "200"]
    pairs = tmp_path / "pairs.txt"
    pairs.write_text('c.png d.png\n"a/é ü.png" e.png\n', encoding="utf-8")
    arguments += ["--weights", str(config.weights), "--device", "cpu", "--pairs", str(pairs)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0 and "2, 2 of them matched before" in done.stdout, done.output


def test_workers_share_the_memory(images, config, weights, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(allocation, "LocalExecutor", lambda settings: settings)
    matcher = dualrc.load(weights=weights, device="cpu", size=1024)
    need = allocation._worker_bytes(matcher) / 2**30
    for limit, count in ((9 * need, 4), (2.5 * need, 2), (0.8 * need, 1), (0.1, 1)):
        settings = allocation.start_executor(
            images, [], replace(config, workers=None, max_memory=limit, cache=0.0), matcher
        )
        assert len(settings) == count
        # Torch and the network take half a GiB; the rest is for matching, at a smaller size if necessary.
        given = [one.matcher["max_memory"] for one in settings]
        assert given == pytest.approx([max(limit / count - 0.5, limit / count / 4)] * count)
