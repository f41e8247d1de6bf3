"""Matcher for ONNX Runtime, without torch; it returns Matches in the pixels of the images."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualrc.agreement import measure_agreement
from dualrc.config import MIN_SIDE
from dualrc.errors import ConfigError, ImageError, WeightsError
from dualrc.files import first_line
from dualrc.image import ImageInput, Scale, network_size, read
from dualrc.matches import Matches
from dualrc.onnx.metadata import ModelInfo, Part
from dualrc.onnx.resize import resize
from dualrc.texture import Seen, has_texture, is_suspicious, without_blank_areas
from dualrc.types import Size

FILES: dict[Part, str] = {"features": "features.onnx", "pair": "pair.onnx"}
# Default execution providers in order of preference; unavailable ones are skipped.
PROVIDERS = ("CUDAExecutionProvider", "DmlExecutionProvider", "CoreMLExecutionProvider", "CPUExecutionProvider")

Paths = str | Path | tuple[str | Path, str | Path]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ImageFeatures:
    """Features of an image, reusable for many matches."""

    # Feature maps by output name of the features model.
    maps: dict[str, npt.NDArray[Any]]
    scale: Scale
    # (h, w), brightness of the network input from 0 to 255.
    gray: npt.NDArray[np.float32]
    # Weights and precision of the model, because features of different models cannot be compared.
    made_by: tuple[str, str]

    def __repr__(self) -> str:
        return "ImageFeatures({}x{}, seen as {}x{})".format(*self.scale.image_size, *self.scale.input_size)


class RawMatches(NamedTuple):
    """Matches of the pair model, best first, in pixels of the network input and with uncalibrated scores."""

    points0: npt.NDArray[np.float32]  # (n 2)
    points1: npt.NDArray[np.float32]  # (n 2)
    scores: npt.NDArray[np.float32]  # (n)
    # Whether the search proved that both points are the best counterparts of each other.
    exact: npt.NDArray[np.bool_]  # (n)


class Matcher:
    """Matcher that runs models exported by `dualrc export onnx`.

    It matches in standard quality with a single pass: there is no search over scales, and masks are not supported.
    """

    def __init__(self, path: Paths, providers: Sequence[Any] | None = None, *, threads: int | None = None) -> None:
        """Load the models from a folder, or from the paths of the features model and of the pair model.

        `providers` are execution providers in the format of ONNX Runtime; None selects the best available ones.
        `threads` limits the number of CPU threads; None uses one per core.
        """
        runtime = _import_runtime()
        paths = (Path(path) / FILES["features"], Path(path) / FILES["pair"]) if isinstance(path, str | Path) else path
        if providers is None:
            providers = [name for name in PROVIDERS if name in runtime.get_available_providers()]
        self._sessions, infos = {}, []
        for part, file in zip(FILES, paths, strict=True):
            session = _open(runtime, Path(file), providers, threads)
            info = ModelInfo.from_metadata(session.get_modelmeta().custom_metadata_map, str(file))
            if info.part != part:
                raise WeightsError(f"{file} is a {info.part} model; give the features model and then the pair model.")
            self._sessions[part] = session
            infos.append(info)
        self.model = infos[1]
        if _maker(infos[0]) != _maker(infos[1]):
            raise WeightsError(f"{paths[0]} and {paths[1]} were not exported together; export both again.")
        self.providers: list[str] = self._sessions["pair"].get_providers()
        # Fixed input size of the models, or None if they accept any multiples of 16.
        shape = self._sessions["features"].get_inputs()[0].shape
        self.input_size: Size | None = (shape[3], shape[2]) if isinstance(shape[2], int) else None
        calibration = self.model.calibration
        self._info = {
            "dualrc": metadata.version("dualrc"),
            "onnxruntime": runtime.__version__,
            "engine": "onnx",
            "providers": self.providers,
            "preset": self.model.preset,
            "precision": self.model.precision,
            "weights": self.model.weights,
            "calibration": None if calibration is None else calibration.hash,
        }

    def __repr__(self) -> str:
        size = "any size" if self.input_size is None else "{}x{}".format(*self.input_size)
        return f"Matcher({self.model.preset!r} on {self.providers[0]}, {self.model.precision}, {size})"

    @property
    def info(self) -> dict[str, Any]:
        """Versions, providers and weights, stored with every result."""
        return dict(self._info)

    def features(self, image: ImageInput, *, size: int | None = None) -> ImageFeatures:
        """Return the features of an image; `size` is the long side of the network input."""
        pixels = read(image)
        own = (pixels.shape[1], pixels.shape[0])
        scale = Scale(image_size=own, input_size=self._network_size(own, size))
        values = resize(pixels, scale.input_size, antialias=self.model.antialias)[None]
        session = self._sessions["features"]
        names = [output.name for output in session.get_outputs()]
        maps = dict(zip(names, session.run(names, {"image": values}), strict=True))
        return ImageFeatures(maps=maps, scale=scale, gray=values[0].mean(axis=0), made_by=_maker(self.model))

    def match(
        self,
        image0: ImageInput | ImageFeatures,
        image1: ImageInput | ImageFeatures,
        *,
        size: int | None = None,
        top: int | None = None,
        min_score: float = 0.0,
    ) -> Matches:
        """Return the matches of two images, best first; the exported pair model limits their number."""
        features0, features1 = (
            image if isinstance(image, ImageFeatures) else self.features(image, size=size) for image in (image0, image1)
        )
        return self.match_features(features0, features1, top=top, min_score=min_score)

    def match_features(
        self, features0: ImageFeatures, features1: ImageFeatures, *, top: int | None = None, min_score: float = 0.0
    ) -> Matches:
        """Match two images by their features; info["exact"] is the fraction of exact matches."""
        if top is not None and top < 0:
            raise ConfigError(f"top = {top} must not be negative; leave it out to keep all matches.")
        if not math.isfinite(min_score):
            raise ConfigError(f"min_score = {min_score} must be a number; 0 keeps all matches.")
        found = self.match_raw(features0, features1)
        info = {
            **self._info,
            "network_size0": features0.scale.input_size,
            "network_size1": features1.scale.input_size,
            "exact": round(float(found.exact.mean()), 4) if len(found.exact) else 1.0,
        }
        scores = found.scores
        if self.model.calibration is not None:
            scores, info["pair_model"] = self.model.calibration.matches(scores), asdict(self.model.calibration.pairs)
        matches = Matches(
            points0=features0.scale.to_image(found.points0),
            points1=features1.scale.to_image(found.points1),
            scores=scores,
            size0=features0.scale.image_size,
            size1=features1.scale.image_size,
            info=info,
        )
        if self.model.calibration is not None and (is_suspicious(matches) or not measure_agreement(matches).firm):
            seen = [Seen(has_texture(own.gray), own.scale) for own in (features0, features1)]
            matches = without_blank_areas(matches, seen)
        if min_score > 0:
            matches = matches.above(min_score)
        return matches if top is None or top >= len(matches) else matches[:top]

    def match_raw(self, features0: ImageFeatures, features1: ImageFeatures) -> RawMatches:
        """Return the output of the pair model without empty rows."""
        if any(features.made_by != _maker(self.model) for features in (features0, features1)):
            raise ConfigError("These features come from other models; extract them with features() of this matcher.")
        session = self._sessions["pair"]
        both = enumerate((features0, features1))
        inputs = {f"{name}{side}": values for side, features in both for name, values in features.maps.items()}
        wanted = {node.name for node in session.get_inputs()}
        points0, points1, scores, count, exact = session.run(
            ["points0", "points1", "scores", "count", "exact"], {name: inputs[name] for name in wanted}
        )
        rows = slice(0, int(count[0]))
        return RawMatches(points0[rows], points1[rows], scores[rows], exact[rows])

    def _network_size(self, own: Size, size: int | None) -> Size:
        if self.input_size is None:
            return network_size(own, long_side=size, max_size=self.model.max_size)
        width, height = self.input_size
        if size is not None and size != max(width, height):
            message = f"These models take images of {width}x{height} only; leave out size, or export with --dynamic."
            raise ConfigError(message)
        if min(own) < MIN_SIDE:
            raise ImageError("The image of {}x{} pixels is too small; give a larger one.".format(*own))
        return self.input_size


def _maker(info: ModelInfo) -> tuple[str, str]:
    return info.weights, info.precision


def _import_runtime() -> Any:
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        # The extra `onnx` would also install torch.
        raise ConfigError(f"ONNX models need onnxruntime ({error}): pip install onnxruntime.") from error


def _open(runtime: Any, path: Path, providers: Sequence[Any], threads: int | None) -> Any:
    if not path.is_file():
        raise WeightsError(f"The model {path} does not exist; write it with `dualrc export onnx`.")
    options = runtime.SessionOptions()
    # Level 3 logs errors only.
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    if "DmlExecutionProvider" in providers:
        # DirectML does not support memory patterns.
        options.enable_mem_pattern = False
    try:
        return runtime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:
        # ONNX Runtime raises exceptions of its C++ library, which have no common base class.
        raise WeightsError(f"{path} can't be opened ({first_line(error)}); export it again.") from error
