"""Tests of the provenance that is stored with results."""

import json
import platform
from importlib import metadata

import torch

from dualrc.config import MatcherConfig
from dualrc.provenance import provenance, versions


def test_versions_of_what_is_installed():
    found = versions("pillow", "no-such-package")
    assert found["python"] == platform.python_version() and found["torch"] == torch.__version__
    assert "pillow" in found and "no-such-package" not in found


def test_configs_devices_and_weights_are_plain_values():
    made = provenance(device=torch.device("cpu"), weights="abc", matcher=MatcherConfig(top=7), processes=2)
    assert json.loads(json.dumps(made)) == made
    assert (made["device"], made["weights"], made["processes"]) == ("cpu", "abc", 2)
    assert made["matcher"]["top"] == 7 and made["dualrc"] == metadata.version("dualrc")
    assert not {"device", "gpu", "weights"} & provenance().keys()
