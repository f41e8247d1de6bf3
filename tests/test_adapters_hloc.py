"""hloc's own code runs the matcher, where hloc is installed; it is not on PyPI."""

import importlib.util
import sys

import numpy as np
import pytest
from adapter_data import correct, images
from PIL import Image

from dualrc.adapters import hloc as adapter
from dualrc.errors import ConfigError

HLOC = importlib.util.find_spec("hloc") is not None


@pytest.mark.skipif(HLOC, reason="hloc is installed")
def test_without_hloc_the_error_says_where_it_is():
    with pytest.raises(ConfigError, match="Hierarchical-Localization"):
        adapter.register()


@pytest.mark.skipif(not HLOC, reason="hloc is not installed: it is not on PyPI")
@pytest.mark.filterwarnings("ignore")
def test_match_dense_runs_the_matcher(tmp_path):
    import h5py
    from hloc import match_dense, matchers
    from hloc.utils.base_model import dynamic_load
    from hloc.utils.io import get_keypoints, get_matches

    confs = adapter.register()
    assert adapter.register() == confs and match_dense.confs.keys() >= confs.keys()
    model = dynamic_load(matchers, "dualrc")
    assert model.__module__ == "hloc.matchers.dualrc" and model is sys.modules["hloc.matchers.dualrc"].DualRC
    for name, image in zip(("a.png", "b.png"), images(), strict=True):
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "pairs.txt").write_text("a.png b.png\n")
    features, matches = match_dense.main(confs["dualrc"], tmp_path / "pairs.txt", tmp_path, export_dir=tmp_path)
    with h5py.File(matches) as file:
        raw = [file["a.png/b.png"][key][:] for key in ("keypoints0", "keypoints1", "scores")]
    assert len(raw[2]) > 100 and raw[2].min() >= 0.2 and correct(raw[0], raw[1]) > 0.65
    indices, _ = get_matches(matches, "a.png", "b.png")
    points = [get_keypoints(features, name)[indices[:, side]] for side, name in enumerate(("a.png", "b.png"))]
    # hloc rounds keypoints to whole pixels.
    assert len(indices) > 100 and correct(*points, within_px=4) > 0.65
    assert np.allclose(points[0], np.round(points[0] + 0.5) - 0.5)
