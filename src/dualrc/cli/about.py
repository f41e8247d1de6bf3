"""The command that describes the installation."""

from importlib import metadata

from dualrc.cli import common
from dualrc.config import PRESETS
from dualrc.errors import ConfigError


@common.app.command()
def info() -> None:
    """Print versions, devices, engines, presets, weights and license.

    Attach the output to a bug report.

    Examples:
      dualrc info
      DUALRC_ENGINE=torch dualrc info
    """
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
    table.add_row("engines", f"{', '.join(ops.names())}; set {ops.VARIABLE} to choose one")
    for name, (network, matcher) in PRESETS.items():
        path = bundled(name)
        weights = "pass a file with --weights" if path is None else f"bundled, {file_hash(path)}"
        table.add_row(f"preset {name}", f"{network.backbone.kind}, at most {matcher.max_size} px; weights: {weights}")
    table.add_row("license", metadata.metadata("dualrc")["License-Expression"] or "Apache-2.0")
    common.screen.print(table)
