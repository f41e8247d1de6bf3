"""Tests of Sparse-NCNet against a dense oracle: the whole tensor, with all but the selected entries set to zero."""

import argparse
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ENGINES, make_engine, point_batch, rand
from ncnet_data import trunk_state
from torch import nn
from torch.nn import functional as F

from dualrc.config import PRESETS, ConsensusConfig, SparseNCNetConfig
from dualrc.errors import WeightsError
from dualrc.losses.keypoint import dense_tensor, keypoint_loss, keypoint_losses, keypoint_maps, orthogonal_loss
from dualrc.model import checkpoint
from dualrc.model.checkpoint import convert_published
from dualrc.model.consensus import Consensus, conv4d
from dualrc.model.correlation import normalize
from dualrc.model.ncnet import SparseNCNet
from dualrc.model.network import Features
from dualrc.model.relocalize import SHARPNESS
from dualrc.model.sparse import SparseScores, sparse_consensus
from dualrc.ops import memory

CPU_ENGINES = [name for name in ENGINES if not name.startswith("triton")]


def chosen_entries(coarse0, coarse1, count, valid0=None, valid1=None):
    """Return the correlations of every cell with its best cell in the other image; duplicates count twice."""
    batch, (h0, w0), (h1, w1) = len(coarse0), coarse0.shape[2:], coarse1.shape[2:]
    result, there = torch.zeros(batch, h0 * w0, h1 * w1), torch.zeros(batch, h0 * w0, h1 * w1, dtype=torch.bool)
    for b in range(batch):
        products = coarse0[b].flatten(1).T @ coarse1[b].flatten(1)
        for mask, axis in ((valid0, 0), (valid1, 1)):
            if mask is not None:
                products = products.masked_fill(~mask[b].flatten().unsqueeze(1 - axis), float("-inf"))
        for i, row in enumerate(products):
            for j in sorted(range(len(row)), key=lambda j, row=row: -float(row[j]))[:count]:
                if row[j].isfinite():
                    result[b, i, j] += row[j]
                    there[b, i, j] = True
        for j, column in enumerate(products.T):
            for i in sorted(range(len(column)), key=lambda i, column=column: -float(column[i]))[:count]:
                if column[i].isfinite():
                    result[b, i, j] += column[i]
                    there[b, i, j] = True
    shape = (batch, h0, w0, h1, w1)
    return result.view(shape), there.view(shape)


def dense_consensus(tensor, there, consensus):
    """Run the consensus on the tensor and on its transpose; after each layer only the entries `there` are kept."""

    def one_way(values, kept):
        x = values.relu()[..., None]
        for weight, bias in zip(consensus.weights, consensus.biases, strict=True):
            x = conv4d(x, weight, bias).relu() * kept[..., None]
        return x[..., 0]

    exchanged = one_way(tensor.permute(0, 3, 4, 1, 2), there.permute(0, 3, 4, 1, 2))
    return one_way(tensor, there) + exchanged.permute(0, 3, 4, 1, 2)


def make(kernel_sizes=(3, 3), channels=(4, 1), **ncnet) -> SparseNCNet:
    config = replace(PRESETS["sparse-ncnet"][0], ncnet=SparseNCNetConfig(**ncnet))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        consensus = Consensus(ConsensusConfig(kernel_sizes=kernel_sizes, channels=channels))
    for number, bias in enumerate(consensus.biases):
        bias.data = 0.05 * rand(number, *bias.shape)
    return SparseNCNet(config, backbone=Given(), consensus=consensus)


class Given(nn.Module):
    """Features at 1/8 of the image size, which are a rearrangement of its pixels."""

    def forward(self, images):
        return F.pixel_unshuffle(images, 8).relu()


@torch.no_grad()
@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("limit", [2**29, 2**12])
@pytest.mark.parametrize(("kernel_sizes", "channels"), [((3, 3), (4, 1)), ((3, 5, 1), (2, 3, 1))])
def test_the_tensor(engine, limit, kernel_sizes, channels):
    network = make(kernel_sizes, channels, neighbors=3)
    network.engine = make_engine(engine)
    one, other = (network.extract(rand(seed, 2, 3, *size)) for seed, size in ((0, (64, 48)), (1, (48, 80))))
    tensor, there = chosen_entries(one.coarse, other.coarse, 3)
    with torch.inference_mode(), memory.working_memory(limit):
        found = network.coarse_tensor(one, other)
    assert found.is_sparse and found._nnz() == int(there.sum())
    expected = dense_consensus(tensor, there, network.consensus)
    assert expected.abs().max() > 0.5
    assert torch.allclose(found.to_dense(), expected, atol=1e-5)


@torch.no_grad()
def test_masked_cells_are_not_chosen():
    network = make(neighbors=2)
    one, other = (network.extract(rand(seed, 1, 3, *size)) for seed, size in ((0, (64, 48)), (1, (48, 80))))
    masks = [rand(seed, 1, *(4 * side for side in f.coarse.shape[2:])) > 1.5 for seed, f in ((5, one), (6, other))]
    cells = [F.max_pool2d(mask.float(), 4) > 0 for mask in masks]
    assert not cells[0].all() and not cells[1].all()
    found = network.sparse_scores(replace(one, valid=masks[0]), replace(other, valid=masks[1]))
    tensor, there = chosen_entries(one.coarse, other.coarse, 2, *cells)
    expected = dense_consensus(tensor, there, network.consensus)
    assert torch.allclose(found.to_torch().to_dense(), expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("soft", [False, True])
def test_matches_and_relocalization(soft):
    """Best entries of rows and columns, then the best fine cells, then a 3x3 soft-argmax, computed by loops."""
    network = make(neighbors=3, soft=soft)
    one, other = (network.extract(rand(seed, 1, 3, *size)) for seed, size in ((0, (64, 48)), (1, (48, 80))))
    tensor = network.coarse_tensor(one, other).to_dense()[0].flatten(2).flatten(0, 1).numpy()
    wanted = {(i, int(row.argmax())) for i, row in enumerate(tensor) if row.max() > 0}
    wanted |= {(int(column.argmax()), j) for j, column in enumerate(tensor.T) if column.max() > 0}
    expected = {}
    maps = [np.pad(f.fine[0].numpy(), ((0, 0), (1, 1), (1, 1))) for f in (one, other)]  # zeros around
    for i, j in wanted:
        cells = [
            [(index // width * 2 + y, index % width * 2 + x) for y in (0, 1) for x in (0, 1)]
            for index, width in ((i, 3), (j, 5))
        ]
        at = [lambda cell, m=m: m[:, cell[0] + 1, cell[1] + 1] for m in maps]
        best = max(itertools.product(*cells), key=lambda pair: at[0](pair[0]) @ at[1](pair[1]))
        places = []
        for image in (0, 1):
            here, middle = np.array(best[image], float), at[1 - image](best[1 - image])
            if soft:
                steps = list(itertools.product((-1, 0, 1), repeat=2))
                around = [at[image]((best[image][0] + dy, best[image][1] + dx)) @ middle for dy, dx in steps]
                share = np.exp(SHARPNESS * np.array(around))
                here = here + (share / share.sum()) @ np.array(steps)
            places += ((here[::-1] + 0.5) * 8 - 0.5).tolist()
        expected[i, j] = (*places, tensor[i, j])
    found = network.match(one, other)
    ours = np.concatenate([found.points0, found.points1, found.scores[:, None]], axis=1)
    order = sorted(expected.values(), key=lambda row: -row[4])
    assert len(ours) == len(order) > 12
    assert np.allclose(ours[np.lexsort(ours.T)], np.array(order)[np.lexsort(np.array(order).T)], atol=1e-4)
    assert (found.scores.diff() <= 0).all()
    top = network.match(one, other, top=5)
    assert torch.equal(top.points0, found.points0[:5]) and torch.equal(top.scores, found.scores[:5])


def test_gradients_reach_the_consensus():
    network = make(neighbors=3)
    with torch.no_grad():
        features = [network.extract(rand(seed, 2, 3, 64, 48)) for seed in (0, 1)]
    network.coarse_tensor(*features).to_dense().square().sum().backward()
    sparse = [parameter.grad.clone() for parameter in network.consensus.parameters()]
    network.consensus.zero_grad()
    dense = dense_consensus(*chosen_entries(features[0].coarse, features[1].coarse, 3), network.consensus)
    dense.square().sum().backward()
    for one, parameter in zip(sparse, network.consensus.parameters(), strict=True):
        assert torch.allclose(one, parameter.grad, rtol=1e-4, atol=1e-4)


def test_keypoint_losses_read_the_tensor_at_keypoints():
    """A keypoint at the center of a cell reads the row of that cell; the loss of a batch is the mean of its pairs."""
    network = make(neighbors=3)
    with torch.no_grad():
        features = [network.extract(rand(seed, 2, 3, 64, 48)) for seed in (0, 1)]
    points = torch.tensor([[7.5, 7.5], [23.5, 39.5], [15.5, 30.0]]).expand(2, -1, -1)  # the last lies between cells
    batch = point_batch(points, points.flip(1))
    tensor = dense_tensor(network, *features)
    totals = []
    for number in (0, 1):
        one = [Features(coarse=f.coarse[number, None], fine=f.fine[number, None]) for f in features]
        maps = keypoint_maps(network, *one, point_batch(points[number], points[number].flip(0)))
        row = tensor[number, 2, 1].flatten()
        assert torch.allclose(maps[0].scores[0, 1], row / row.sum(), atol=1e-6)
        assert maps[0].target[0, 1].argmax() == maps[1].target[0, 1].argmax() == 2 * 3 + 1
        assert (maps[0].width, maps[0].stride) == (3, 16)
        totals.append(keypoint_loss(*maps) + 0.05 * orthogonal_loss(*maps))
    found = keypoint_losses(network, *features, batch, "paper")
    assert found.total.item() == pytest.approx(torch.stack(totals).mean().item(), rel=1e-5)
    assert found.logged.keys() == {"keypoint", "orthogonal", "within_8px", "within_16px", "within_32px"}


def test_no_entries_and_one():
    consensus = make().consensus
    keys, values = torch.tensor([7]), torch.tensor([0.5])
    nothing = sparse_consensus(SparseScores(keys=keys[:0], values=values[:0], shape=(1, 2, 2, 2, 2)), consensus)
    assert len(nothing.values) == 0 and nothing.best(0)[1].tolist() == [[0, 0, 0, 0]]
    one = sparse_consensus(SparseScores(keys=keys, values=values, shape=(1, 2, 2, 2, 2)), consensus)
    index, score = one.best(0)
    assert index[0, 1] == 3 and score[0, 1] == one.values[0] and score.sum() == score[0, 1]


def minkowski_checkpoint(**args):
    """Return a checkpoint with the names of the published repository, and kernels in MinkowskiEngine's layout."""
    state = trunk_state()
    state["NeighConsensus.conv.1.kernel"] = rand(1, 81, 1, 16)
    state["NeighConsensus.conv.1.bias"] = rand(2, 1, 16)
    state["NeighConsensus.conv.3.kernel"] = rand(3, 81, 16, 1)
    state["NeighConsensus.conv.3.bias"] = rand(4, 1, 1)
    settings = {"ncons_kernel_sizes": [3, 3], "ncons_channels": [16, 1], "k": 7, "symmetric_mode": 1, "bn": 0}
    namespace = argparse.Namespace(feature_extraction_cnn="resnet101", **{**settings, **args})
    return {"epoch": 5, "args": namespace, "state_dict": state, "train_loss": np.zeros(5)}


@pytest.fixture(scope="module")
def published():
    return minkowski_checkpoint()


def test_conversion_of_minkowski_kernels(published, tmp_path):
    """Entry by entry: the offset of the first coordinate, the row of image 0, varies fastest in a kernel."""
    torch.save(published, tmp_path / "sparse.pth.tar")
    config = convert_published(tmp_path / "sparse.pth.tar", tmp_path / "sparse.safetensors")
    assert config.preset == "sparse-ncnet" and config.ncnet == SparseNCNetConfig(neighbors=7)
    network = checkpoint.load_weights(tmp_path / "sparse.safetensors")
    for path in tmp_path.iterdir():
        path.unlink()
    for layer, number in ((0, 1), (1, 3)):
        kernel = published["state_dict"][f"NeighConsensus.conv.{number}.kernel"]
        weight = network.consensus.weights[layer]
        for index, (column1, row1, column0, row0) in enumerate(itertools.product(range(3), repeat=4)):
            assert torch.equal(weight[:, :, row0, column0, row1, column1], kernel[index].T)
        bias = published["state_dict"][f"NeighConsensus.conv.{number}.bias"]
        assert torch.equal(network.consensus.biases[layer], bias[0])
    expected = published["state_dict"]["FeatureExtraction.model.5.1.conv1.weight"]
    assert torch.equal(network.backbone.trunk.layer2[1].conv1.weight, expected)


def test_checkpoints_that_are_not_known(published):
    unknown = (
        ({"bn": 1}, "batch norms"),
        ({"feature_extraction_cnn": "resnet18"}, "a backbone other than"),
        ({"symmetric_mode": 0}, "one matching direction only"),
    )
    for args, words in unknown:
        settings = argparse.Namespace(**{**vars(published["args"]), **args})
        with pytest.raises(WeightsError, match=words):
            checkpoint._converted(settings, published["state_dict"], "file")
    for shape, words in (((80, 1, 16), "not a 4D cube"), ((3, 3), "no 4D convolutions")):
        state = {"FeatureExtraction.model.0.weight": rand(0, 1), "NeighConsensus.conv.1.kernel": rand(0, *shape)}
        with pytest.raises(WeightsError, match=words):
            checkpoint._converted(None, state, "file")


def test_normalized_features_of_pooled_maxima():
    network = make()
    images = rand(0, 1, 3, 64, 48)
    features = network.extract(images)
    raw = network.backbone(images)
    assert torch.allclose(features.fine, normalize(raw))
    assert torch.allclose(features.coarse, normalize(F.max_pool2d(raw, 2)))
