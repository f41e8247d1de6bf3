"""Comparison of several weights files in one run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dualrc.config import Fusion, NetworkConfig, ResNetConfig
from dualrc.errors import ConfigError, WeightsError
from dualrc.evaluation.matchers import DualRC, MatcherSettings, PairMatcher
from dualrc.model.checkpoint import bundled, file_hash, load_weights


@dataclass(frozen=True, kw_only=True)
class Network:
    """A weights file and the content of its header."""

    label: str
    config: NetworkConfig
    weights: Path
    weights_hash: str

    @property
    def variant(self) -> tuple[Fusion, int] | None:
        """Fusion variant and channels, if it is a variant of the paper."""
        backbone = self.config.backbone
        return (backbone.fusion, backbone.channels) if isinstance(backbone, ResNetConfig) else None


def variant_label(fusion: str, channels: int) -> str:
    """Return the label of a variant in tables."""
    return f"({fusion}) {channels}"


def read_networks(paths: Sequence[Path], preset: str = "default") -> list[Network]:
    """Read weights files completely, so that a damaged file is reported before matching."""
    if not paths:
        own = bundled(preset)
        if own is None:
            raise WeightsError(f"The package has no weights for the preset {preset!r}; pass files with --weights.")
        paths = [own]
    networks: list[Network] = []
    for path in paths:
        config = load_weights(path).config
        network = Network(label=config.preset, config=config, weights=path, weights_hash=file_hash(path))
        if network.variant is not None:
            network = replace(network, label=variant_label(*network.variant))
        for other in networks:
            if other.weights_hash == network.weights_hash:
                raise ConfigError(f"{other.weights} and {path} have the same weights; pass each once.")
        networks.append(network)
    labels = [network.label for network in networks]
    # Files of the same variant are distinguished by their paths.
    return [n if labels.count(n.label) == 1 else replace(n, label=f"{n.label}, {n.weights}") for n in networks]


def network_matcher(network: Network, settings: MatcherSettings, size: int | None) -> PairMatcher:
    """Make a matcher from a network, at this size."""
    matcher = DualRC(replace(settings, preset=network.config.preset, weights=network.weights, size=size))
    # Each network and size has its own name, so that their stores are not reported as outdated.
    variant = network.config.preset if network.variant is None else "{}{}".format(*network.variant)
    matcher.name = "-".join(["dualrc", variant, *([str(size)] if size else []), network.weights_hash[:6]])
    return matcher
