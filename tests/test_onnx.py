"""ONNX: the parts that are exported agree with the definition, the models with the matcher, in Python and elsewhere."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, rand, texture, tiny_config, tiny_network
from torch.nn import functional as F
from typer.testing import CliRunner

import dualrc
from dualrc.config import ConsensusConfig, ContextConfig, FineConfig
from dualrc.errors import ConfigError, ImageError, WeightsError
from dualrc.image import resize as torch_resize
from dualrc.image import to_input, to_tensor
from dualrc.model.cells import FineMap
from dualrc.model.checkpoint import save_weights
from dualrc.model.consensus import Consensus
from dualrc.model.dualrc import make_network
from dualrc.model.search import cell_queries, search
from dualrc.onnx.consensus import SlabConsensus
from dualrc.onnx.modules import FeaturesModel, PairModel
from dualrc.onnx.resize import resize
from dualrc.onnx.search import VISITED, search_top

onnx = pytest.importorskip("onnx", reason="needs pip install 'dualrc[onnx]'")
pytest.importorskip("onnxruntime", reason="needs pip install 'dualrc[onnx]'")

from dualrc.onnx import Matcher  # noqa: E402
from dualrc.onnx.export import ExportConfig, export  # noqa: E402

SMALL_TOP = 300
ONE = ["CPUExecutionProvider"]


def shifted(width0=128, height0=96, width1=112, height1=128) -> tuple[np.ndarray, np.ndarray]:
    """Two crops of one texture: what is at (x, y) in the first is at (x - 11, y - 6) in the second."""
    whole = texture(3, 192, 192)
    return whole[:height0, :width0].copy(), whole[6 : 6 + height1, 11 : 11 + width1].copy()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The bundled weights as models of any size."""
    folder = tmp_path_factory.mktemp("models")
    export(folder, ExportConfig(top=SMALL_TOP))
    return folder


@pytest.fixture(scope="module")
def runtime(models) -> Matcher:
    return Matcher(models, ONE, threads=1)


@pytest.fixture(scope="module")
def reference() -> dualrc.Matcher:
    """The same weights in torch: float32, one look."""
    return dualrc.load(device="cpu", precision="float32", engine="torch", max_zoom=1.0)


def assert_same(found: dualrc.Matches, wanted: dualrc.Matches, *, more_than: int = 100) -> None:
    """The same matches but for near-ties."""
    assert len(found) == len(wanted) > more_than
    rows = [np.hstack([m.points0, m.points1]) for m in (wanted, found)]
    apart = np.abs(rows[0][:, None] - rows[1][None]).max(2).min(1)
    assert np.mean(apart < 0.01) > 0.99
    np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-3)


# Parts against the definition.


@pytest.mark.parametrize(("sizes", "channels"), [((3, 3), (4, 1)), ((3,), (1,)), ((5, 1, 3), (2, 3, 1))])
@pytest.mark.parametrize("shape", [(2, 3, 4, 2), (5, 2, 3, 4), (9, 4, 2, 5)])
def test_slabs_give_the_same_consensus(sizes, channels, shape):
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels, initialization="uniform"))
    scores = rand(0, 1, *shape).abs()
    with torch.no_grad():
        torch.testing.assert_close(SlabConsensus(consensus)(scores[0]), consensus(scores)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("reading", ["center", "corner"])
@pytest.mark.parametrize(("size0", "size1"), [((6, 8), (7, 5)), ((2, 2), (2, 3)), ((9, 9), (10, 9))])
def test_what_the_search_calls_exact_is_the_argmax(size0, size1, reading, temperature):
    fine0, fine1 = (
        FineMap.of(F.normalize(rand(seed, 1, 16, 4 * h, 4 * w), dim=1)) for seed, (h, w) in enumerate((size0, size1))
    )
    tensor = rand(7, 1, fine0.cells, fine1.cells).exp().pow(2)
    config = FineConfig(reading=reading, temperature=temperature)
    cells = torch.arange(fine0.cells)
    definition = search(tensor, cell_queries(fine0, cells[None], reading), fine1, temperature)
    found = search_top(tensor[0], fine0, fine1, config)
    index = fine1.members(torch.arange(fine1.cells)).flatten()[found.position]
    best, exact = definition.best.flatten(), found.exact
    known = exact & (best >= 0)
    assert torch.equal(index[known], best[known])
    torch.testing.assert_close(found.score[known], definition.score.flatten()[known])
    assert (found.score <= definition.score.flatten() + 1e-6).all()
    # With no more cells than are visited, nothing is left out.
    assert exact.all() if fine1.cells <= VISITED else exact.any()


def test_the_search_admits_what_it_did_not_see():
    fine0, fine1 = (FineMap.of(F.normalize(rand(seed, 1, 16, 24, 24), dim=1)) for seed in (0, 1))
    # A flat tensor tells nothing, so that the best cell is visited by chance alone.
    found = search_top(torch.ones(36, 36), fine0, fine1, FineConfig())
    definition = search(torch.ones(1, 36, 36), cell_queries(fine0, torch.arange(36)[None], "center"), fine1, 0.0)
    index = fine1.members(torch.arange(36)).flatten()[found.position]
    assert not found.exact.any() and (index != definition.best.flatten()).any()


def models_of(network, image0, image1, top):
    """What the two modules give in torch, and what the network gives."""
    with torch.inference_mode():
        features, pair = FeaturesModel(network).eval(), PairModel(network, top).eval()
        maps = [features(torch_resize(to_tensor(image)[None], image.shape[1::-1])) for image in (image0, image1)]
        inputs = [to_input(to_tensor(image)[None], image.shape[1::-1]) for image in (image0, image1)]
        return pair(*maps[0], *maps[1]), network(*inputs, top=top)


def with_context():
    """A small network whose context does something."""
    from dataclasses import replace

    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = make_network(replace(tiny_config(), context=ContextConfig(layers=1, width=8, heads=2)))
        torch.nn.init.normal_(network.context.out.weight)
    return network


# No more coarse cells than are visited: untrained networks have flat tensors, where little can be left out.
TINY = (64, 64, 80, 48)
NETWORKS = {
    "default": partial(tiny_network, subpixel_hidden=8),
    "paper": partial(tiny_network, "paper", reading="corner", query_share=0.5, subpixel=False),
    "context": with_context,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_modules_are_the_network(name):
    found, wanted = models_of(NETWORKS[name](), *shifted(*TINY), top=40)
    count = int(found.count)
    assert count == len(wanted.scores) > 5
    torch.testing.assert_close(found.scores[:count], wanted.scores, atol=1e-5, rtol=1e-4)
    here, there = (torch.cat([m.points0, m.points1], dim=1) for m in (found, wanted))
    # Matches with equal scores may change places.
    apart = (there[:, None] - here[:count]).abs().amax(2).amin(1)
    assert apart.max() < 0.01 and not here[count:].any()
    assert found.exact[:count].all() and not found.exact[count:].any()


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(64, 48), (61, 47), (32, 32), (160, 96), (96, 200)])
def test_resizing_without_torch_is_the_same(size, antialias):
    image = texture(0, 61, 47)
    wanted = torch_resize(to_tensor(image)[None], size, antialias=antialias)[0].numpy()
    found = resize(image, size, antialias=antialias)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-3)


# Models.


def test_models_hold_standard_operators_alone(models):
    for name, outputs in (("features", ["coarse", "fine", "light"]), ("pair", ["points0", "points1", "scores"])):
        path = models / f"{name}.onnx"
        model = onnx.load(str(path))
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
        kinds = {node.op_type for node in model.graph.node}
        assert not kinds & {"If", "Loop", "Scan"} and all(not node.domain for node in model.graph.node)
        for node in model.graph.node:
            attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            assert not attributes.get("antialias"), node.name
        assert [output.name for output in model.graph.output][: len(outputs)] == outputs
        assert str(ROOT).encode() not in path.read_bytes()
    assert [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim] == [SMALL_TOP, 2]


@pytest.mark.parametrize("sizes", [(128, 96, 112, 128), (97, 131, 64, 175), (33, 40, 50, 36)])
def test_any_size_gives_the_matches_of_torch(runtime, reference, sizes):
    images = shifted(*sizes)
    found, wanted = runtime.match(*images), reference.match(*images, top=SMALL_TOP)
    assert_same(found, wanted, more_than=100 if min(sizes) >= 64 else 10)
    assert found.size0 == wanted.size0 and found.info["network_size1"] == wanted.info["network_size1"]
    if min(sizes) > 64:
        moved = np.abs(found.points0 - found.points1 - (11, 6)).max(1)
        assert np.median(moved) < 0.2 and found.info["exact"] > 0.9


def test_selection_and_scores_are_those_of_the_matcher(runtime, reference):
    images = shifted()
    found, wanted = runtime.match(*images, top=50), reference.match(*images, top=50)
    assert len(found) == 50 and len(found.whole) == min(SMALL_TOP, len(wanted.whole))
    assert abs(found.pair_score - wanted.pair_score) < 0.02
    strict = runtime.match(*images, min_score=0.985)
    assert 0 < len(strict) < SMALL_TOP and strict.scores.min() >= 0.985
    features = [runtime.features(image) for image in images]
    again = runtime.match(*features, top=50)
    assert np.array_equal(again.points1, found.points1) and "seen as 128x96" in repr(features[0])
    with pytest.raises(ConfigError, match="come from other models"):
        runtime.match(features[0], replace(features[1], made_by=("other weights", "float32")))
    assert found.info["weights"] == reference.weights_hash and len(runtime.match(*images, top=0)) == 0
    bigger = runtime.match(*images, size=160)
    assert bigger.info["network_size0"] == (160, 112) and bigger.size0 == (128, 96)


def test_a_constant_image_has_no_sure_matches(runtime, reference):
    flat = np.full((64, 64, 3), 90, np.uint8)
    found = runtime.match(flat, shifted()[0])
    assert len(found) <= SMALL_TOP and np.isfinite(found.points0).all() and np.isfinite(found.scores).all()
    assert found.pair_score < 0.5


NO_TORCH = """
import sys
import numpy as np
from dualrc.onnx import Matcher
image = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
matches = Matcher(sys.argv[1], ["CPUExecutionProvider"], threads=1).match(image, image[:80, 16:])
assert len(matches) > 50 and matches.pair_score > 0.1, matches
loaded = {"torch", "safetensors", "rich", "typer", "matplotlib", "poselib", "tomlkit"} & sys.modules.keys()
assert not loaded, loaded
"""


def test_matching_does_not_import_torch(models):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NO_TORCH, str(models)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["paper", "context"])
def test_other_networks_export(name, tmp_path):
    network = NETWORKS[name]()
    preset = network.config.preset
    save_weights(network, tmp_path / "weights.safetensors")
    export(tmp_path, ExportConfig(top=SMALL_TOP), preset=preset, weights=tmp_path / "weights.safetensors")
    options = {"device": "cpu", "precision": "float32", "engine": "torch", "max_zoom": 1.0}
    wanted = dualrc.load(preset, weights=tmp_path / "weights.safetensors", **options)
    images = shifted(*TINY)
    found = Matcher(tmp_path, ONE, threads=1).match(*images)
    best = wanted.match(*images, top=SMALL_TOP)
    assert len(found) == len(best) > 5
    np.testing.assert_allclose(found.scores, best.scores, atol=1e-4)


def test_command_line_writes_static_half_precision(tmp_path, reference):
    from dualrc.cli import app

    options = ["--size", "112x96", "--precision", "float16", "--top", "100"]
    done = CliRunner().invoke(app, ["export", "onnx", str(tmp_path), *options])
    assert done.exit_code == 0 and "pair.onnx" in done.output, done.output
    matcher = Matcher((tmp_path / "features.onnx", tmp_path / "pair.onnx"), ONE, threads=1)
    assert matcher.input_size == (112, 96) and "float16, 112x96" in repr(matcher)
    outputs = onnx.load(str(tmp_path / "features.onnx")).graph.output
    shapes = {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in outputs}
    assert shapes["light"] == [1, 96, 112] and shapes["coarse"][2:] == [6, 7] and shapes["fine"][2:] == [24, 28]
    images = shifted(112, 96, 112, 96)
    maps = matcher.features(images[0]).maps
    assert {name: list(values.shape) for name, values in maps.items()} == shapes
    found, wanted = matcher.match(*images), reference.match(*images, top=100)
    assert maps["fine"].dtype == np.float16
    rows = [np.hstack([m.points0, m.points1]) for m in (wanted, found)]
    apart = np.abs(rows[0][:, None] - rows[1][None]).max(2).min(1)
    assert len(found) == 100 and np.median(apart) < 0.1
    with pytest.raises(ConfigError, match="112x96 only"):
        matcher.match(*images, size=200)
    with pytest.raises(ImageError, match="too small"):
        matcher.match(images[0][:20], images[1])


def test_without_the_runtime_the_error_names_it_alone(models, monkeypatch):
    """The extra would also install torch."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"need onnxruntime .*: pip install onnxruntime\.$"):
        Matcher(models)


def test_mistakes_are_named(models, tmp_path):
    from dualrc.cli import app

    with pytest.raises(WeightsError, match="does not exist; write it"):
        Matcher(tmp_path)
    with pytest.raises(WeightsError, match="is a pair model"):
        Matcher((models / "pair.onnx", models / "features.onnx"), ONE)
    broken = tmp_path / "features.onnx"
    broken.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="can't be opened"):
        Matcher((broken, models / "pair.onnx"), ONE)
    stranger = onnx.load(str(models / "features.onnx"))
    del stranger.metadata_props[:]
    onnx.save(stranger, str(broken))
    with pytest.raises(WeightsError, match="was not exported by dualrc"):
        Matcher((broken, models / "pair.onnx"), ONE)
    with pytest.raises(ConfigError, match="multiples of 16"):
        ExportConfig(size=(100, 96))
    with pytest.raises(ConfigError, match="at least 1"):
        ExportConfig(top=0)
    for options, words in ((["--size", "big"], "WIDTHx"), (["--size", "64x64", "--dynamic"], "exclude each other")):
        done = CliRunner().invoke(app, ["export", "onnx", str(tmp_path), *options])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)


def test_networks_of_another_kind_are_refused(tmp_path):
    from dualrc.config import PRESETS

    weights = tmp_path / "ncnet.safetensors"
    save_weights(make_network(PRESETS["ncnet"][0]), weights, dtype=torch.float16)
    with pytest.raises(ConfigError, match="can't be exported"):
        export(tmp_path, preset="ncnet", weights=weights)
