"""Export of a network to ONNX: a features model and a pair model, with standard operators only."""

import io
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dualrc.config import MIN_SIDE, check_bounds
from dualrc.errors import ConfigError
from dualrc.extras import require
from dualrc.files import make_folder, replacing
from dualrc.matcher import load
from dualrc.model.backbone import fold_batch_norm
from dualrc.model.correlation import normalize
from dualrc.model.dualrc import DualRCNet
from dualrc.onnx.matcher import FILES
from dualrc.onnx.metadata import ModelInfo, Part
from dualrc.onnx.modules import FeatureMaps, FeaturesModel, PairMatches, PairModel
from dualrc.onnx.portable import make_portable
from dualrc.pixels import RATIO, STRIDE
from dualrc.types import Size

# Opset version, supported by ONNX Runtime 1.14 and TensorRT 8.6 and later.
OPSET = 18
# Default number of matches of the pair model, a few more than `Matches.pair_score` uses.
TOP = 4096
# Pixels of the image per cell of each feature map.
_STRIDES = {"coarse": STRIDE, "fine": STRIDE // RATIO, "light": 1}
# Sizes of the two images that trace a model of any size. All sides differ, so that the tracer cannot confuse them.
_TRACED = (208, 176), (240, 144)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of an export."""

    # Width and height of both images, multiples of 16; None accepts any size.
    size: Size | None = None
    precision: Literal["float32", "float16"] = "float32"
    # Number of rows of the outputs of the pair model.
    top: int = TOP

    def __post_init__(self) -> None:
        if self.size is not None and any(side % STRIDE or side < MIN_SIDE for side in self.size):
            width, height = self.size
            limits = f"multiples of {STRIDE} and at least {MIN_SIDE}"
            raise ConfigError(f"A size of {width}x{height} can't be exported; both sides must be {limits}.")
        if self.precision not in ("float32", "float16"):
            raise ConfigError(f"Precision {self.precision!r} can't be exported; choose float32 or float16.")
        check_bounds(self, "top", at_least=1)


def export(
    out: str | Path,
    config: ExportConfig | None = None,
    *,
    preset: str = "default",
    weights: str | Path | None = None,
    parts: Sequence[Part] = ("features", "pair"),
) -> list[Path]:
    """Write features.onnx and pair.onnx into a folder; `dualrc.onnx.Matcher` reads them."""
    require("onnx", "onnx", "ONNX exports")
    config = config or ExportConfig()
    matcher = load(preset, weights=weights, device="cpu", precision="float32", engine="torch")
    network = matcher.network
    if not isinstance(network, DualRCNet):
        raise ConfigError(f"The preset {preset!r} can't be exported to ONNX; choose default or paper.")
    info = ModelInfo(
        part="features",
        preset=preset,
        weights=matcher.weights_hash or "",
        precision=config.precision,
        max_size=matcher.config.max_size,
        antialias=network.config.backbone.antialias,
        top=config.top,
        dualrc=metadata.version("dualrc"),
        calibration=matcher.calibration,
    )
    folder = make_folder(out)
    written = []
    for part in parts:
        model = make_model(network, part, config)
        _write(model, folder / FILES[part], replace(info, part=part), config.size)
        written.append(folder / FILES[part])
    return written


def make_model(network: DualRCNet, part: Part, config: ExportConfig) -> bytes:
    """Return one part of a network as a serialized ONNX model; this folds the batch norms of the network."""
    fold_batch_norm(network)
    dtype = getattr(torch, config.precision)
    sizes = _TRACED if config.size is None else (config.size, config.size)
    lit = network.subpixel is not None
    names = FeatureMaps._fields if lit else FeatureMaps._fields[:2]
    if part == "features":
        image = torch.zeros(1, 3, sizes[0][1], sizes[0][0])
        axes = {name: _axes(name, "") for name in ("image", *names)}
        return _to_onnx(FeaturesModel(network, dtype), {"image": image}, names, {} if config.size else axes)
    inputs: dict[str, Tensor] = {}
    axes = {}
    for number, (width, height) in enumerate(sizes):
        rows, columns, own = height // STRIDE, width // STRIDE, network.config.backbone
        maps = FeatureMaps(
            coarse=torch.rand(1, own.coarse_channels, rows, columns, dtype=dtype),
            fine=normalize(torch.rand(1, own.fine_channels, RATIO * rows, RATIO * columns, dtype=dtype)),
            light=torch.rand(1, height, width),
        )
        inputs |= {f"{name}{number}": getattr(maps, name) for name in names}
        axes |= {f"{name}{number}": _axes(name, str(number)) for name in names}
    model = _to_onnx(PairModel(network, config.top), inputs, PairMatches._fields, {} if config.size else axes)
    return _simplified(model)


def _axes(name: str, number: str) -> dict[int, str]:
    """Return the names of the height and width axes of a map."""
    first = 1 if name == "light" else 2
    return {first: f"{name}_height{number}", first + 1: f"{name}_width{number}"}


def _to_onnx(
    model: nn.Module, inputs: dict[str, Tensor], outputs: Sequence[str], axes: dict[str, dict[int, str]]
) -> bytes:
    """Trace a model; `axes` lists the dynamic axes by input and output.

    The TorchScript exporter takes seconds and works with every supported torch version. The exporter based on
    torch.export takes minutes, because many sizes are products of other sizes.
    """
    content = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # The tracer warns about constant lengths and about its deprecation.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            tuple(inputs.values()),
            content,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=axes,
        )
    return content.getvalue()


def _simplified(model: bytes) -> bytes:
    """Return the model with folded constants, which halves its size: the tracer repeats many shape computations."""
    runtime = require("onnxruntime", "onnx", "ONNX exports")
    with tempfile.TemporaryDirectory() as folder:
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        # This level uses standard operators only, which every runtime supports.
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder) / "model.onnx")
        runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return (Path(folder) / "model.onnx").read_bytes()


def _write(content: bytes, path: Path, info: ModelInfo, size: Size | None) -> None:
    import onnx

    model = onnx.load_from_string(content)
    standard = [entry for entry in model.opset_import if entry.domain == ""]
    del model.opset_import[:]
    model.opset_import.extend(standard)
    # Remove the shapes that the tracer inferred; some of them are wrong for other sizes.
    del model.graph.value_info[:]
    make_portable(model)
    for output in model.graph.output:
        if output.name != "count":
            rows = info.top if info.part == "pair" else 1
            output.type.tensor_type.shape.dim[0].dim_value = rows
        if info.part == "features" and size is not None:
            # The tracer gives sides of different lengths the same name.
            for axis, side in zip((-1, -2), size, strict=True):
                output.type.tensor_type.shape.dim[axis].dim_value = side // _STRIDES[output.name]
    onnx.helper.set_model_props(model, info.to_metadata())
    onnx.checker.check_model(model, full_check=True)
    with replacing(path) as temporary:
        onnx.save(model, str(temporary))
