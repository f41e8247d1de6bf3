"""vismatch finds the matcher and runs it, where vismatch is installed; it needs torchvision."""

import importlib.util

import numpy as np
import pytest
import torch
from adapter_data import correct, images

from dualrc.adapters import vismatch as adapter
from dualrc.errors import ConfigError

VISMATCH = importlib.util.find_spec("vismatch") is not None


@pytest.mark.skipif(VISMATCH, reason="vismatch is installed")
def test_without_vismatch_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match="pip install vismatch"):
        adapter.register()


@pytest.mark.skipif(not VISMATCH, reason="vismatch is not installed: it needs torchvision")
@pytest.mark.filterwarnings("ignore")
def test_get_matcher_finds_it():
    import vismatch

    kind = adapter.register()
    assert adapter.register() is kind and vismatch.available_models.count("dualrc") == 1
    assert issubclass(kind, vismatch.BaseMatcher)
    matcher = vismatch.get_matcher("dualrc", device="cpu", max_num_keypoints=400, ransac_reproj_thresh=5)
    assert matcher.ransac_reproj_thresh == 5
    tensors = [torch.from_numpy(image).permute(2, 0, 1) / 255 for image in images()]
    outputs = matcher._forward(*tensors)
    assert len(outputs) == 7 and outputs[2:6] == (None,) * 4 and outputs[6].shape == (400,)
    result = matcher(*tensors)
    assert 350 < len(result["matched_kpts0"]) <= 400 and result["num_inliers"] > 50
    assert len(result["matched_confidences"]) == len(result["matched_kpts1"])
    assert correct(result["matched_kpts0"], result["matched_kpts1"]) > 0.8
    both = vismatch.get_matcher(["dualrc", "dualrc"], device="cpu", max_num_keypoints=100)(*tensors)
    assert len(both["matched_kpts0"]) > 150
    with pytest.raises(RuntimeError, match="not yet supported"):
        vismatch.get_matcher("no such matcher")
    assert np.isfinite(result["H"]).all()
