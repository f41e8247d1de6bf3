"""Tests of the brightness for the alignment; tests/test_ops.py tests the alignment itself."""

import pytest
import torch
from conftest import rand

from dualrc.model.align import brightness


@pytest.mark.parametrize("shape", [(2, 3, 32, 48), (1, 3, 16, 16)])
def test_brightness_is_a_blurred_mean(shape):
    images = rand(1, *shape)
    found = brightness(images)
    assert found.shape == (shape[0], *shape[2:])
    kernel = torch.tensor([1.0, 4, 6, 4, 1]) / 16
    patch = images.mean(1)[:, 4:9, 5:10]
    assert torch.allclose(found[:, 6, 7], torch.einsum("bij,i,j->b", patch, kernel, kernel), atol=1e-6)
