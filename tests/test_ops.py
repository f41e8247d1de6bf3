"""Tests of every engine against the reference: odd shapes, masks, ties, empty inputs, half precision, low memory."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import DEVICE, ENGINES, features_of, rand, texture, tiny_matcher, tiny_network
from ops_data import HALF, NOTHING, REFERENCE, coarse_maps, consensus_of, only_on_gpu, place, refinement_case, run

from dualrc import measure, ops
from dualrc.errors import ConfigError
from dualrc.model.dualrc import Features
from dualrc.model.engine import Engine
from dualrc.model.refine import CellMatches
from dualrc.model.support import DirectedMatches
from dualrc.ops import formulas, graphs, memory
from dualrc.ops.graphs import GraphEngine

# Everything after the backbone


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 96, 2, 1), (1, 1, 1, 1), (0, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_unit_features(engine, shape, layout):
    features = rand(0, *shape).contiguous(memory_format=layout)
    features[..., :1] = 0
    found, expected = run(engine, "normalize", features), REFERENCE.normalize(features)
    assert torch.allclose(found.double(), expected, atol=1e-6)
    if engine.name in HALF:
        half = run(engine, "normalize", features.half())
        assert half.dtype == torch.float16 and torch.allclose(half.double(), expected, atol=2e-3)


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 3, 16, 5), (1, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_brightness(engine, shape, layout):
    images = rand(1, *shape).contiguous(memory_format=layout)
    assert torch.allclose(run(engine, "brightness", images).double(), REFERENCE.brightness(images), atol=1e-5)


# Correlation to the second mutual filter


@pytest.mark.parametrize("channels", [(16, 1), (8, 1), (32, 1)], ids=str)
@pytest.mark.parametrize(
    ("batch", "shape0", "shape1"),
    [(2, (2, 3), (3, 5)), (1, (1, 1), (1, 1)), (1, (3, 2), (1, 9)), (1, (1, 4), (2, 2))],
    ids=str,
)
def test_the_coarse_tensor(engine, channels, batch, shape0, shape1):
    inputs = coarse_maps(batch, shape0, shape1), consensus_of(channels), NOTHING
    expected = REFERENCE.coarse(*inputs)
    found = run(engine, "coarse", *inputs)
    assert found.shape == (batch, *shape0, *shape1) and expected.abs().max() > 0.01
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "channels"),
    [((3, 3), (10, 1)), ((3, 3), (1, 1)), ((5, 3), (16, 1)), ((3, 3, 3), (4, 6, 1)), ((3,), (1,)), ((1, 5), (3, 1))],
    ids=str,
)
def test_other_layers(engine, sizes, channels):
    inputs = coarse_maps(1, (3, 4), (2, 5)), consensus_of(channels, sizes), NOTHING
    # Torch uses TF32 for convolutions on a GPU.
    rtol, atol = (2e-3, 2e-3) if engine.name.startswith("triton") and DEVICE == "cuda" else (1e-4, 1e-5)
    assert torch.allclose(run(engine, "coarse", *inputs), REFERENCE.coarse(*inputs), rtol=rtol, atol=atol)


@pytest.mark.parametrize("masked", [(True, True), (True, False), (False, True)], ids=str)
def test_masked_cells_correlate_with_nothing(engine, masked):
    maps = coarse_maps(2, (2, 3), (3, 2))
    masks = (rand(7, 2, 4 * f.shape[2], 4 * f.shape[3]) > 1.7 for f in maps)
    valid = tuple(mask if used else None for mask, used in zip(masks, masked, strict=True))
    inputs = maps, consensus_of((8, 1)), valid
    expected = REFERENCE.coarse(*inputs)
    assert not torch.allclose(expected, REFERENCE.coarse(maps, inputs[1], NOTHING))
    assert torch.allclose(run(engine, "coarse", *inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bytes_", [1, 3_000, 9_000, 40_000])
def test_the_coarse_tensor_in_little_memory(engine, bytes_):
    inputs = coarse_maps(1, (5, 2), (3, 3)), consensus_of((8, 1)), NOTHING
    with memory.working_memory(bytes_):
        found = run(engine, "coarse", *inputs)
    assert torch.allclose(found, REFERENCE.coarse(*inputs), rtol=1e-4, atol=1e-5)


def test_images_exchanged_exchange_the_coarse_tensor(engine):
    maps, consensus = coarse_maps(1, (3, 2), (2, 4)), consensus_of((16, 1))
    there, back = (run(engine, "coarse", pair, consensus, NOTHING) for pair in (maps, maps[::-1]))
    assert torch.allclose(there, back.permute(0, 3, 4, 1, 2), rtol=1e-4, atol=1e-6)


def test_the_coarse_tensor_in_half_precision(engine):
    if engine.name not in HALF:
        pytest.skip("float32 alone")
    maps = tuple(f.half() for f in coarse_maps(1, (2, 3), (3, 4)))
    consensus = consensus_of((16, 1))
    found = run(engine, "coarse", maps, consensus, NOTHING).float()
    assert torch.allclose(found, REFERENCE.coarse(tuple(f.float() for f in maps), consensus, NOTHING), atol=5e-3)


def test_a_broken_score_does_not_spread_silently(engine):
    if engine.name.startswith("triton"):
        pytest.skip("maxima on a GPU leave NaN out")
    maps = tuple(f.clone() for f in coarse_maps(1, (2, 3), (3, 4)))
    maps[0][0, 0, 1, 1] = torch.nan
    assert run(engine, "coarse", maps, consensus_of((8, 1)), NOTHING).isnan().any()


# Refinement


def assert_points(found, expected, *, least=0.97, tolerance=5e-3):
    """Check that points and scores are equal, except few that a threshold of the alignment moved in only one result."""
    error = torch.maximum(
        (found.points0 - expected.points0).norm(dim=1), (found.points1 - expected.points1).norm(dim=1)
    )
    assert (error < tolerance).float().mean() >= least if len(error) else True
    assert (error < 3).all() and torch.isfinite(found.points0).all() and torch.isfinite(found.points1).all()
    assert torch.allclose(found.scores, expected.scores, rtol=5e-3, atol=2e-3)


@cache
def refined(hidden, count=60, with_light=True):
    subpixel, fine, light, matches = refinement_case(hidden=hidden, count=count)
    return REFERENCE.refine(subpixel, fine, light if with_light else None, matches)


@pytest.mark.parametrize("hidden", [0, 8])
def test_refinement(engine, hidden, request):
    if not hidden:
        only_on_gpu(engine, request)
    case, expected = refinement_case(hidden=hidden), refined(hidden)
    found = run(engine, "refine", *case)
    assert len(expected.scores) > 50 and expected.scores.max() > 0.01
    assert_points(found, expected)
    plain = run(engine, "refine", case[0], case[1], None, case[3])
    assert_points(plain, refined(hidden, with_light=False))
    assert ((plain.points1 - found.points1).norm(dim=1) > 1e-3).float().mean() > 0.1  # the alignment moved some


def test_refinement_in_half_precision(engine):
    if engine.name not in HALF:
        pytest.skip("float32 alone")
    subpixel, fine, light, matches = refinement_case(count=30, dtype=torch.float16)
    exact = tuple(replace(f, features=f.features.float()) for f in fine), tuple(one.float() for one in light)
    expected = REFERENCE.refine(subpixel, *exact, matches)
    assert_points(run(engine, "refine", subpixel, fine, light, matches), expected, least=0.9, tolerance=0.03)


def test_refinement_treats_the_images_alike(engine, request):
    only_on_gpu(engine, request)
    subpixel, fine, light, matches = refinement_case()
    swapped = CellMatches(matches.pair, matches.index1, matches.index0, matches.score1, matches.score0)
    found = run(engine, "refine", subpixel, fine, light, matches)
    other = run(engine, "refine", subpixel, fine[::-1], light[::-1], swapped)
    assert_points(type(other)(other.points1, other.points0, other.scores), found, tolerance=1e-3)


def test_rows_that_are_empty_change_nothing(engine, request):
    only_on_gpu(engine, request)
    subpixel, fine, light, matches = refinement_case()
    count = len(matches.pair)
    padded = CellMatches(*(torch.cat([column, column[:5]]) for column in matches))
    padded.pair[count:] = -1
    found = run(engine, "refine", subpixel, fine, light, padded)
    expected = run(engine, "refine", subpixel, fine, light, matches)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine[:count], other, atol=1e-5)


def test_a_batch_is_its_pairs(engine, request):
    only_on_gpu(engine, request)
    subpixel, fine, light, matches = refinement_case()
    together = run(engine, "refine", subpixel, fine, light, matches)
    for number in (0, 1):
        own, here = matches.pair == number, slice(number, number + 1)
        maps = tuple(replace(f, features=f.features[here]) for f in fine)
        alone = CellMatches(*(column[own] for column in matches))
        alone = run(
            engine, "refine", subpixel, maps, tuple(one[here] for one in light), alone._replace(pair=alone.pair * 0)
        )
        assert_points(type(alone)(*(column[own] for column in together)), alone, tolerance=1e-3)


def test_nothing_to_refine(engine):
    subpixel, fine, light, matches = refinement_case(count=3)
    none = CellMatches(*(column[:0] for column in matches))
    found = run(engine, "refine", subpixel, fine, light, none)
    assert found.points0.shape == found.points1.shape == (0, 2) and found.scores.shape == (0,)


@pytest.mark.parametrize("hidden", [0, 8])
def test_points_are_refined(engine, hidden):
    subpixel, fine, _, matches = refinement_case(hidden=hidden)
    points = 0.4 * rand(3, len(matches.pair), 2) + fine[0].coordinates(matches.index0)
    inputs = subpixel, fine, matches.pair, points, matches.index1, matches.score0
    found, expected = run(engine, "refine_points", *inputs), REFERENCE.refine_points(*inputs)
    assert torch.allclose(found.offset, expected.offset, atol=1e-4)
    assert torch.allclose(found.logit, expected.logit, atol=1e-3)


@pytest.mark.parametrize("channels", [96, 16, 5])
def test_windows(engine, channels):
    _, fine, _, matches = refinement_case(channels=channels)
    inputs = *fine, matches.pair, matches.index0, matches.index1
    found, expected = run(engine, "windows", *inputs), REFERENCE.windows(*inputs)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), other.double(), atol=1e-5)
    assert not found.whole0.all() and found.whole0.any()


@pytest.mark.parametrize(("height", "width", "share"), [(20, 28, 0.5), (7, 5, 1.0), (1, 30, 0.5), (40, 3, 0.05)])
def test_support(engine, height, width, share):
    random = torch.Generator().manual_seed(1)
    cells = (torch.rand(2 * height * width, generator=random) < share).nonzero()[:, 0]
    pair, index = cells // (height * width), cells % (height * width)
    here = torch.stack([index % width, index // width], 1) + 0.2 * rand(1, len(index), 2)
    there = here @ torch.tensor([[0.9, 0.3], [-0.2, 1.1]]) + 0.15 * rand(2, len(index), 2)
    there[::7] = 10 * rand(3, len(there[::7]), 2)  # far off
    matches = DirectedMatches(index, here, there, rand(4, len(index)).sigmoid(), pair, (2, height, width))
    found, expected = run(engine, "support", matches), REFERENCE.support(matches)
    assert torch.allclose(found.share.double(), expected.share.double(), atol=2e-3)
    # If neighbors lie nearly on a line, rounding determines most of their motion.
    for mine, other in ((found.motion, expected.motion), (found.shift, expected.shift)):
        error = (mine.double() - other).abs() / other.abs().clamp(min=1)
        assert (error < 1e-3).double().mean() > 0.95 and torch.isfinite(mine).all()


SIZE = 90
MOTION = torch.tensor([[0.95, 0.15], [-0.1, 1.05]])
SHIFT = torch.tensor([6.3, -2.6])


def surface(motion=None, shift=None, seed=0):
    """Return an infinite smooth surface, sampled where the motion leads from image 0: (1 h w)."""
    axis = torch.arange(SIZE, dtype=torch.float32)
    there = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    if motion is not None:
        there = (there - shift) @ torch.linalg.inv(motion).T
    random = torch.Generator().manual_seed(seed)
    waves = torch.randn(40, 2, generator=random) * 0.25
    phases, heights = 7 * torch.rand(40, generator=random), torch.randn(40, generator=random)
    x, y = there.unbind(-1)
    return sum(h * torch.sin(a * x + b * y + p) for (a, b), p, h in zip(waves, phases, heights, strict=True))[None]


def test_alignment(engine):
    points0 = torch.rand(50, 2, generator=torch.Generator().manual_seed(3)) * 90 - 2
    points1 = points0 @ MOTION.T + SHIFT + 0.6 * rand(4, 50, 2)
    motion = MOTION + 0.03 * rand(5, 50, 2, 2)
    motion[:3] = torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])
    inputs = surface().repeat(2, 1, 1), surface(MOTION, SHIFT).repeat(2, 1, 1), torch.arange(50) % 2
    inputs = *inputs, points0, points1, motion
    found, expected = run(engine, "align", *inputs), REFERENCE.align(*inputs)
    assert 10 < (expected != 0).any(1).sum() < 45
    assert ((found - expected).norm(dim=1) < 2e-3).float().mean() >= 0.95


def test_points_move_to_where_the_images_fit_and_stay_where_that_cannot_be_told(engine, request):
    only_on_gpu(engine, request)
    points0 = 30 + 30 * torch.rand(40, 2, generator=torch.Generator().manual_seed(3))
    true = points0 @ MOTION.T + SHIFT
    wrong = true + 0.7 * torch.nn.functional.normalize(rand(4, 40, 2))
    pair, motion = torch.zeros(40, dtype=torch.long), MOTION.expand(40, 2, 2)

    def align(light0, light1, motion=motion):
        return wrong + run(engine, "align", light0, light1, pair, points0, wrong, motion)

    there = surface(MOTION, SHIFT)
    error = (align(surface(), there) - true).norm(dim=1)
    assert error.median() < 0.25  # by a single step
    lit = 0.3 * there + 2 + 0.02 * rand(5, 1, SIZE, SIZE)  # another gain and level, and noise
    assert (align(surface(), lit) - true).norm(dim=1).median() < 0.3
    flat = torch.ones_like(there)
    for light0, light1 in ((flat, flat), (surface(), flat), (flat, there), (surface(), surface(seed=1))):
        assert ((align(light0, light1) - wrong).norm(dim=1) > 0).float().mean() < 0.15
    for bad in (motion * 0, motion * 9, motion * float("nan"), motion @ torch.tensor([[-1.0, 0], [0, 1]])):
        assert torch.equal(align(surface(), there, bad), wrong)


# A complete match


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_whole_match(engine, share, request):
    only_on_gpu(engine, request)
    network = tiny_network(subpixel_hidden=8, query_share=share)
    wide = torch.from_numpy(texture(3, 96, 80)).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        features = [network.extract(wide[:, :, :64, :80]), network.extract(wide[:, :, 16:, 6:70])]
        expected = network.match(*features)
        network = place(engine, network)
        network.engine = engine
        there = [
            Features(**{name: place(engine, value) for name, value in vars(f).items() if value is not None})
            for f in features
        ]
        # A graph is captured and replayed.
        matches = [network.match(*there) for _ in range(4 if engine.name.endswith("graphs") else 1)]
    assert len(expected.scores) > 15
    for found in matches:
        assert len(found.scores) == len(expected.scores)
        rows, wanted = (torch.cat([m.points0, m.points1], 1).cpu() for m in (found, expected))
        near = (rows[:, None] - wanted).abs().amax(2).amin(1)
        assert (near < 0.01).float().mean() > 0.97 and (near < 3).all()
        assert torch.allclose(found.scores.cpu(), expected.scores, atol=1e-3)


def test_gradients_flow_through_the_definition_alone(engine):
    maps = tuple(f.clone().requires_grad_() for f in coarse_maps(1, (2, 2), (2, 3)))
    consensus = place(engine, consensus_of((8, 1)).requires_grad_(True))
    result = engine.coarse(tuple(place(engine, f) for f in maps), consensus, NOTHING)
    result.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in consensus.parameters())
    assert maps[0].grad is not None and maps[0].grad.any()


# The reference itself


def test_reference_convolution_is_plain_loops():
    values, weight, bias = rand(0, 2, 2, 2, 2, 3), rand(1, 3, 2, 3, 3, 3, 3), rand(2, 3)
    result = formulas.conv4d(values, weight, bias)
    v, w = values.tolist(), weight.tolist()
    for o, i, j, k, m in itertools.product(*map(range, result.shape)):
        total = bias[o].item()
        for c, p, q, r, s in itertools.product(range(2), *[range(3)] * 4):
            spot = (i + p - 1, j + q - 1, k + r - 1, m + s - 1)
            if all(0 <= at < side for at, side in zip(spot, values.shape[1:], strict=True)):
                total += w[o][c][p][q][r][s] * v[c][spot[0]][spot[1]][spot[2]][spot[3]]
        assert result[o, i, j, k, m].item() == pytest.approx(total, abs=1e-4)


def test_reading_known_answers():
    tensor = torch.zeros(2, 3, 2, 3)
    for row, column in itertools.product(range(2), range(3)):
        tensor[row, column, row, column] = 1
    # Fine cell (2, 5) lies at (0.5, 1.25) by its corner, at (0.125, 0.875) by its center.
    assert formulas.coarse_scores(tensor, 5, 2, "corner").tolist() == [[0, 0.375, 0.125], [0, 0.375, 0.125]]
    center = formulas.coarse_scores(tensor, 5, 2, "center")
    assert center.flatten().tolist() == pytest.approx([0.875 / 8, 0.875**2, 0, 1 / 64, 0.875 / 8, 0])


# The choice of an engine


def test_engines_are_chosen_by_name_device_and_variable(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv(ops.VARIABLE, raising=False)
    assert ops.choose(cpu).name == next((name for name in ENGINES if name.startswith("native")), "torch")
    assert ops.choose(cpu, "torch").name == "torch" and ops.choose(torch.device("mps")).name == "torch"
    monkeypatch.setenv(ops.VARIABLE, "definition")
    assert ops.choose(cpu).name == "definition" and ops.choose(cpu, "reference").name == "reference"
    for wrong in ("nativ", "native-sse9", "cuda", ""):
        with pytest.raises(ConfigError, match=r"choose one of.*native-avx2"):
            ops.choose(cpu, wrong or "none")
    for name in ("native", "reference"):
        with pytest.raises(ConfigError, match=r"runs on a CPU.*leave the engine out"):
            ops.choose(torch.device("cuda"), name)
    monkeypatch.setenv(ops.VARIABLE, "reference")
    with pytest.raises(ConfigError, match=f"unset {ops.VARIABLE}"):
        ops.choose(torch.device("cuda"))
    with pytest.raises(ConfigError, match="needs Triton"):
        ops.choose(cpu, "triton+graphs")


def test_graphs_pass_every_operation_that_they_do_not_capture_to_their_engine():
    inner = ops.choose(torch.device("cpu"), "torch")
    engine = GraphEngine(inner)
    operations = {name for name in vars(Engine) if not name.startswith("_") and name != "name"}
    captured = {"extract", "context", "coarse", "search", "refine"}
    assert operations > captured and engine.name == "torch+graphs"
    assert {name for name in operations if getattr(engine, name) == getattr(inner, name)} == operations - captured


@torch.inference_mode()
def test_graphs_are_captured_when_a_shape_has_repeated_often(monkeypatch):
    engine, replayed = GraphEngine(ops.choose(torch.device("cpu"), "torch")), []
    monkeypatch.setattr(engine, "_replayed", lambda key, function, *tensors: replayed.append(key) or function(*tensors))

    def double(pixels):
        return (2 * pixels,)

    for call in range(1, 10):
        for width in (4, 5):
            assert torch.equal(engine.extract(double, torch.ones(1, width))[0], torch.full((1, width), 2.0))
        assert len(replayed) == 2 * max(0, call - graphs._SEEN)
    engine.extract(double, torch.ones(1, 6))
    assert len(replayed) == 2 * (9 - graphs._SEEN)
    # Benchmarks time replays.
    assert measure.warm_ups(torch.device("cuda")) > graphs._SEEN


@torch.inference_mode()
def test_a_shape_is_captured_if_it_recurs_among_as_many_shapes_as_there_are_graphs():
    engine, inputs = GraphEngine(ops.choose(torch.device("cpu"), "torch")), (torch.zeros(1),)
    seen = graphs._SEEN
    assert [engine._repeats(("own",), inputs) for _ in range(seen + 2)] == [False] * seen + [True, True]
    # The search over views has many shapes that do not recur soon.
    for _ in range(seen + 2):
        assert not any(engine._repeats(("view", number), inputs) for number in range(graphs._KEPT + 1))
    assert not engine._repeats(("own",), inputs)


@pytest.mark.parametrize("name", ["reference", *(name for name in ENGINES if not name.startswith("triton"))])
def test_every_call_of_a_matcher(name):
    """Images of a few cells, so that the reference can take part."""
    matcher, image = tiny_matcher(engine=name), texture(2, 80, 64)
    pair = image[:48, :48], image[4:52, 8:56]
    found, expected = matcher.match(*pair), tiny_matcher(engine="definition").match(*pair)
    assert matcher.engine == name and len(found) == len(expected) > 5
    assert abs(found.scores - expected.scores).max() < 1e-3
    points = matcher.match_points(*pair, [[20.0, 20.0], [30.5, 25.0]])
    assert points.points1.shape == (2, 2)
    warp = matcher.warp(*pair)
    assert warp.points1.shape == (48, 48, 2) and 0 <= warp.certainty.min() <= warp.certainty.max() <= 1


def test_features_can_be_copied_between_engines():
    """Features do not depend on the engine that made them."""
    network = tiny_network()
    assert features_of(network, texture(1, 64, 48)).fine.shape == (1, 16, 12, 16)
