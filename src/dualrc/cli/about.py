"""The command that tells what is here."""

from importlib import metadata

from dualrc.cli import common
from dualrc.config import PRESETS


@common.app.command()
def info() -> None:
    """Versions, devices, presets, weights and licence."""
    import torch

    from dualrc.model.checkpoint import bundled, file_hash
    from dualrc.provenance import versions

    table = common.table("dualrc")
    for package, version in versions("poselib").items():
        table.add_row(package, version)
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.insert(0, f"cuda ({torch.cuda.get_device_name()})")
    if torch.backends.mps.is_available():
        devices.insert(0, "mps")
    table.add_row("devices, best first", ", ".join(devices))
    for name, (network, matcher) in PRESETS.items():
        path = bundled(name)
        weights = "give a file with --weights" if path is None else f"inside the package, {file_hash(path)}"
        table.add_row(f"preset {name}", f"{network.backbone.kind}, at most {matcher.max_size} px; weights: {weights}")
    table.add_row("licence", metadata.metadata("dualrc")["License-Expression"] or "Apache-2.0")
    common.screen.print(table)
