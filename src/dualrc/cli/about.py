"""The command that tells what is here."""

from importlib import metadata

from dualrc.cli import common
from dualrc.config import PRESETS
from dualrc.errors import ConfigError


@common.app.command()
def info() -> None:
    """Versions, devices, engines, presets, weights and licence."""
    import torch

    from dualrc import ops
    from dualrc.model.checkpoint import bundled, file_hash
    from dualrc.provenance import versions

    table = common.table("dualrc")
    for package, version in versions("poselib").items():
        table.add_row(package, version)
    devices = {"cpu": "cpu"}
    if torch.backends.mps.is_available():
        devices = {"mps": "mps", **devices}
    if torch.cuda.is_available():
        devices = {"cuda": f"cuda ({torch.cuda.get_device_name()})", **devices}
    table.add_row("devices, best first", ", ".join(devices.values()))
    for device in devices:
        try:
            engine = ops.choose(torch.device(device)).name
        except ConfigError as error:
            engine = str(error)
        table.add_row(f"engine on {device}", engine)
    table.add_row("engines", f"{', '.join(ops.names())}; {ops.VARIABLE} chooses one")
    for name, (network, matcher) in PRESETS.items():
        path = bundled(name)
        weights = "give a file with --weights" if path is None else f"inside the package, {file_hash(path)}"
        table.add_row(f"preset {name}", f"{network.backbone.kind}, at most {matcher.max_size} px; weights: {weights}")
    table.add_row("licence", metadata.metadata("dualrc")["License-Expression"] or "Apache-2.0")
    common.screen.print(table)
