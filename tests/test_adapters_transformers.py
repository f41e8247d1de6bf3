"""The transformers adapter answers as Hugging Face's keypoint-matching models do."""

import numpy as np
import pytest
import torch
from adapter_data import HEIGHT, WIDTH, correct, images, matcher
from PIL import Image

from dualrc.errors import DataError, ImageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZES = [[(HEIGHT, WIDTH), (HEIGHT, WIDTH)]]


@pytest.fixture(scope="module")
def adapter():
    from dualrc.adapters import transformers as module

    return module


@pytest.fixture(scope="module")
def model(adapter):
    return adapter.DualRCForKeypointMatching.from_weights(num_matches=500)


def run(adapter, model, pairs, sizes, **options):
    processor = adapter.DualRCImageProcessor()
    return processor.post_process_keypoint_matching(model(**processor(pairs, return_tensors="pt")), sizes, **options)


def test_the_answer_has_the_keys_of_theirs_and_is_sub_pixel(adapter, model):
    inputs = adapter.DualRCImageProcessor()(list(images()), return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 2, 3, HEIGHT, WIDTH) and "pixel_mask" not in inputs
    outputs = model(**inputs)
    assert outputs.matches.shape == outputs.matching_scores.shape == (1, 2, 500)
    assert outputs.keypoints.shape == (1, 2, 500, 2) and len(model(**inputs, return_dict=False)) == 3
    (ours,) = adapter.DualRCImageProcessor().post_process_keypoint_matching(outputs, SIZES)
    from transformers.models.efficientloftr import image_processing_pil_efficientloftr as theirs
    from transformers.models.efficientloftr.modeling_efficientloftr import EfficientLoFTRKeypointMatchingOutput

    # Their processor reads our output too; it rounds to whole pixels.
    same = EfficientLoFTRKeypointMatchingOutput(
        matches=outputs.matches, matching_scores=outputs.matching_scores, keypoints=outputs.keypoints
    )
    (rounded,) = theirs.EfficientLoFTRImageProcessorPil().post_process_keypoint_matching(same, torch.tensor(SIZES))
    assert rounded.keys() == ours.keys() and rounded["keypoints0"].dtype == torch.int32
    assert torch.equal((ours["keypoints0"] + 0.5).to(torch.int32), rounded["keypoints0"])
    direct = matcher().match(*images(), top=500)
    points = [ours[f"keypoints{side}"].numpy() for side in (0, 1)]
    assert correct(*points) > max(0.8, correct(direct.points0, direct.points1) - 0.02)
    assert np.abs(points[0] - np.round(points[0])).max() > 0.3
    scores = ours["matching_scores"].numpy()
    assert (np.diff(scores) <= 0).all() and abs(scores.mean() - direct.scores.mean()) < 0.01


def test_images_of_different_sizes_are_padded(adapter, model):
    image0, image1 = images()
    tall = image1[:, 40:-20]
    pairs = [[Image.fromarray(image0), tall], [image0, image1]]
    inputs = adapter.DualRCImageProcessor()(pairs, return_tensors="pt")
    assert inputs["pixel_mask"].shape == (2, 2, HEIGHT, WIDTH)
    assert inputs["pixel_mask"][0, 1, 0].sum() == (WIDTH - 60) // 16 * 16
    sizes = [[(HEIGHT, WIDTH), tall.shape[:2]], [(HEIGHT, WIDTH)] * 2]
    first, second = run(adapter, model, pairs, sizes, threshold=0.5)
    assert (first["matching_scores"] > 0.5).all() and len(second["matching_scores"]) > 100
    assert correct(first["keypoints0"].numpy(), first["keypoints1"].numpy() + np.array([40, 0])) > 0.85
    assert (first["keypoints1"] > -0.5).all() and (first["keypoints1"][:, 0] < tall.shape[1] - 0.5).all()


def test_saved_and_loaded_it_is_the_same(adapter, model, tmp_path):
    model.save_pretrained(tmp_path)
    adapter.DualRCImageProcessor(max_size=800).save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= {p.name for p in tmp_path.iterdir()}
    adapter.register()
    again = transformers.AutoModelForKeypointMatching.from_pretrained(tmp_path)
    assert isinstance(again, adapter.DualRCForKeypointMatching) and again.config.num_matches == 500
    processor = adapter.DualRCImageProcessor.from_pretrained(tmp_path)
    assert processor.max_size == 800
    inputs = processor(list(images()), return_tensors="pt")
    one, other = model(**inputs), again(**inputs)
    assert torch.equal(one.matches, other.matches)
    assert torch.allclose(one.matching_scores, other.matching_scores, atol=1e-5)
    # Matches with nearly equal scores may change places: (n 4).
    rows = [found.keypoints[0].permute(1, 0, 2).flatten(1).detach() for found in (one, other)]
    assert (torch.cdist(*rows, p=1).amin(1) < 1e-4).float().mean() > 0.99


def test_half_precision_is_loaded_as_float32(adapter, model, tmp_path):
    model.save_pretrained(tmp_path)
    inputs = adapter.DualRCImageProcessor()(list(images()), return_tensors="pt")
    for dtype in (torch.float16, torch.bfloat16):
        again = adapter.DualRCForKeypointMatching.from_pretrained(tmp_path, dtype=dtype)
        assert torch.allclose(again(**inputs).matching_scores, model(**inputs).matching_scores, atol=1e-5)


def test_images_without_texture_have_no_matches(adapter, model):
    (found,) = run(adapter, model, [np.zeros((64, 64, 3), np.uint8)] * 2, [[(64, 64)] * 2])
    assert found["keypoints0"].shape == found["keypoints1"].shape == (0, 2) and not len(found["matching_scores"])


def test_mistakes_are_explained(adapter, model):
    processor = adapter.DualRCImageProcessor()
    with pytest.raises(ImageError, match="pair"):
        processor([images()[0]])
    with pytest.raises(ImageError, match="batch, 2, 3"):
        model(torch.zeros(1, 3, 64, 64))
    outputs = model(**processor(list(images()), return_tensors="pt"))
    with pytest.raises(DataError, match="target_sizes"):
        processor.post_process_keypoint_matching(outputs, [(HEIGHT, WIDTH)])
