"""The GPU kernels against the plain definitions: on a GPU where there is one, else in Triton's interpreter."""

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import rand, texture, tiny_network

from dualrc.config import ConsensusConfig
from dualrc.kernels import consensus as fast
from dualrc.kernels import refine as fast_refine
from dualrc.kernels import search as fast_search
from dualrc.model import dualrc as assembly
from dualrc.model import literal, trace
from dualrc.model.align import align
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import mutual_filter, normalize
from dualrc.model.dualrc import Features
from dualrc.model.fine import FineMap, Found, cell_queries, search
from dualrc.model.subpixel import cell_windows, cells_meet, meet
from dualrc.model.support import support

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = {"float32": (torch.float32, 1e-5), "float16": (torch.float16, 4e-3)}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Without a GPU, kernels run in Python."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def make(channels: int, sizes=(3, 3)) -> Consensus:
    """Random kernels, symmetric in nothing, and biases that bring ReLU and the border into play."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=(channels, 1)))
    for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape)
    consensus.biases[-1].data.abs_()  # or half of the results would be zero
    return consensus.requires_grad_(False)


def on_device(consensus: Consensus) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [weight.to(DEVICE) for weight in consensus.weights], [bias.to(DEVICE) for bias in consensus.biases]


def by_definition(consensus: Consensus, scores: torch.Tensor) -> torch.Tensor:
    """Consensus.forward might use the kernels itself."""
    weights, biases = list(consensus.weights), list(consensus.biases)
    return torch.stack([literal.consensus(pair, weights, biases) for pair in scores.float()])


def check_consensus(consensus: Consensus, scores: torch.Tensor, tolerance: float, max_values: int | None = None):
    weights, biases = on_device(consensus)
    assert fast.supported(scores.to(DEVICE), weights)
    expected = by_definition(consensus, scores)
    found = fast.consensus(scores.to(DEVICE), weights, biases, max_values).cpu()
    assert found.dtype == scores.dtype and found.shape == scores.shape
    assert expected.abs().max() > 0.1
    assert torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", fast.CHANNELS)
def test_consensus_is_the_plain_one(kind, channels):
    dtype, tolerance = KINDS[kind]
    check_consensus(make(channels), rand(1, 2, 2, 3, 3, 5).to(dtype), tolerance)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 3, 2, 1, 70), (1, 2, 1, 5, 2), (1, 1, 40, 2, 3)], ids=str)
def test_consensus_of_odd_shapes(shape):
    check_consensus(make(16), rand(2, *shape), 1e-5)


@pytest.mark.parametrize("max_values", [1, 1300, 2200, 3300])
def test_consensus_in_slabs(max_values):
    """Rows of both pictures one at a time, two at a time, and unevenly."""
    check_consensus(make(8), rand(3, 1, 5, 1, 3, 3), 1e-5, max_values)


def test_walks_that_meet():
    """Long rows are walked by several programs, which must agree at their ends."""
    consensus, scores = make(16), rand(4, 1, 1, 2, 9, 3)
    expected = by_definition(consensus, scores)
    prepared = fast.prepare(*on_device(consensus), torch.float32)
    for steps in (1, 2, 5):
        found = fast.apply(scores.to(DEVICE), prepared, tiles=fast.Tiles(steps=steps)).cpu()
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_accumulators_in_turn():
    """The walk does not depend on how it is unrolled."""
    consensus, scores = make(16), rand(4, 1, 1, 2, 5, 3).half()
    expected = by_definition(consensus, scores)
    prepared = fast.prepare(*on_device(consensus), torch.float16)
    for unroll in (1, 2, 3):
        found = fast.apply(scores.to(DEVICE), prepared, tiles=fast.Tiles(unroll=unroll)).cpu()
        assert torch.allclose(found.float(), expected, rtol=4e-3, atol=4e-3)


def test_the_plan_covers_everything_once_and_keeps_to_its_limit():
    shapes = [(1, 75, 100, 75, 100), (32, 30, 40, 30, 40), (1, 150, 200, 150, 200), (3, 2, 5, 7, 3), (2, 1, 1, 1, 1)]
    for shape in shapes:
        batch, h0, w0, h1, w1 = shape
        for limit in (1, 10**6, 2**29, 2**34):
            seen = torch.zeros(batch, h1, dtype=torch.int)
            for slab in fast.plan(shape, 2, limit):
                seen[slab.pairs.start : slab.pairs.stop, slab.region.start : slab.region.stop] += 1
                values = slab.slots * fast.SHARES * len(slab.region) * fast.pitch(w0, w1)
                assert 1 <= slab.rows <= h0 and (slab.slots == h0 or slab.slots >= slab.rows + 2)
                assert values // slab.slots < 2**31
                least = len(slab.region) == 1 and slab.slots == min(h0, 3) and len(slab.pairs) == 1
                assert 2 * values * len(slab.pairs) <= limit or least
            assert (seen == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_mutual_filter_is_the_plain_one(kind):
    dtype, tolerance = KINDS[kind]
    scores = rand(5, 2, 2, 3, 2, 4).abs().to(dtype)
    expected = mutual_filter(scores.float())
    there = scores.to(DEVICE)
    assert torch.allclose(fast.mutual_filter(there).cpu().float(), expected, rtol=tolerance, atol=tolerance)
    consensus = make(8)
    prepared = fast.prepare(*on_device(consensus), dtype)
    found = fast.apply(there, prepared, maxima=fast.maxima_of(there)).cpu()
    expected = by_definition(consensus, expected)
    assert torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_what_is_not_supported(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    scores = rand(0, 1, 2, 2, 2, 2)
    assert fast.supported(scores, list(make(16).weights))
    assert not fast.supported(scores.double(), list(make(16).weights))
    assert not fast.supported(scores, list(make(10).weights))
    assert not fast.supported(scores, list(make(16, sizes=(5, 3)).weights))
    assert not fast.supported(scores, list(make(16).requires_grad_(True).weights))
    with torch.no_grad():
        assert fast.supported(scores, list(make(16).requires_grad_(True).weights))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not fast.supported(scores, list(make(16).weights))  # a tensor of the CPU


def test_nothing_of_triton_is_imported_with_the_package():
    code = (
        "import sys, dualrc; from dualrc.kernels import consensus, refine, search; assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def case(kind: str, seed: int, shape0, shape1, *, batch=1, channels=20, dtype=torch.float32, masked=False):
    """A coarse tensor (b n m) and the fine features of both pictures."""
    count0, count1 = shape0[0] * shape0[1], shape1[0] * shape1[1]
    if kind == "flat":
        tensor = 0.9 + 0.1 * rand(seed, batch, count0, count1).sigmoid()
    elif kind == "sparse":  # many zeros, whole rows of them too
        tensor = (rand(seed, batch, count0, count1) - 1.5).clamp(min=0)
    else:  # a peak in every row
        noise = rand(seed, batch, count0, count1)
        tensor = torch.where(noise == noise.amax(2, keepdim=True), 1.0, 0.003 * noise.abs())
    fines = []
    for side, (height, width) in enumerate((shape0, shape1)):
        features = normalize(0.3 + rand(seed + side + 1, batch, channels, 4 * height, 4 * width)).to(dtype)
        valid = rand(seed + 5, batch, 4 * height, 4 * width) > 0.8 if masked and side == 1 else None
        fines.append(FineMap.of(features, valid))
    return tensor, fines[0], fines[1]


def map_on_device(fine: FineMap) -> FineMap:
    valid = None if fine.valid is None else fine.valid.to(DEVICE)
    return replace(fine, features=fine.features.to(DEVICE), valid=valid)


def both_searches(tensor, fine0, fine1, cells, *, reading, temperature=0.0, k=8, wanted=None, tiles=None):
    """The kernels' answers, and those of the plain search."""
    excess = {torch.float32: 1e-5, torch.float16: 4e-3}[fine0.features.dtype]
    there0, there1 = map_on_device(fine0), map_on_device(fine1)
    assert fast_search.supported(there0, there1)
    settings = {"excess": excess, "wanted": None if wanted is None else wanted.to(DEVICE), "tiles": tiles}
    found = fast_search.search_cells(
        tensor.to(DEVICE), cells.to(DEVICE), there0, there1, reading, temperature, k, **settings
    )
    found = fast_search.Answers(**{name: values.cpu() for name, values in vars(found).items()})
    queries = replace(cell_queries(fine0, cells, reading), wanted=wanted)
    return found, search(tensor.float(), queries, fine1, temperature=temperature, max_values=10**9)


def assert_answers(found: fast_search.Answers, expected: Found):
    assert torch.equal(found.index, expected.index)
    assert torch.allclose(found.score, expected.score, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reading", ["corner", "center"])
@pytest.mark.parametrize("kind", ["peaked", "sparse", "flat"])
def test_search_is_the_plain_one(reading, kind):
    tensor, fine0, fine1 = case(kind, 1, (2, 3), (9, 8), batch=2)  # two blocks of candidates
    cells = torch.tensor([0, 4, 5, 6, 11])  # of both pairs
    found, expected = both_searches(tensor, fine0, fine1, cells, reading=reading)
    assert_answers(found, expected)
    assert (expected.index >= 0).any()
    if kind == "flat":  # nothing can be left out
        assert (found.visited == 72).all()
    else:
        assert (found.visited < 30).all() and (found.visited == 8).any()


@pytest.mark.parametrize("reading", ["corner", "center"])
@pytest.mark.parametrize(("temperature", "masked"), [(0.0, False), (0.1, True)])
def test_search_among_few_cells(reading, temperature, masked):
    tensor, fine0, fine1 = case("sparse", 2, (2, 2), (2, 4), channels=7, masked=masked)
    settings = {"reading": reading, "temperature": temperature}
    found, expected = both_searches(tensor, fine0, fine1, torch.arange(4), **settings)
    assert (found.visited == 8).all()
    assert_answers(found, expected)
    if masked:
        assert fine1.valid is not None and fine1.valid[0][found.index[found.index >= 0]].all()
    if reading == "corner":
        assert found.index[0, 0] == -1 and found.score[0, 0] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_how_the_work_is_cut_does_not_matter(temperature):
    tensor, fine0, fine1 = case("sparse", 3, (2, 2), (12, 12), channels=9, masked=True)
    for k, abreast, parts in ((1, 1, 1), (2, 2, 3), (8, 4, 2), (16, 1, 4)):
        tiles = fast_search.Tiles(abreast=abreast, parts=parts)
        settings = {"temperature": temperature, "k": k, "tiles": tiles}
        found, expected = both_searches(tensor, fine0, fine1, torch.arange(4), reading="center", **settings)
        assert_answers(found, expected)
        assert (found.visited >= k).all() and (found.visited > 8).any()


def test_search_takes_few_candidates_and_no_cells():
    tensor, fine0, fine1 = case("peaked", 3, (1, 2), (1, 3))
    for k in (1, 2, 8):
        found, expected = both_searches(tensor, fine0, fine1, torch.arange(2), reading="center", k=k)
        assert_answers(found, expected)
    found, _ = both_searches(tensor, fine0, fine1, torch.arange(0), reading="center")
    assert found.index.shape == (0, 16)


def test_only_what_is_wanted_is_searched_for_further():
    tensor, fine0, fine1 = case("flat", 7, (2, 2), (5, 8))
    wanted = torch.zeros(4, 16, dtype=torch.bool)
    wanted[1, 3] = wanted[3] = True
    found, expected = both_searches(tensor, fine0, fine1, torch.arange(4), reading="center", wanted=wanted)
    assert torch.equal(found.index[wanted], expected.index[wanted])
    assert (found.visited[[0, 2]] == 8).all() and (found.visited[[1, 3]] > 8).all()


def test_a_mask_hides_the_best_cell():
    tensor, fine0, fine1 = case("peaked", 4, (1, 2), (9, 8), masked=True)
    best = tensor[0, 0].argmax()
    fine1.valid[0, fine1.members(best)] = False
    found, expected = both_searches(tensor, fine0, fine1, torch.arange(2), reading="corner")
    assert_answers(found, expected)
    assert not torch.isin(fine1.split(found.index[0])[0], best).any()


def test_among_equals_the_first_wins():
    tensor, fine0, _ = case("peaked", 5, (1, 2), (9, 8), channels=4)
    # Four halves have length 1, and their products are exact.
    same = FineMap.of(torch.full((1, 4, 36, 32), 0.5))
    fine0 = replace(fine0, features=torch.full_like(fine0.features, 0.5))
    found, expected = both_searches(torch.ones_like(tensor), fine0, same, torch.arange(2), reading="center")
    assert (found.index == 0).all() and torch.equal(found.index, expected.index)


def test_search_in_half_precision():
    tensor, fine0, fine1 = case("peaked", 6, (2, 2), (5, 8), channels=70, dtype=torch.float16)
    found, _ = both_searches(tensor.half(), fine0, fine1, torch.arange(4), reading="center")
    exact0, exact1 = (
        FineMap.of(f.features.float().movedim(2, 1).unflatten(2, (4 * f.height, -1))) for f in (fine0, fine1)
    )
    _, expected = both_searches(tensor.half(), exact0, exact1, torch.arange(4), reading="center")
    assert torch.equal(found.index, expected.index)
    assert torch.allclose(found.score, expected.score, rtol=1e-3)


def refinement_case(dtype=torch.float32):
    """Matches of two small pictures of a batch of two, some at borders, some missing."""
    features = [normalize(0.3 + rand(n, 2, 40, 24, 28)).to(dtype) for n in (0, 1)]
    index0 = torch.randperm(24 * 28, generator=torch.Generator().manual_seed(0))[:200]
    index1 = torch.randperm(24 * 28, generator=torch.Generator().manual_seed(1))[:200]
    index0[:2], index1[:2] = torch.tensor([0, 671]), torch.tensor([27, 5])
    return [FineMap.of(f) for f in features], index0, index1, torch.arange(200) % 2


@pytest.mark.parametrize("kind", KINDS)
def test_cosines_around_matches_are_the_plain_ones(kind):
    dtype, _ = KINDS[kind]
    fine, index0, index1, pair = refinement_case(dtype)
    expected = meet(cell_windows(fine[0], pair, index0), cell_windows(fine[1], pair, index1))
    there = [value.to(DEVICE) for value in (pair, index0, index1)]
    found = cells_meet(*(map_on_device(f) for f in fine), *there)
    for mine, plain in zip(found, expected, strict=True):
        assert mine.dtype == plain.dtype and torch.allclose(mine.cpu().float(), plain.float(), atol=1e-5)


@pytest.mark.parametrize(("share", "tolerance"), [(1.0, 1e-4), (0.15, 0.02)])
def test_support_by_kernels_is_the_plain_one(share, tolerance, monkeypatch):
    """Where few are matched, some have one neighbour alone, and what that tells of their motion is a rounding error."""
    index = torch.arange(2 * 24 * 28)[torch.rand(2 * 24 * 28, generator=torch.Generator().manual_seed(0)) < share]
    pair, index = index // (24 * 28), index % (24 * 28)
    here = torch.stack([index % 28, index // 28], 1) + 0.2 * rand(3, len(index), 2)
    there = here @ torch.tensor([[0.9, 0.2], [-0.1, 1.1]]) + 0.3 * rand(4, len(index), 2)
    columns = index, here, there, rand(5, len(index)).sigmoid(), pair
    found = support(*(column.to(DEVICE) for column in columns), (2, 24, 28))
    monkeypatch.setattr(fast_refine, "supported", lambda *tensors: False)
    expected = support(*columns, (2, 24, 28))
    assert expected[0].max() > 0.05
    for mine, plain in zip(found, expected, strict=True):
        assert torch.allclose(mine.cpu(), plain, rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_alignment_by_kernels_is_the_plain_one(kind, monkeypatch):
    dtype, _ = KINDS[kind]
    smooth = [torch.nn.functional.avg_pool2d(rand(n, 2, 1, 110, 130), 7, stride=1)[:, 0].to(dtype) for n in (0, 0)]
    points0 = torch.rand(101, 2, generator=torch.Generator().manual_seed(2)) * torch.tensor([123.0, 103.0])
    points1, pair = points0 + 0.6 * rand(3, 101, 2), torch.arange(101) % 2
    motion = torch.eye(2) + 0.05 * rand(4, 101, 2, 2)
    motion[:3] = torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])
    columns = *smooth, pair, points0, points1, motion
    found = align(*(column.to(DEVICE) for column in columns)).cpu()
    monkeypatch.setattr(fast_refine, "supported", lambda *tensors: False)
    expected = align(*columns)
    assert (expected != points1).any(1).float().mean() > 0.3
    assert torch.allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_whole_match_by_kernels_is_the_plain_one(share, monkeypatch):
    network = tiny_network(subpixel_hidden=8, query_share=share)
    wide = torch.from_numpy(texture(3, 96, 80)).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        plain = [network.extract(wide[:, :, :64, :80]), network.extract(wide[:, :, 16:, 6:70])]
        for module in (fast, fast_search, fast_refine, assembly):
            monkeypatch.setattr(module, "usable", lambda tensor: False)
        expected = network.match(*plain)
        monkeypatch.undo()
        if DEVICE == "cpu":
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        there = [
            Features(**{name: value.to(DEVICE) for name, value in vars(f).items() if value is not None}) for f in plain
        ]
        with trace.recording() as seen:
            found = network.to(DEVICE).match(*there)
    assert seen.notes["kernel.search"] == ["triton"] and len(expected.scores) > 15
    rows, wanted = (
        torch.cat([m.points0, m.points1], 1).cpu()[m.points0.cpu()[:, 0].argsort(stable=True)]
        for m in (found, expected)
    )
    assert torch.allclose(rows, wanted, atol=0.01)
    assert torch.allclose(found.scores.cpu(), expected.scores, atol=1e-4)


COMPILE = """
import importlib, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, pointers = sys.argv[1:]
function = getattr(importlib.import_module(f"dualrc.kernels.{module}"), name)
known = dict(
    FILTERED=True, POSITIONS=64, HIDDEN=32, UNROLL=3, PRECISION="ieee", CORNER=False, MASKED=True, BLOCK=64,
    AT_ONCE=16, BLOCKS=128, VISITED=8, TAKEN=16, SHARP=True, CHANNELS=64, SOME=True, ABREAST=4, PARTS=4,
    STEP=2, REACH=12, SHARPNESS=8.0, DOUBT=4.0, MATCHES=2, NEIGHBOURS=64, ROUNDS=2, DAMPING=0.01, LONGEST=1.0,
    FARTHEST=3.0, LEAST=0.5, GAIN=1e-4, LARGEST=16.0, PLACES=256,
)
types = {}
for group in pointers.split("; "):
    arguments, kind = group.split(": ")
    types.update(dict.fromkeys(arguments.split(), kind))
constants = {key: known[key] for key in function.arg_names if key in known}
signature = {key: "constexpr" if key in constants else types.get(key, "i32") for key in function.arg_names}
source = ASTSource(fn=function, signature=signature, constexprs=constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "pointers", "product"),
    [
        ("consensus_jit", "lay_out", "scores best0 best1 padded: *fp16", None),
        ("consensus_jit", "contribute", "padded shares weight1 weight2: *fp16; bias1: *fp32", "wgmma"),
        ("consensus_jit", "collect", "shares results: *fp16; bias2: *fp32", None),
        ("consensus_jit", "filter_scores", "scores best0 best1 results: *fp16", None),
        ("search_jit", "block_maxima", "coarse: *fp16; sums maxima: *fp32; cells: *i64; usable: *u8", None),
        (
            "search_jit",
            "choose",
            "coarse: *fp16; sums maxima rest: *fp32; cells: *i64; usable: *u8; chosen: *i32",
            None,
        ),
        (
            "search_jit",
            "score_cells",
            "coarse query searched: *fp16; sums rest: *fp32; cells best: *i64; chosen: *i32; valid: *u8; "
            "wanted unsure: *i8; temperature slack: fp32",
            "mma.sync",
        ),
        (
            "search_jit",
            "look_further",
            "coarse query searched: *fp16; sums maxima: *fp32; cells best: *i64; chosen visited: *i32; "
            "usable valid: *u8; unsure: *i8; temperature slack: fp32",
            "mma.sync",
        ),
        (
            "refine_jit",
            "window_products",
            "features0 features1: *fp16; pair index0 index1: *i64; result: *fp32",
            "mma.sync",
        ),
        ("refine_jit", "explain", "maps known share motion: *fp32; at: *i64", None),
        (
            "refine_jit",
            "fit_windows",
            "light0 light1: *fp16; pair: *i64; points0 points1 motion result: *fp32",
            None,
        ),
    ],
)
def test_kernels_compile_for_a_gpu(module, name, pointers, product, monkeypatch):
    """As for an H100 or H200, without one; the products go to its tensor cores. The interpreter spoils a process."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-c", COMPILE, module, name, pointers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {kind for kind in ("wgmma", "mma.sync") if kind in done.stdout} == ({product} if product else set())
