"""Tests of Triton's kernels beyond the operations: plans, partition of the work, launches, code for GPUs."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, rand, tiny_network

from dualrc.config import PRESETS, ConsensusConfig, FineConfig
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import mutual_filter, normalize
from dualrc.model.dualrc import make_network
from dualrc.model.refine import CellMatches
from dualrc.ops import triton as triton_engine
from dualrc.ops.triton import TritonEngine, consensus, launch, search
from dualrc.ops.triton import refine as refine_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def make(channels: int) -> Consensus:
    """Return random kernels without symmetry, and biases for which ReLU and the border matter."""
    module = Consensus(ConsensusConfig(kernel_sizes=(3, 3), channels=(channels, 1)))
    for number, (weight, bias) in enumerate(zip(module.weights, module.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape)
    return module.requires_grad_(False)


def prepared(module: Consensus, dtype: torch.dtype) -> consensus.Prepared:
    weights, biases = [w.to(DEVICE) for w in module.weights], [b.to(DEVICE) for b in module.biases]
    return consensus.prepare(weights, biases, dtype)


# The consensus


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_walks_that_meet(steps, monkeypatch):
    """Several programs process a long row, and must agree at their ends."""
    module, scores = make(16), rand(4, 1, 1, 2, 9, 3)
    monkeypatch.setattr(consensus, "_steps", lambda rows, programs: steps)
    found = consensus.apply(scores.to(DEVICE), prepared(module, torch.float32))
    assert torch.allclose(found.cpu(), module(scores), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_accumulators_in_turn(unroll, monkeypatch):
    """The result does not depend on the unrolling."""
    module, scores = make(16), rand(4, 1, 1, 2, 5, 3).half()
    monkeypatch.setitem(consensus._UNROLL, torch.float16, unroll)
    found = consensus.apply(scores.to(DEVICE), prepared(module, torch.float16))
    assert torch.allclose(found.cpu().float(), module(scores.float()), rtol=4e-3, atol=4e-3)


def test_the_plan_covers_everything_once_and_keeps_to_its_limit():
    shapes = [(1, 75, 100, 75, 100), (32, 30, 40, 30, 40), (1, 150, 200, 150, 200), (3, 2, 5, 7, 3), (2, 1, 1, 1, 1)]
    for shape in shapes:
        batch, h0, w0, h1, w1 = shape
        for limit in (1, 10**6, 2**29, 2**34):
            seen = torch.zeros(batch, h1, dtype=torch.int)
            for slab in consensus.plan(shape, 2, limit):
                seen[slab.pairs.start : slab.pairs.stop, slab.region.start : slab.region.stop] += 1
                values = slab.slots * consensus.SHARES * len(slab.region) * consensus.pitch(w0, w1)
                assert 1 <= slab.rows <= h0 and (slab.slots == h0 or slab.slots >= slab.rows + 2)
                assert values // slab.slots < 2**31
                least = len(slab.region) == 1 and slab.slots == min(h0, 3) and len(slab.pairs) == 1
                assert 2 * values * len(slab.pairs) <= limit or least
            assert (seen == 1).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize(("size0", "size1"), [((2, 3), (9, 16)), ((1, 1), (5, 1))])
def test_correlation_with_maxima_of_either_sign(dtype, tolerance, size0, size1):
    """Rows without a positive score have a maximum too."""
    maps = [rand(n, 2, 20, *size).to(dtype) for n, size in enumerate((size0, size1))]
    maps[1].abs_()
    maps[0][0, :, 0, 0] = -1
    scores, best, last = consensus.correlate(*(m.to(DEVICE) for m in maps), (None, None), dtype)
    unit0, unit1 = (normalize(m.float()).flatten(2) for m in maps)
    expected = torch.einsum("bcn,bcm->bnm", unit0, unit1)
    flat = scores.cpu().float().flatten(3).flatten(1, 2)
    assert torch.allclose(flat, expected, atol=tolerance)
    for maxima, own in ((best.best0, flat.amax(1)), (best.best1, flat.amax(2))):
        assert torch.equal(maxima.cpu()[: own.numel()], own.flatten())
    assert flat[0, 0].amax() < 0
    positive = scores.abs()
    filtered = mutual_filter(positive.cpu().float())
    assert torch.allclose(consensus.mutual_filter(positive, last).cpu().float(), filtered, rtol=tolerance, atol=1e-3)


# The search


def search_case(shape0, shape1, channels=9, dtype=torch.float32):
    tensor = (rand(3, 1, shape0[0] * shape0[1], shape1[0] * shape1[1]) - 1.5).clamp(min=0)
    maps = [normalize(rand(n, 1, channels, 4 * h, 4 * w)).to(dtype) for n, (h, w) in enumerate((shape0, shape1))]
    return tensor.to(DEVICE), *(FineMap.of(features.to(DEVICE)) for features in maps)


def test_how_the_work_is_cut_does_not_matter(monkeypatch):
    tensor, fine0, fine1 = search_case((1, 1), (9, 9))
    tensor = tensor + 2  # so that one cell promises hardly more than another
    cells = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    found = []
    for k, abreast, parts in ((1, 1, 1), (2, 2, 3), (8, 4, 2)):
        monkeypatch.setattr(search, "FIRST_BLOCK", k)
        monkeypatch.setattr(search, "_ABREAST", abreast)
        monkeypatch.setattr(search, "_PARTS", parts)
        found.append(search.search_cells(tensor, (fine0, fine1), cells, FineConfig()))
        assert (found[-1].visited >= k).all() and (found[-1].visited > 8).any()
    for other in found[1:]:
        assert torch.equal(other.best, found[0].best) and torch.allclose(other.score, found[0].score)


def test_blocks_of_candidates_are_compared_in_parts(monkeypatch):
    """Images with more than 8192 coarse cells need several parts."""
    tensor, fine0, fine1 = search_case((1, 1), (12, 12))
    cells = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    expected = search.search_cells(tensor, (fine0, fine1), cells, FineConfig())
    monkeypatch.setattr(search, "_BLOCKS", 2)
    found = search.search_cells(tensor, (fine0, fine1), cells, FineConfig())
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


# Launches


def test_inputs_that_are_not_aligned():
    """Views into other tensors give the results of their copies."""
    tensor, fine0, fine1 = search_case((2, 2), (2, 3), channels=5)

    def shifted(x):
        memory = x.new_zeros(x.numel() + 1)
        memory[1:] = x.flatten()
        return memory[1:].view(x.shape)

    moved = [replace(fine, features=shifted(fine.features)) for fine in (fine0, fine1)]
    expected = search.search_both(tensor, fine0, fine1, FineConfig())
    found = search.search_both(shifted(tensor), *moved, FineConfig())
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    x = torch.zeros(9)[1:]
    assert launch.readable(x) is not x and launch.readable(x.clone()).data_ptr() % 16 == 0


def test_a_compiled_kernel_is_called_directly(monkeypatch):
    """Triton's own launcher is used if types, devices or alignment differ, or if a direct call is impossible."""
    compiled, direct = [], []

    class Kernel:
        arg_names = ("x", "y", "count", "LAST", "FIRST")

        def __getitem__(self, grid):
            def run(*arguments, **options):
                compiled.append((grid, arguments, options))
                entry = SimpleNamespace(run=lambda *given: direct.append(given), function="f", packed_metadata="m")
                return entry if len(compiled) < 4 else SimpleNamespace()

            return run

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: "stream"))
    monkeypatch.setattr(launch, "import_module", lambda name: SimpleNamespace(kernel=Kernel(), driver=driver))
    launcher, grid = launch.Launcher("some_jit.kernel", FIRST=1, LAST=2, warps=8), (3, 1, 1)
    x, y = torch.zeros(8), torch.zeros(8)
    launcher(grid, x, y, 7)
    assert compiled == [(grid, (x, y, 7), {"FIRST": 1, "LAST": 2, "num_warps": 8, "num_stages": 3})]
    launcher(grid, x, y, 9)
    addresses = x.data_ptr(), y.data_ptr()
    assert len(compiled) == 1 and direct == [(*grid, "stream", "f", "m", None, None, None, *addresses, 9, 2, 1)]
    launcher(grid, x[1:], y, 7)
    launcher(grid, x, y.half(), 7)
    assert len(compiled) == 3 and len(direct) == 1
    launcher(grid, x, y.half(), 7)
    assert len(compiled) == 3 and len(direct) == 2


def test_weights_that_change_are_prepared_again():
    network = tiny_network(subpixel_hidden=8)
    subpixel = network.subpixel.requires_grad_(False).to(DEVICE)
    fine = FineMap.of(normalize(rand(0, 1, 16, 16, 16)).to(DEVICE))
    index, scores = torch.tensor([17, 20, 65], device=DEVICE), torch.full((3,), 0.5, device=DEVICE)
    matches = CellMatches(index * 0, index, index, scores, scores)
    engine = TritonEngine()
    before = engine.refine(subpixel, (fine, fine), None, matches)
    assert torch.equal(engine.refine(subpixel, (fine, fine), None, matches).scores, before.scores)
    subpixel.correction[-1].bias += torch.tensor([0.0, 0.0, 1.0], device=DEVICE)
    assert (engine.refine(subpixel, (fine, fine), None, matches).scores > before.scores).all()


def test_matches_that_lie_apart_in_memory():
    """Matches may be columns of one tensor."""
    network = tiny_network(subpixel_hidden=8)
    subpixel = network.subpixel.requires_grad_(False).to(DEVICE)
    fine = FineMap.of(normalize(rand(0, 1, 16, 16, 16)).to(DEVICE))
    table = torch.tensor([[0, 17, 18], [0, 40, 41], [0, 99, 99]], device=DEVICE)
    scores = torch.full((3, 2), 0.5, device=DEVICE)
    found, expected = (
        refine_kernels.refine(refine_kernels.prepare(subpixel), (fine, fine), None, CellMatches(*columns))
        for columns in (
            (*table.unbind(1), *scores.unbind(1)),
            tuple(column.contiguous() for column in (*table.unbind(1), *scores.unbind(1))),
        )
    )
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("fine", [{"subpixel_hidden": 8}, {"subpixel": False, "query_share": 0.5, "reading": "corner"}])
def test_the_warm_up_runs_every_kernel_of_a_match(fine, monkeypatch):
    """Kernels with and without masks run, and no others than those in the list of compiled kernels."""
    monkeypatch.setattr(triton_engine, "interpreted", lambda: False)
    launched, original = set(), launch.Launcher.__call__

    def call(self, *arguments):
        launched.add((self._name, self._constants.get("MASKED"), self._constants.get("EVERY")))
        original(self, *arguments)

    monkeypatch.setattr(launch.Launcher, "__call__", call)
    network = tiny_network(**fine).to(DEVICE)
    TritonEngine().warm_up(network, torch.float32)
    for masked in (False, True):
        for every in (True, False):
            assert {("block_maxima", masked, every), ("score_cells", masked, every)} <= launched
        assert ("mark", masked, network.config.fine.query_share == 1) in launched
    assert (("finish", None, None) in launched) == (network.subpixel is not None)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_no_size_compiles_after_the_warm_up(preset):
    from triton.runtime.jit import JITFunction

    from dualrc.model.dualrc import Features

    network = make_network(PRESETS[preset][0]).to(DEVICE)
    network.engine = engine = TritonEngine()
    network.backbone = engine.prepare(network.backbone.half().to(memory_format=torch.channels_last))
    engine.warm_up(network, torch.float16)
    compiled, original = [], JITFunction.run

    def run(self, *arguments, **options):
        before = {device: len(caches[0]) for device, caches in self.device_caches.items()}
        result = original(self, *arguments, **options)
        if {device: len(caches[0]) for device, caches in self.device_caches.items()} != before:
            compiled.append(self.__name__)
        return result

    fine, coarse = network.config.backbone.fine_channels, network.config.backbone.coarse_channels
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(JITFunction, "run", run)
        for number, (height, width) in enumerate([(2, 2), (1, 16), (3, 5), (16, 17), (30, 40)]):
            sides = [
                Features(
                    coarse=rand(number, 1, coarse, height, width).half().to(DEVICE),
                    fine=normalize(rand(number, 1, fine, 4 * height, 4 * width)).half().to(DEVICE),
                    light=rand(number, 1, 16 * height, 16 * width).half().to(DEVICE),
                )
                for _ in (0, 1)
            ]
            network.match(*sides)
    assert compiled == []


# Code for GPUs

COMPILE = """
import importlib, json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
case = json.loads(sys.argv[1])
function = getattr(importlib.import_module(f"dualrc.ops.triton.{case['module']}"), case["name"])
names, constants, kinds = function.arg_names, case["constants"], case["kinds"]
assert set(constants) <= set(names) and set(kinds) <= set(names), (names, constants, kinds)
assert set(names) - set(constants) - set(kinds) == set(function.do_not_specialize) - set(kinds), names
signature = {key: "constexpr" if key in constants else kinds.get(key, "i32") for key in names}
aligned = {(names.index(key),): [["tt.divisibility", 16]] for key in kinds if kinds[key].startswith("*")}
source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
options = {"num_warps": case["warps"], "num_stages": case["stages"]}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""

COPIED = {"cp.async.cg"}
LAYER = {"ADD": True, "RELU": True}
SEARCH = {"CORNER": False, "MASKED": True, "EVERY": True, "BLOCK": 64}
SCORE = {"CORNER": False, "MASKED": True, "EVERY": True, "SHARP": True, "VISITED": 8, "LENGTH": 96}
CONSTANTS = {"CONSTANTS": ""}
CASES = {
    # The convolutions of the default preset: 3x3, the last one, with few positions, 1x1, the stem, other types.
    "convolve": [
        ("convolution_jit", f"x weight onto out: *{kind}; bias: *fp32", found, 4, 3, LAYER | {
            "CIN": cin, "COUT": cout, "PITCH": cout if cout != 96 else 128, "KERNEL": kernel, "STRIDE": stride,
            "PADDING": padding, "REPLICATE": kernel == 2, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k,
        })
        for kind, found, cin, cout, kernel, stride, padding, m, n, k in (
            ("fp16", COPIED | {"wgmma"}, 64, 64, 3, 1, 1, 128, 64, 64),
            ("fp16", COPIED | {"wgmma"}, 64, 96, 3, 1, 1, 128, 128, 64),
            ("fp16", COPIED | {"wgmma"}, 256, 256, 3, 1, 1, 64, 32, 128),
            ("fp16", COPIED | {"wgmma"}, 256, 256, 2, 2, 0, 64, 128, 64),
            ("fp16", COPIED | {"wgmma"}, 256, 128, 1, 1, 0, 128, 128, 64),
            ("fp16", {"wgmma"}, 4, 32, 4, 2, 1, 128, 32, 64),
            ("bf16", COPIED | {"wgmma"}, 64, 64, 3, 1, 1, 64, 64, 64),
            ("fp32", COPIED, 64, 64, 3, 1, 1, 64, 64, 16),
        )
    ],
    "upsample_add": [
        ("convolution_jit", "small large out: *fp16", set(), 4, 3, {"CHANNELS": 64, "BLOCK_M": 64, "BLOCK_C": 64})
    ],
    "square_means": [("convolution_jit", "images: *fp16; means: *fp32", set(), 4, 3, {"SIDE": 8, "BLOCK": 4})],
    "add_contrast": [
        ("convolution_jit", "images out: *fp16; means: *fp32", set(), 4, 3, {"SIDE": 8, "FAINT": 0.002, "BLOCK": 256})
    ],
    "normalize_rows": [
        ("features_jit", "features result: *fp16", set(), 4, 3, {"CHANNELS": 96, "WIDE": 128, "ROWS": 32})
    ],
    "blur": [("features_jit", "images result: *fp16", set(), 4, 3, {"PIXELS": 256})],
    "measure": [
        ("consensus_jit", f"maps0 maps1: *{kind}; scale0 scale1 maxima: *fp32", set(), 4, 3,
         {"CHANNELS": 256, "BLOCK_C": 256, "POSITIONS": 16})
        for kind in ("fp16", "fp32")
    ],
    "correlate": [
        ("consensus_jit", f"maps0 maps1 scores: *{kind}; scale0 scale1 best0 best1: *fp32; cells0 cells1: *u8",
         found, warps, 3, {"CHANNELS": 256, "MASKED": True, "ROWS": side, "COLUMNS": side, "TERMS": terms})
        for kind, found, warps, side, terms in (
            ("fp16", {"wgmma", "cp.async.cg"}, 8, 128, 64), ("fp32", {"cp.async.cg"}, 4, 64, 16)
        )
    ],
    "find_maxima": [
        ("consensus_jit", "scores: *fp16; best0 best1: *fp32", set(), 4, 3, {"ROWS": 32, "COLUMNS": 128})
    ],
    "lay_out": [
        ("consensus_jit", "scores padded: *fp16; best0 best1: *fp32", set(), 4, 3,
         {"FILTERED": True, "POSITIONS": 1024})
    ],
    "contribute": [
        ("consensus_jit", f"padded shares weight1 weight2: *{kind}; bias1: *fp32", found, 4, 3,
         {"HIDDEN": hidden, "POSITIONS": 64 if kind == "fp16" else 32, "UNROLL": 3})
        for kind, found, hidden in (("fp16", {"wgmma"}, 16), ("fp16", {"wgmma"}, 32), ("fp32", set(), 16))
    ],
    "collect": [("consensus_jit", "shares results: *fp16; bias2: *fp32", set(), 4, 3, {"POSITIONS": 256})],
    "filter_scores": [
        ("consensus_jit", "scores results: *fp16; best0 best1: *fp32", set(), 4, 3, {"POSITIONS": 1024})
    ],
    "transpose": [
        ("both_jit", "tensor transposed: *fp16; sums transposed_sums: *fp32", set(), 4, 3, {"LINES": 16, "LENGTH": 128})
    ],
    "block_maxima": [
        ("choose_jit", "coarse: *fp16; sums maxima: *fp32; cells: *i64; usable: *u8", set(), 4, 3,
         SEARCH | {"AT_ONCE": 16})
    ],
    "choose": [
        ("choose_jit", "coarse: *fp16; sums maxima rest: *fp32; cells: *i64; usable: *u8; chosen: *i32", set(), 4, 3,
         SEARCH | {"AT_ONCE": 128, "VISITED": 8, "TAKEN": 16})
    ],
    "score_cells": [
        ("search_jit", f"coarse query searched: *{kind}; sums rest: *fp32; cells best: *i64; chosen visited: *i32; "
         "valid: *u8; wanted unsure: *i8; temperature slack: fp32", found, 4, 3,
         SCORE | {"SOME": True, "CHANNELS": 64 if kind == "fp16" else 32})
        for kind, found in (("fp16", {"mma.sync"}), ("fp32", set()))
    ],
    "look_further": [
        ("search_jit", "coarse query searched: *fp16; sums maxima: *fp32; cells best: *i64; chosen visited: *i32; "
         "usable valid: *u8; unsure: *i8; temperature slack: fp32", {"mma.sync"}, 1, 3,
         SCORE | {"BLOCK": 64, "ABREAST": 1, "PARTS": 4, "CHANNELS": 64})
    ],
    "mark": [
        ("both_jit", "best cells index0 index1: *i64; valid: *u8; score: *fp32; wanted: *i8", set(), 4, 3,
         {"MASKED": True, "EVERY": every, "BLOCK": 256})
        for every in (True, False)
    ],
    "answer": [("both_jit", "best index1 back: *i64; score: *fp32", set(), 4, 3, {"BLOCK": 256})],
    "window_products": [
        ("refine_jit", "features0 features1: *fp16; pair index0 index1: *i64; result: *fp32", {"mma.sync"}, 1, 3,
         {"LENGTH": 96, "CHANNELS": 32})
    ],
    "look_around": [
        ("refine_jit", f"features0 features1: *{kind}; pair index0 index1: *i64; "
         "score0 score1 log_temperature steps inputs: *fp32", found, 1, 3,
         {"LENGTH": 96, "CHANNELS": 32, "PITCH": 280, "LEARNT": True})
        for kind, found in (("fp16", {"mma.sync"}), ("fp32", set()))
    ],
    "place": [
        ("refine_jit", "pair index0 index1: *i64; score0 score1 steps learnt known maps: *fp32; at: *i32", set(), 4, 3,
         {"MARGIN": 9, "LEARNT": learnt, "BLOCK": 128})
        for learnt in (True, False)
    ],
    "explain_both": [
        ("support_jit", "pair: *i64; known maps around score: *fp32; at: *i32", set(), 4, 3,
         CONSTANTS | {"MATCHES": 8})
    ],
    "finish": [
        ("refine_jit", "light0 light1: *fp16; pair index0 index1: *i64; at: *i32; "
         "known maps around score points0 points1: *fp32", set(), 4, 3,
         CONSTANTS | {"ALIGN": True, "MATCHES": 4})
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [(name, n) for name, cases in CASES.items() for n in range(len(cases))])
def test_kernels_compile_for_a_gpu(name, number, monkeypatch):
    """Compile for an H100 or H200 without one: products on its tensor cores, and asynchronous copies of 16 bytes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # it spoils a process
    module, pointers, found, warps, stages, constants = CASES[name][number]
    kinds = {}
    for group in pointers.split("; "):
        arguments, kind = group.split(": ")
        kinds.update(dict.fromkeys(arguments.split(), kind))
    case = {"module": module, "name": name, "kinds": kinds, "constants": constants, "warps": warps, "stages": stages}
    command = [sys.executable, "-c", COMPILE, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {word for word in ("wgmma", "mma.sync", "cp.async.cg") if word in done.stdout} >= found


def test_every_kernel_is_compiled_somewhere():
    """Every kernel that is launched by name is in the list above."""
    from pathlib import Path

    import dualrc.ops.triton as package

    folder = Path(package.__file__).parent
    names = {
        name.split('"')[0]
        for file in folder.glob("*.py")
        for name in file.read_text(encoding="utf-8").split("_jit.")[1:]
        if '"' in name.split("\n")[0]
    }
    assert names == set(CASES)
