"""Loading of a matcher for a preset, with bundled or other weights."""

import difflib
from dataclasses import fields, replace
from pathlib import Path
from typing import Unpack

import torch

from dualrc import config as configs
from dualrc.config import MatcherConfig, MatcherOptions
from dualrc.errors import ConfigError, WeightsError
from dualrc.matcher.extract import Precision, choose_device, has_int8
from dualrc.matcher.matcher import Matcher
from dualrc.model.checkpoint import file_hash, load_weights, read_calibration, weights_file


def load(
    preset: str = "default",
    *,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    precision: Precision | None = None,
    engine: str | None = None,
    threads: int | None = None,
    **settings: Unpack[MatcherOptions],
) -> Matcher:
    """Load a matcher with the bundled weights of a preset, or with a weights file of that preset.

    - `device`: None selects the best one available.
    - `precision`: number format of the backbone. None selects float16 on a GPU, int8 on a CPU with VNNI, else float32.
    - `engine`: implementation of everything after the backbone (see `dualrc.ops`). None selects the best one for the
      device.
    - `threads`: maximum number of CPU threads of each call. None keeps the setting of torch, one per core.
    - `settings`: fields of `MatcherConfig`, such as `max_size`, `top` and `quality`.

    Scores are probabilities if a calibration lies next to the weights file, as for the bundled weights.
    """
    _, matcher_config = configs.preset(preset)
    known = [field.name for field in fields(MatcherConfig)]
    for name in settings:
        if name not in known:
            names = ["preset", "weights", "device", "precision", "engine", "threads", *known]
            close = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}."
            raise ConfigError(f"Unknown setting {name}; {meant}")
    matcher_config = replace(matcher_config, **settings)
    path = weights_file(preset, weights)
    network = load_weights(path)
    if network.config.preset != preset:
        raise WeightsError(
            f"{path} has weights for the preset {network.config.preset!r}, not {preset!r}; "
            f"load the preset {network.config.preset!r}, or give other weights."
        )
    if precision is None and has_int8(network, choose_device(device)):
        precision = "int8"
    return Matcher(
        network,
        matcher_config,
        device=device,
        precision=precision,
        engine=engine,
        threads=threads,
        weights_hash=file_hash(path),
        calibration=read_calibration(path),
    )
