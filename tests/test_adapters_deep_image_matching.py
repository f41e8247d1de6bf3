"""deep-image-matching runs the matcher, where it is installed; it needs torchvision and kornia 0.8.2 or older."""

import importlib.util
import sys

import numpy as np
import pytest
from adapter_data import correct, images
from PIL import Image

from dualrc.adapters import deep_image_matching as adapter
from dualrc.errors import ConfigError

INSTALLED = importlib.util.find_spec("deep_image_matching") is not None


@pytest.mark.skipif(INSTALLED, reason="deep-image-matching is installed")
def test_without_the_package_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match="pip install deep-image-matching"):
        adapter.register()


@pytest.mark.skipif(not INSTALLED, reason="deep-image-matching is not installed: it needs kornia <= 0.8.2")
@pytest.mark.filterwarnings("ignore")
def test_the_package_runs_the_matcher(tmp_path):
    from deep_image_matching import matchers
    from deep_image_matching.config import Config
    from deep_image_matching.extractors.no_extractor import NoExtractor
    from deep_image_matching.io.h5 import get_features, get_matches
    from deep_image_matching.matchers import matcher_loader

    kind = adapter.register()
    assert adapter.register() is kind is matcher_loader(matchers, "dualrc")
    assert kind is sys.modules["deep_image_matching.matchers.dualrc"].DualRCMatcher
    assert issubclass(kind, matchers.DetectorFreeMatcherBase)
    (tmp_path / "images").mkdir()
    paths = [tmp_path / "images" / name for name in ("a.png", "b.png", "c.png")]
    for path, image in zip(paths, (*images(), images()[0]), strict=True):
        Image.fromarray(image).save(path)
    arguments = {"dir": str(tmp_path), "pipeline": "dualrc", "strategy": "bruteforce", "quality": "high"}
    config = Config({**arguments, "tiling": "none", "force": True})
    (features,) = {NoExtractor(config).extract(path) for path in paths}
    matcher = kind(config)
    assert matcher.config["matcher"]["max_num_matches"] == 4000
    matcher._match_pairs(features, paths[0], paths[1])
    # Points of a second pair come after those of the first.
    indices = matcher._match_pairs(features, paths[0], paths[2])
    points = [get_features(features, name)["keypoints"] for name in ("a.png", "b.png", "c.png")]
    first = len(points[1])
    assert first > 300 and correct(points[0][:first], points[1]) > 0.65
    assert np.array_equal(indices[:, 0], np.arange(first, len(points[0]))) and indices[0, 1] == 0
    assert np.median(np.linalg.norm(points[0][indices[:, 0]] - points[2][indices[:, 1]], axis=1)) < 0.5
    found = matcher.match(features, tmp_path / "matches.h5", paths[1], paths[2])
    assert len(found) > 100 and np.array_equal(get_matches(tmp_path / "matches.h5", "b.png", "c.png"), found)
