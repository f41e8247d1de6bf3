"""Settings of network and matcher, as frozen dataclasses; `toml.py` reads and writes them."""

import math
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict, get_args

from dualrc.errors import ConfigError

Fusion = Literal["a", "b", "c", "d", "e"]

# Shortest side of an image, and of the network input, in pixels.
MIN_SIDE = 32
# Upper bounds for the config in a weights file. Larger networks are a mistake or an attack.
_MOST_CHANNELS, _MOST_BLOCKS = 4096, 64


def check_bounds(
    config: Any,
    *names: str,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    unit: str = "",
) -> None:
    """Raise ConfigError if a field, or an entry of a tuple, is out of bounds or not finite; None is not checked."""
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    told = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))
    told += f" {unit}" if unit else ""
    for name in names:
        value = getattr(config, name)
        for entry in value if isinstance(value, tuple) else (value,):
            if entry is not None and not (at_least <= entry <= at_most and above < entry < below):
                subject = f"{name} contains {entry}: every entry" if isinstance(value, tuple) else f"{name} = {value}"
                raise ConfigError(f"{subject} must be {told}{'' if math.isfinite(entry) else ' and finite'}.")


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The paper's backbone: ResNet up to conv4, with an FPN-like top-down path to 1/4 of the image."""

    # Depth of the ResNet; also selects this class in TOML.
    kind: Literal["resnet101", "resnet50"] = "resnet101"
    # Convolution with the stride in a stage's first block: "3x3" in torchvision's files, "1x1" in the first ResNets.
    stride_on: Literal["3x3", "1x1"] = "3x3"
    # Fusion of the levels: one of the five variants in the paper's appendix.
    fusion: Fusion = "a"
    # Channels of every level after a 1x1 convolution. With 1024, conv4 is used unchanged.
    channels: Literal[256, 1024] = 1024

    # Whether images are smoothed before downscaling. The published network does not smooth them.
    antialias: ClassVar[bool] = False

    @property
    def coarse_channels(self) -> int:
        """Number of channels of the coarse map."""
        return self.channels

    @property
    def fine_channels(self) -> int:
        """Number of channels of the fine map."""
        return self.channels


@dataclass(frozen=True, kw_only=True)
class TrunkConfig:
    """The backbone of NCNet and Sparse-NCNet: ResNet up to conv4."""

    # Selects this class in TOML.
    kind: Literal["trunk"] = "trunk"
    # Depth of the ResNet.
    network: Literal["resnet101", "resnet50"] = "resnet101"
    # As in ResNetConfig.
    stride_on: Literal["3x3", "1x1"] = "3x3"
    # Stride of the map in pixels: 16, or 8 without the stride of the last stage.
    stride: Literal[8, 16] = 8

    antialias: ClassVar[bool] = False
    coarse_channels: ClassVar[int] = 1024
    fine_channels: ClassVar[int] = 1024


@dataclass(frozen=True, kw_only=True)
class CompactConfig:
    """A small residual network for laptops, trained from scratch."""

    # Selects this class in TOML.
    kind: Literal["compact"] = "compact"
    # Channels of the levels at 1/2, 1/4, 1/8, 1/16 and 1/32 of the image.
    widths: tuple[int, int, int, int, int] = (32, 64, 128, 256, 256)
    # Residual blocks at 1/4, 1/8, 1/16 and 1/32.
    depths: tuple[int, int, int, int] = (1, 1, 2, 2)
    # Channels of the coarse features, at 1/16 of the image.
    coarse_channels: int = 256
    # Channels of the fine features, at 1/4 of the image.
    fine_channels: int = 96
    # Whether the local contrast is a fourth input channel. It makes dark and bright images similar.
    contrast: bool = False

    antialias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self, "widths", "coarse_channels", "fine_channels", at_least=1, at_most=_MOST_CHANNELS)
        check_bounds(self, "depths", at_least=0, at_most=_MOST_BLOCKS)


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Self- and cross-attention over the coarse cells of both images before correlation."""

    # Number of layers, each with self- and cross-attention.
    layers: int = 2
    # Channels of the tokens.
    width: int = 128
    # Number of attention heads.
    heads: int = 4

    def __post_init__(self) -> None:
        check_bounds(self, "layers", "width", "heads", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ConsensusConfig:
    """The learned 4D convolutions that refine the coarse correlation."""

    # Side of the kernel of each 4D convolution.
    kernel_sizes: tuple[int, ...] = (3, 3)
    # Output channels of each 4D convolution; the last must be 1.
    channels: tuple[int, ...] = (16, 1)
    # Weights before training: close to the identity, or uniform as in the published code.
    initialization: Literal["identity", "uniform"] = "identity"

    def __post_init__(self) -> None:
        check_bounds(self, "kernel_sizes", at_least=1, at_most=_MOST_BLOCKS)
        check_bounds(self, "channels", at_least=1, at_most=_MOST_CHANNELS)
        if not 1 <= len(self.channels) <= _MOST_BLOCKS:
            raise ConfigError(f"channels has {len(self.channels)} entries; give 1 to {_MOST_BLOCKS}.")


@dataclass(frozen=True, kw_only=True)
class FineConfig:
    """Fine search, guided by the coarse tensor, and sub-pixel refinement."""

    # Position at which fine cell i reads the coarse tensor: "corner" at i/4, as published; "center" at its own center.
    reading: Literal["corner", "center"] = "center"
    # Share of image 0's coarse cells, best first, whose fine cells are queried. The paper uses 0.5.
    query_share: float = 1.0
    # Fine score: the cosine if 0, otherwise exp((cosine - 1) / temperature), which is sharper.
    temperature: float = 0.0
    # Whether both points of a match are refined to sub-pixel accuracy.
    subpixel: bool = True
    # Hidden units of the learned correction and confidence. 0 uses the soft-argmax alone.
    subpixel_hidden: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "query_share", above=0, at_most=1)
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature = {self.temperature} must be finite and not negative; 0 gives the plain cosine."
            )
        check_bounds(self, "subpixel_hidden", at_least=0, at_most=_MOST_CHANNELS)


@dataclass(frozen=True, kw_only=True)
class NCNetConfig:
    """NCNet: matches are maxima of the coarse tensor itself."""

    # Selects this class in TOML.
    kind: Literal["ncnet"] = "ncnet"
    # Pooling factor of the correlation along each axis in both images; 1 disables pooling.
    pool: Literal[1, 2, 3, 4] = 2
    # Whether scores are softmax probabilities over the other image, as published for InLoc.
    softmax: bool = False


@dataclass(frozen=True, kw_only=True)
class SparseNCNetConfig:
    """Sparse-NCNet: only the best correlations of each cell are kept."""

    # Selects this class in TOML.
    kind: Literal["sparse-ncnet"] = "sparse-ncnet"
    # Number of correlations kept per cell, in both directions.
    neighbors: int = 10
    # Pooling factor of the features along each axis; 1 disables pooling.
    pool: Literal[1, 2, 3, 4] = 2
    # Whether a soft-argmax over the surrounding 3x3 cells refines matches.
    soft: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, "neighbors", at_least=1, at_most=1000)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Configuration of a network, stored in its weights file."""

    # Preset that the network belongs to.
    preset: str
    # Backbone; its `kind` selects the class.
    backbone: ResNetConfig | CompactConfig | TrunkConfig
    # Neighborhood consensus.
    consensus: ConsensusConfig = field(default_factory=ConsensusConfig)
    # Fine search and refinement; for DualRC-Net only.
    fine: FineConfig = field(default_factory=FineConfig)
    # Settings of NCNet or Sparse-NCNet; None selects DualRC-Net.
    ncnet: NCNetConfig | SparseNCNetConfig | None = None
    # Attention between the coarse features of both images; for DualRC-Net only. None has no attention, as in the paper.
    context: ContextConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.backbone, TrunkConfig) != (self.ncnet is not None):
            raise ConfigError('backbone.kind = "trunk" and the table ncnet require each other; give both or neither.')
        if self.ncnet is not None and self.context is not None:
            raise ConfigError("The tables ncnet and context cannot be combined; remove one.")

    @property
    def resnet(self) -> ResNetConfig | TrunkConfig | None:
        """The backbone config if it contains a ResNet, whose weights are not trained here."""
        return None if isinstance(self.backbone, CompactConfig) else self.backbone


Quality = Literal["standard", "high", "search"]


def check_quality(quality: str) -> None:
    """Raise ConfigError for an unknown quality."""
    if quality not in get_args(Quality):
        raise ConfigError(f"quality = {quality!r} is unknown; choose {', '.join(get_args(Quality))}.")


@dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """Settings of the matcher; every field is also an argument of `dualrc.load`."""

    # Longest side of the network input if `size` is not given. Larger images are scaled down to it.
    # Images with an aspect ratio above 4 get a longer side, but no more pixels than a square.
    max_size: int = 1024
    # Exact long side of the network input, scaling up or down. None uses the image's own, at most max_size.
    size: int | None = None
    # Number of best matches to keep. None keeps all.
    top: int | None = None
    # Lowest score to keep. A score is the probability that a match is correct within 3 px; see docs/scores.md.
    min_score: float = 0.0
    # "high" matches again after warping one image into the frame of the other by the dominant motion. If the matches
    # agree too little, it also starts from smaller sizes and from tilted views of both images. This is much better for
    # rotated, zoomed or oblique images. "search" rotates the views too. docs/concepts/sizes.md has the times. Both
    # enlarge images to 1024 px, by a factor of at most three, unless `size` is given.
    quality: Quality = "standard"
    # Largest scale factor to search, up and down, if matches do not agree with each other. 1 disables the search.
    max_zoom: float = 4.0
    # Largest foreshortening to search if matches agree at no scale. The search uses tilts of 3 and 9 up to this one.
    # Below 3 there is no search, nor with max_zoom = 1.
    max_tilt: float = 3.0
    # Memory in GiB for matching a pair on the device, in addition to the weights. None uses most of the free memory.
    # Images that do not fit are matched at a smaller size, with a warning.
    max_memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_size", "size", "top"):
            value = getattr(self, name)
            if value is None and name != "max_size":
                continue
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise ConfigError(f"{name} = {value!r} must be a whole number.") from None
        check_bounds(self, "max_size", "size", at_least=MIN_SIDE, unit="pixels")
        if self.top is not None and self.top < 0:
            raise ConfigError(f"top = {self.top} must not be negative; omit it to keep all matches.")
        if not math.isfinite(self.min_score):
            raise ConfigError(f"min_score = {self.min_score} must be a number; 0 keeps all matches.")
        check_quality(self.quality)
        if not 1 <= self.max_zoom <= 16:
            raise ConfigError(f"max_zoom = {self.max_zoom} must be from 1 (no search over scales) to 16.")
        if not 1 <= self.max_tilt <= 9:
            raise ConfigError(f"max_tilt = {self.max_tilt} must be from 1 (no search over tilted views) to 9.")
        check_bounds(self, "max_memory", above=0, unit="GiB")


class MatcherOptions(TypedDict, total=False):
    """The fields of MatcherConfig as keyword arguments of `dualrc.load`."""

    max_size: int
    size: int | None
    top: int | None
    min_score: float
    quality: Quality
    max_zoom: float
    max_tilt: float
    max_memory: float | None


def _published(name: str, ncnet: NCNetConfig | SparseNCNetConfig) -> tuple[NetworkConfig, MatcherConfig]:
    network = NetworkConfig(
        preset=name,
        backbone=TrunkConfig(),
        consensus=ConsensusConfig(initialization="uniform"),
        fine=FineConfig(subpixel=False),
        ncnet=ncnet,
    )
    return network, MatcherConfig(max_size=1600, max_zoom=1.0, max_tilt=1.0)


PRESETS: dict[str, tuple[NetworkConfig, MatcherConfig]] = {
    "default": (
        NetworkConfig(
            preset="default",
            backbone=CompactConfig(depths=(1, 1, 2, 4), coarse_channels=384, contrast=True),
            consensus=ConsensusConfig(channels=(8, 1)),
            fine=FineConfig(subpixel_hidden=192),
        ),
        MatcherConfig(),
    ),
    "paper": (
        NetworkConfig(
            preset="paper",
            backbone=ResNetConfig(),
            consensus=ConsensusConfig(initialization="uniform"),
            fine=FineConfig(reading="corner", query_share=0.5, subpixel=False),
        ),
        # The paper matches the images as they are.
        MatcherConfig(max_size=1600, max_zoom=1.0, max_tilt=1.0),
    ),
    # The configurations published for HPatches, with the consensus of the models trained on photographs of places.
    "ncnet": _published("ncnet", NCNetConfig()),
    "sparse-ncnet": _published("sparse-ncnet", SparseNCNetConfig()),
}


def preset(name: str) -> tuple[NetworkConfig, MatcherConfig]:
    """Return the network and matcher settings of a preset."""
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
    return PRESETS[name]
