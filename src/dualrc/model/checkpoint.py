"""Weights files: safetensors with the network config in the header, and safe conversion of pickled checkpoints.

Files may come from untrusted sources. `config.py` bounds the config in a weights file. The names and shapes in the
header must match the network that the config describes before anything is allocated. safetensors itself rejects
offsets that overlap or lie outside the file, and headers larger than 100 MB. Pickles are read with an allow-list, and
only if their records are stored uncompressed, so a file needs about as much memory as its size on disk.
"""

import argparse
import codecs
import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualrc.calibration import Calibration
from dualrc.config import PRESETS, NetworkConfig, ResNetConfig, SparseNCNetConfig
from dualrc.errors import ConfigError, WeightsError
from dualrc.files import is_file, limit_zip, parse_json, replacing, write_json
from dualrc.model.backbone import ResNet
from dualrc.model.dualrc import make_network
from dualrc.model.network import Network
from dualrc.toml import from_dict, to_dict

_FORMAT = "dualrc-1"
# Patterns of names in the published files, and the names used here. In NCNet, the trunk is a sequence.
_PUBLISHED_NAMES = (
    (r"FeatureExtraction\.(model|extractor_list\.0)\.0\.", "backbone.trunk.conv1."),
    (r"FeatureExtraction\.(model|extractor_list\.0)\.1\.", "backbone.trunk.bn1."),
    (r"FeatureExtraction\.(model|extractor_list\.0)\.4\.", "backbone.trunk.layer1."),
    (r"FeatureExtraction\.(model\.5|extractor_list\.1\.0)\.", "backbone.trunk.layer2."),
    (r"FeatureExtraction\.(model\.6|extractor_list\.2\.0)\.", "backbone.trunk.layer3."),
    (r"FeatureExtraction\.(last|fine)_layer_block\.", "backbone.fine."),
    (r"FeatureExtraction\.coarse_layer_block\.", "backbone.coarse."),
)


# Published files contain the argparse namespace of the training run, and losses as numpy arrays and scalars.
_ARRAY: Any = np.zeros(1).__reduce__()
_SCALAR: Any = np.float64(0).__reduce__()
_ALLOWED: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.float64)),
    type(np.dtype(np.float32)),
    *(
        (function, f"{module}.multiarray.{function.__name__}")
        for function in (_ARRAY[0], _SCALAR[0])
        for module in ("numpy.core", "numpy._core")
    ),
    (codecs.encode, "_codecs.encode"),
]


def bundled(preset: str) -> Path | None:
    """Return the path of the weights file of a preset inside the package, or None if there is none."""
    path = Path(str(resources.files("dualrc"))) / "weights" / f"{preset}.safetensors"
    return path if path.is_file() else None


def weights_file(preset: str, weights: str | Path | None = None) -> Path:
    """Return the given weights file, or by default that of the package; raise WeightsError if there is none."""
    path = bundled(preset) if weights is None else Path(weights)
    if path is None:
        raise WeightsError(
            f"The package has no weights for the preset {preset!r}; give a weights file (weights=..., or --weights "
            "on the command line). `dualrc convert` creates one from a published checkpoint."
        )
    return path


def save_weights(network: Network, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a network and its config. `dtype` converts floating-point tensors."""
    state = {
        name: (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in network.state_dict().items()
    }
    metadata = {"format": _FORMAT, "network": json.dumps(to_dict(network.config))}
    with replacing(path) as temporary:
        save_file(state, str(temporary), metadata=metadata)


def load_weights(path: str | Path) -> Network:
    """Build the network that a weights file describes, in float32 on the CPU."""
    path = Path(path)
    config = read_config(path)
    with torch.device("meta"):
        expected = make_network(config).state_dict()
    state = read_tensors(path, expected)
    network = make_network(config)
    _fill(network, state, str(path))
    return network


def read_tensors(path: Path, expected: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; names and shapes must match `expected` if it is given."""
    if not is_file(path):
        raise WeightsError(f"The file {path} does not exist; check the path.")
    try:
        with safe_open(str(path), framework="pt") as file:
            names = file.keys()
            if expected is not None:
                _compare(expected, {name: tuple(file.get_slice(name).get_shape()) for name in names}, str(path))
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is corrupt ({error}); copy it again.") from error


def read_config(path: str | Path) -> NetworkConfig:
    """Return the network config in the header of a weights file."""
    path = Path(path)
    if not is_file(path):
        raise WeightsError(f"The weights file {path} does not exist, or is a folder; check the path.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        remedy = "convert a published checkpoint with `dualrc convert`, or copy the file again"
        raise WeightsError(f"{path} is not a safetensors file, or it is corrupt ({error}); {remedy}.") from error
    if metadata.get("format") != _FORMAT or "network" not in metadata:
        raise WeightsError(f"{path} was not written by dualrc: its header has no config; train or convert a model.")
    try:
        return from_dict(NetworkConfig, parse_json(metadata["network"]))
    except (ConfigError, ValueError, TypeError) as error:
        raise WeightsError(f"{path} has an unsupported config ({error}); try a newer version of dualrc.") from error


def calibration_path(weights: str | Path) -> Path:
    """Return the path of the calibration file of a weights file, next to it."""
    return Path(weights).with_suffix(".calibration.json")


def read_calibration(weights: str | Path) -> Calibration | None:
    """Read the calibration of a weights file; None if there is none, or if it belongs to other weights."""
    path = calibration_path(weights)
    if not is_file(path):
        return None
    try:
        calibration = from_dict(Calibration, json.loads(path.read_text(encoding="utf-8")))
    except (ConfigError, OSError, ValueError, TypeError, AttributeError) as error:
        remedy = "create it again with benchmarks/calibrate.py, or delete it"
        raise WeightsError(f"{path} can't be used ({error}); {remedy}.") from error
    if calibration.weights != file_hash(weights):
        warnings.warn(
            f"{path} belongs to other weights, so scores are not calibrated; create it again with "
            "benchmarks/calibrate.py, or delete it.",
            stacklevel=2,
        )
        return None
    return calibration


def save_calibration(calibration: Calibration, weights: str | Path) -> None:
    """Write a calibration next to the weights file that it belongs to."""
    write_json(calibration_path(weights), to_dict(calibration))


def file_hash(path: str | Path) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load_imagenet_trunk(trunk: ResNet, path: str | Path) -> None:
    """Load the trunk from a file with torchvision's names (.pth or .safetensors); ignore other entries."""
    state = read_tensors(Path(path)) if Path(path).suffix == ".safetensors" else _unpickle(path)
    wanted = set(trunk.state_dict())
    _fill(trunk, {name: t for name, t in state.items() if name in wanted and isinstance(t, Tensor)}, str(path))


def convert_published(source: str | Path, target: str | Path) -> NetworkConfig:
    """Convert a published checkpoint of DualRC-Net, NCNet or Sparse-NCNet to a weights file for its preset."""
    content = _unpickle(source)
    stored = content.get("state_dict")
    if not isinstance(stored, Mapping) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        kinds = "DualRC-Net, NCNet or Sparse-NCNet"
        raise WeightsError(f"{source} has no state_dict of tensors: it is not a published checkpoint of {kinds}.")
    state = {str(name).removeprefix("module."): tensor for name, tensor in stored.items()}
    config, weights = _converted(content.get("args"), state, source)
    network = make_network(config)
    _fill(network, weights, str(source))
    save_weights(network, target)
    return config


def _converted(args: Any, state: Mapping[str, Tensor], source: str | Path) -> tuple[NetworkConfig, dict[str, Tensor]]:
    """Return config and weights of a published checkpoint; Sparse-NCNet has MinkowskiEngine convolutions."""
    settings = vars(args) if isinstance(args, argparse.Namespace) else {}
    # Weights (out in k k k k) by module number.
    layers: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if (match := re.fullmatch(r"NeighConsensus\.conv\.(\d+)\.weight", name)) and tensor.ndim == 6:
            # Stored as (k, out, in, k, k, k).
            layers[int(match[1])] = tensor.movedim(0, 2)
        elif (match := re.fullmatch(r"NeighConsensus\.conv\.(\d+)\.kernel", name)) and tensor.ndim == 3:
            layers[int(match[1])] = _from_minkowski(tensor, source)
    is_ncnet = any(name.startswith("FeatureExtraction.model.") for name in state)
    config = (_ncnet_config if is_ncnet else _dualrc_config)(settings, state, source, has_layers=bool(layers))
    read = {f"NeighConsensus.conv.{number}.{part}" for number in layers for part in ("weight", "kernel", "bias")}
    weights = {
        _renamed(name, config): tensor
        for name, tensor in state.items()
        # Files of NCNet may hold more.
        if name.startswith("FeatureExtraction.model.") or not (is_ncnet or name in read)
    }
    ordered = dict(sorted(layers.items()))
    for layer, (number, weight) in enumerate(ordered.items()):
        weights[f"consensus.weights.{layer}"] = weight
        if (bias := state.get(f"NeighConsensus.conv.{number}.bias")) is not None:
            weights[f"consensus.biases.{layer}"] = bias.flatten()
    sizes, channels = tuple(w.shape[2] for w in ordered.values()), tuple(len(w) for w in ordered.values())
    return replace(config, consensus=replace(config.consensus, kernel_sizes=sizes, channels=channels)), weights


def _ncnet_config(
    settings: Mapping[str, Any], state: Mapping[str, Tensor], source: str | Path, *, has_layers: bool
) -> NetworkConfig:
    if settings.get("feature_extraction_cnn", "resnet101") != "resnet101" or settings.get("bn"):
        raise WeightsError(f"{source} has a backbone other than ResNet-101, or batch norms; convert another file.")
    if not settings.get("symmetric_mode", True):
        raise WeightsError(f"{source} has a consensus of one matching direction only; convert another file.")
    if not has_layers:
        raise WeightsError(f"{source} has no 4D convolutions, so it is not a checkpoint of NCNet or Sparse-NCNet.")
    if not any(name.endswith(".kernel") for name in state):
        return PRESETS["ncnet"][0]
    neighbors = int(settings.get("k", SparseNCNetConfig.neighbors))
    return replace(PRESETS["sparse-ncnet"][0], ncnet=SparseNCNetConfig(neighbors=neighbors))


def _dualrc_config(
    settings: Mapping[str, Any], state: Mapping[str, Tensor], source: str | Path, *, has_layers: bool
) -> NetworkConfig:
    fine = [tensor for name, tensor in state.items() if re.search(r"\.(last|fine)_layer_block\.weight$", name)]
    if not has_layers or not fine:
        raise WeightsError(f"{source} lacks the layers of DualRC-Net; known: backbone {settings.get('backbone')!r}.")
    channels = len(fine[0])
    if channels not in (256, 1024):
        raise WeightsError(f"{source} has {channels} fine channels; only 256 and 1024 are supported.")
    return replace(PRESETS["paper"][0], backbone=ResNetConfig(channels=256 if channels == 256 else 1024))


def _from_minkowski(kernel: Tensor, source: str | Path) -> Tensor:
    """Convert a 4D kernel of MinkowskiEngine, (k^4 in out), to (out in k k k k).

    The first coordinate varies fastest and starts at the lowest offset of every axis: see region.cpp in version 0.4 and
    kernel_region.hpp in version 0.5. An output reads the input at its own position plus the offset. Sparse-NCNet orders
    its coordinates as row and column of image 0, then row and column of image 1.
    """
    size = round(len(kernel) ** 0.25)
    if size**4 != len(kernel):
        raise WeightsError(f"{source} has a kernel of {len(kernel)} offsets, not a 4D cube; give another file.")
    return kernel.unflatten(0, (size,) * 4).permute(5, 4, 3, 2, 1, 0)


def _renamed(name: str, config: NetworkConfig) -> str:
    for pattern, ours in _PUBLISHED_NAMES:
        renamed, count = re.subn("^" + pattern, ours, name)
        if count:
            return renamed
    if match := re.fullmatch(r"FeatureExtraction\.inner_block_list\.(\d)\.(\w+)", name):
        # The list starts at the coarsest level. With 1024 channels conv4 has no 1x1 convolution, so conv3 is first.
        top = 3 if config.backbone.coarse_channels == 1024 else 4
        return f"backbone.lateral{top - int(match[1])}.{match[2]}"
    return name


def load_pickle(path: str | Path, *allowed: Any) -> Any:
    """Read a file of torch.save: tensors, plain values and the allowed classes, in memory of the file's size."""
    if zipfile.is_zipfile(path):
        limit_zip(path, Path(path).stat().st_size, stored=True)
    with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


def _unpickle(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    if not is_file(path):
        raise WeightsError(f"The checkpoint {path} does not exist; check the path.")
    try:
        # The allow-list rejects everything else that is not a tensor.
        content = load_pickle(path, *_ALLOWED)
    except Exception as error:
        # Reading a file that is not a checkpoint can raise any exception.
        raise WeightsError(
            f"{path} is not a PyTorch checkpoint, is corrupt, or holds more than weights; give another file."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} does not contain a dictionary of weights; give another file.")
    return content


def _fill(module: torch.nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights whose names and shapes must match exactly."""
    expected = module.state_dict()
    _compare(expected, {name: tuple(tensor.shape) for name, tensor in state.items()}, source)
    module.load_state_dict({**{name: expected[name] for name in expected.keys() - state.keys()}, **state})


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raise a one-line WeightsError if names or shapes differ from those of the network."""
    # Older files lack this counter of training steps, and nothing reads it.
    needed = {name for name in expected if not name.endswith("num_batches_tracked")}
    missing, unknown = sorted(needed - found.keys()), sorted(found.keys() - expected.keys())
    shapes = sorted(name for name in expected.keys() & found.keys() if tuple(expected[name].shape) != found[name])
    for label, names in (("lacks", missing), ("has the unknown", unknown), ("has a different shape of", shapes)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightsError(f"{source} does not fit the network: it {label} {names[0]}{more}; give another file.")
