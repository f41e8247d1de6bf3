"""The kornia adapter answers as kornia's LoFTR does."""

import copy

import numpy as np
import pytest
import torch
from adapter_data import HEIGHT, WIDTH, correct, images, matcher

from dualrc.adapters.kornia import DualRC
from dualrc.adapters.tensors import interpolate
from dualrc.errors import ConfigError, DataError, ImageError


@pytest.fixture(scope="module")
def module() -> DualRC:
    return DualRC(top=500)


@pytest.fixture(scope="module")
def data() -> dict[str, torch.Tensor]:
    return {f"image{side}": torch.from_numpy(image).permute(2, 0, 1)[None] / 255 for side, image in enumerate(images())}


def test_keys_types_and_shapes_are_those_of_loftr(module, data):
    kornia = pytest.importorskip("kornia.feature")
    # Without trained weights, few cells are mutual nearest neighbors; with this seed there are some 14.
    torch.manual_seed(15)
    loftr = kornia.LoFTR(None).eval()
    loftr.coarse_matching.thr = 0.0
    with torch.no_grad():
        theirs = loftr({key: image[:, :, :128, :160].mean(1, keepdim=True) for key, image in data.items()})
    ours = module(data)
    assert len(theirs["confidence"]) and len(ours["confidence"]) == 500
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert (value.dtype, value.shape[1:]) == (theirs[key].dtype, theirs[key].shape[1:]), key
    # What LoFTR returns has no gradient; ours has none either unless somebody asks.
    assert not any(value.requires_grad for value in (*ours.values(), *theirs.values()))


def test_matches_are_right_and_those_of_the_matcher(module, data):
    found = module(data)
    points0, points1 = found["keypoints0"].numpy(), found["keypoints1"].numpy()
    direct = matcher().match(*images(), top=500)
    assert correct(points0, points1) > max(0.8, correct(direct.points0, direct.points1) - 0.02)
    both = {tuple(row) for row in np.round(points0, 1)} & {tuple(row) for row in np.round(direct.points0, 1)}
    assert len(both) > 0.95 * len(direct)
    assert abs(found["confidence"].mean().item() - direct.scores.mean()) < 0.01


def test_a_batch_with_masks(module, data):
    mask = torch.zeros(2, HEIGHT, WIDTH)
    mask[0, :, : WIDTH // 2] = 1
    mask[1] = 1
    batch = {key: image.expand(2, -1, -1, -1) for key, image in data.items()}
    found = module({**batch, "mask0": mask})
    first = found["batch_indexes"] == 0
    assert first.any() and (~first).sum() == 500
    assert (found["keypoints0"][first, 0] <= WIDTH // 2 - 0.5).all()
    alone = module(data)
    # Scores of near-ties differ by rounding, so their order may differ.
    ours, theirs = (np.hstack([one["keypoints0"], one["keypoints1"]]) for one in (found, alone))
    nearest = np.abs(ours[(~first).numpy(), None] - theirs[None]).max(2).min(1)
    assert np.mean(nearest <= 0.02) > 0.99
    gray = module({key: image.mean(1, keepdim=True) for key, image in data.items()})
    assert correct(gray["keypoints0"].numpy(), gray["keypoints1"].numpy()) > 0.75


def test_keypoints_and_confidence_are_differentiable_in_the_images(module, data):
    small = {key: image[:, :, 60:156, 80:208].clone() for key, image in data.items()}
    plain = module(small)
    inputs = {key: image.requires_grad_() for key, image in small.items()}
    found = module(inputs)
    assert torch.allclose(found["keypoints1"], plain["keypoints1"], atol=0.05)
    for key in ("keypoints0", "keypoints1", "confidence"):
        grads = torch.autograd.grad(found[key].sum(), list(inputs.values()), retain_graph=True)
        assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads), key
    with torch.no_grad():
        assert not module(inputs)["confidence"].requires_grad
    module.matcher.network.consensus.requires_grad_(True)
    try:
        score = module({key: image.detach() for key, image in small.items()})["confidence"].sum()
        score.backward()
        assert all(p.grad.isfinite().all() for p in module.matcher.network.consensus.parameters())
    finally:
        module.matcher.network.consensus.requires_grad_(False)


def test_scores_are_interpolated_as_the_calibration_does(module):
    curve = module.matcher.calibration.matches
    scores = torch.linspace(0, 1.5, 200)
    assert np.allclose(interpolate(curve, scores).numpy(), curve(scores.numpy()), atol=1e-6)


def test_mistakes_are_explained(module, data):
    with pytest.raises(DataError, match="no image1"):
        module({"image0": data["image0"]})
    with pytest.raises(ImageError, match="batch, 1 or 3"):
        module({"image0": data["image0"][0], "image1": data["image1"][0]})
    with pytest.raises(ImageError, match="same number"):
        module({"image0": data["image0"].expand(2, -1, -1, -1), "image1": data["image1"]})
    with pytest.raises(ImageError, match="at least 1, not 0 and 0"):
        module({key: image[:0] for key, image in data.items()})
    pairs = {key: image.expand(2, -1, -1, -1) for key, image in data.items()}
    for shape in ((1, HEIGHT, WIDTH), (2, 1, HEIGHT, WIDTH), (2, HEIGHT // 8, WIDTH // 8)):
        with pytest.raises(ImageError, match="does not fit images of shape"):
            module({**pairs, "mask1": torch.ones(shape)})
    with pytest.raises(ConfigError, match=r"float\(\)"):
        copy.deepcopy(module).half()(data)


def test_half_precision_images_and_autocast_give_the_same_matches(module, data):
    wanted = np.hstack([module(data)["keypoints0"], module(data)["keypoints1"]])
    half = module({key: image.half() for key, image in data.items()})
    with torch.autocast("cpu", torch.bfloat16):
        low = module(data)
    for found in (half, low):
        assert found["keypoints0"].dtype == found["confidence"].dtype == torch.float32
        own = np.hstack([found["keypoints0"], found["keypoints1"]])
        assert np.mean(np.abs(wanted[:, None] - own[None]).max(2).min(1) < 0.5) > 0.9


def test_images_without_texture_have_no_matches(module, data):
    """The network distinguishes positions in a uniform image by their distance from the border."""
    plain = torch.full_like(data["image0"], 0.5)
    batch = {"image0": torch.cat([plain, data["image0"], data["image0"]])}
    batch["image1"] = torch.cat([plain, data["image1"], plain])
    assert module(batch)["batch_indexes"].unique().tolist() == [1]
    # Padding does not count as an area without texture.
    padded, mask = torch.zeros(1, 3, 1024, 1024), torch.zeros(1, 1024, 1024)
    padded[:, :, :96, :96], mask[:, :96, :96] = data["image0"][:, :, 60:156, 80:176], 1
    small = {key: image[:, :, 60:156, 80:176] for key, image in data.items()}
    assert len(module({"image0": padded, "image1": small["image1"], "mask0": mask})["confidence"])
