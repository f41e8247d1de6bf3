"""Commands that export the network to other runtimes."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dualrc.cli import common, running
from dualrc.errors import ConfigError

export_app = typer.Typer(help="Export the network to other runtimes.", no_args_is_help=True)
common.app.add_typer(export_app, name="export")


@running.command("onnx", app=export_app)
def export_onnx(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for features.onnx and pair.onnx.")],
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Width and height of both images, as multiples of 16.")
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Accept images of any size; this is the default.")] = False,
    part: Annotated[Literal["features", "pair", "both"], typer.Option(help="Model to export.")] = "both",
    precision: Annotated[
        Literal["float32", "float16"], typer.Option(help="Precision of the backbone and the features.")
    ] = "float32",
    top: Annotated[
        int | None,
        typer.Option(help="Maximum number of matches of a pair; TensorRT needs fewer than 3840. Default: 4096."),
    ] = None,
    preset: Annotated[str, common.SHARED["preset"]] = "default",
    weights: Annotated[Path | None, common.SHARED["weights"]] = None,
) -> dict[str, Any]:
    """Export ONNX models: one from image to features, one from the features of two images to matches.

    dualrc.onnx.Matcher runs both without torch; docs/onnx.md describes their inputs and outputs.

    Examples:
      dualrc export onnx models
      dualrc export onnx models --size 640x480 --precision float16
    """
    from dualrc.onnx.export import TOP, ExportConfig, export

    if size is not None and dynamic:
        raise ConfigError("--size and --dynamic exclude each other; give one of them.")
    config = ExportConfig(
        size=None if size is None else common.parse_size(size), precision=precision, top=TOP if top is None else top
    )
    with common.status("Exporting; this takes a minute..."):
        files = export(
            out, config, preset=preset, weights=weights, parts=("features", "pair") if part == "both" else (part,)
        )
    common.written(*files)
    return {"files": files, "size": config.size, "precision": precision, "top": config.top}
