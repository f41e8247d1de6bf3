"""Tests of collections on a Ray cluster, one of whose machines dies."""

import itertools
import sys
from dataclasses import replace

import pytest
from conftest import texture, tiny_network
from PIL import Image

from dualrc.collection import ray_cluster
from dualrc.collection.config import CollectionConfig
from dualrc.collection.executor import Event
from dualrc.collection.matching import match_collection
from dualrc.collection.ray_cluster import RayExecutor
from dualrc.collection.store import MatchStore
from dualrc.errors import ConfigError
from dualrc.model.checkpoint import save_weights


def content(store) -> dict:
    with MatchStore(store) as opened:
        return {
            names: (*(getattr(m, key).tobytes() for key in ("points0", "points1", "scores")), m.size0, m.size1, m.info)
            for names, m in opened
        }


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(12):
        Image.fromarray(texture(number, 96, 64)).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "broken.png").write_text("no image")
    return tmp_path / "images"


@pytest.fixture
def config(tmp_path):
    save_weights(tiny_network(), tmp_path / "tiny.safetensors")
    return CollectionConfig(weights=tmp_path / "tiny.safetensors", size=160, top=200, device="cpu", workers=1)


def heard_of_block(events: list[Event], worker: int) -> int:
    """Return how many of the five results of its block a worker has returned."""
    kinds = [event.kind for event in events if event.worker == worker]
    return kinds[::-1].index("ready") if "ready" in kinds else 0


def wait_for_a_death(executor: RayExecutor) -> None:
    """Wait until the death of a worker is known: a call to it fails, although its turn has not come."""
    asked = [actor.start.remote() for actor in executor._actors]
    while True:
        (answer,), asked = executor._ray.wait(asked, num_returns=1, timeout=120.0)
        try:
            executor._ray.get(answer)
        except executor._ray.exceptions.RayActorError:
            return


# Ray closes files and processes only when the interpreter ends.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_cluster_gives_the_same_though_a_node_dies(images, config, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    expected = content(match_collection(images, tmp_path / "local", config, quiet=True).store)
    node = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        second = cluster.add_node(num_cpus=1)
        events, removed = [], []
        next_event = RayExecutor.next

        def watched_next(executor: RayExecutor) -> Event:
            # Both workers have an answer before one is read.
            if not removed:
                executor._ray.wait(list(executor._awaited), num_returns=2)
                if len(events) >= 15 and all(1 <= heard_of_block(events, worker) <= 3 for worker in range(2)):
                    cluster.remove_node(second, allow_graceful=False)
                    wait_for_a_death(executor)
                    removed.append(second)
            events.append(next_event(executor))
            return events[-1]

        # No worker gets ahead of the results that were read, or reaches the end of its block.
        monkeypatch.setattr(ray_cluster, "_UNREAD", 1)
        monkeypatch.setattr(RayExecutor, "next", watched_next)
        ray_config = replace(config, executor="ray", address=cluster.address, workers=None)
        result = match_collection(images, tmp_path / "ray", ray_config, quiet=True)
    finally:
        cluster.shutdown()
    assert "died" in [event.kind for event in events]
    assert content(result.store) == expected
    assert (list(result.broken), result.failed) == (["broken.png"], {})
    assert result.matched == len(list(itertools.combinations(range(12), 2)))


def test_ray_that_is_not_installed(images, config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'dualrc\[ray\]'"):
        match_collection(images, tmp_path / "out", replace(config, executor="ray"), quiet=True)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999999", "nowhere.invalid:6379", "ray://127.0.0.1:1"])
def test_addresses_without_a_cluster(images, config, tmp_path, address):
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=f"address {address}"):
        match_collection(images, tmp_path / "out", replace(config, executor="ray", address=address), quiet=True)
