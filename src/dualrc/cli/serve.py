"""Command that starts the service."""

import logging
import os
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from dualrc.cli import common, running
from dualrc.errors import ConfigError
from dualrc.extras import require

_limit = partial(typer.Option, rich_help_panel="Limits")
# Pillow refuses to decode images with more megapixels.
_MOST_PIXELS = 178


@running.command(waits=False)
def serve(
    reconstruction: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Output folder of `dualrc reconstruct --out DIR`, to view in 3D."),
    ] = None,
    *,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder with the images of the reconstruction. Default: the folder that it was made from."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address other than localhost needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="DUALRC_TOKEN",
            help="Token that requests must contain; `auto` generates and prints one. Prefer the environment variable.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    network: Annotated[common.LoadOptions, common.shared("preset", "weights", "device", "size", "max_memory")],
    max_bytes: Annotated[float, _limit(metavar="MIB", min=0.01, help="Maximum size of an uploaded file.")] = 64,
    max_pixels: Annotated[
        float, _limit(metavar="MP", min=0.01, max=_MOST_PIXELS, help="Maximum megapixels of an uploaded image.")
    ] = 100,
    max_images: Annotated[int, _limit(min=2, help="Maximum number of stored images.")] = 256,
    max_queue: Annotated[int, _limit(min=1, help="Maximum number of queued jobs.")] = 64,
    max_client_jobs: Annotated[int, _limit(min=1, help="Maximum number of queued jobs of one client.")] = 16,
    keep: Annotated[float, _limit(metavar="S", min=1, help="Seconds after which unused images expire.")] = 3600,
    limit: Annotated[float, _limit(metavar="S", min=1, help="Time limit of a job.")] = 120,
    cache: Annotated[float, _limit(metavar="GIB", min=0.05, help="Memory for cached features.")] = 0.75,
    threads: common.ThreadsOption = None,
) -> dict[str, Any]:
    """Start the web page and the HTTP service.

    docs/service.md describes the service; /openapi.json is its specification.

    Examples:
      dualrc serve --open
      dualrc serve town      # also shows a reconstruction in 3D
      dualrc serve --host 0.0.0.0 --token auto      # for other machines
    """
    for module in ("fastapi", "uvicorn", "python_multipart"):
        require(module, "web", "The page and the service")
    from dualrc.web import server
    from dualrc.web.app import create_app
    from dualrc.web.reconstruction import Reconstruction
    from dualrc.web.settings import MIB, ServerConfig

    local = server.is_loopback(host)
    if not local and token is None:
        raise ConfigError(
            f"Other machines can reach {host}; set a token (--token auto, or DUALRC_TOKEN), or omit --host."
        )
    if token == "auto":
        token = secrets.token_urlsafe(24)
    config = ServerConfig(
        token=token,
        hosts=(*dict.fromkeys((host, *server.LOOPBACK)),) if local else (),
        max_bytes=int(max_bytes * MIB),
        max_pixels=int(max_pixels * 1e6),
        max_images=max_images,
        max_queue=max_queue,
        max_client_jobs=max_client_jobs,
        keep_s=keep,
        limit_s=limit,
        feature_bytes=int(cache * 1024 * MIB),
    )
    if images is not None and reconstruction is None:
        raise ConfigError("--images belongs to a reconstruction; give both: dualrc serve DIR --images FOLDER.")
    # Check everything that can fail before loading the network.
    model = None if reconstruction is None else Reconstruction(reconstruction, images)
    if model is not None:
        where = model.folder or "not found; give their folder with --images"
        common.screen.print(f"Images of the reconstruction: {where}", highlight=False, soft_wrap=True)
    with server.listen(host, port) as listener:
        url = server.url_of(listener)
        with common.status("Loading the network..."):
            matcher = network.load(threads)
        app = create_app(matcher, config, reconstruction=model)
        page = url if token is None else f"{url}#token={quote(token, safe='')}"

        def tell() -> None:
            common.screen.print(f"Serving on {matcher.device}: {page}\nCtrl-C stops.", highlight=False, soft_wrap=True)
            sys.stdout.flush()
            if browser:
                import webbrowser

                webbrowser.open(page)

        _log_to_standard_error()
        server.Server(app, started=tell).run(sockets=[listener])
    common.screen.print("Stopped; uploads are removed.", highlight=False)
    if server.is_busy():
        # Exit at once: native code on another thread can crash while the interpreter shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return {"url": url}


def _log_to_standard_error() -> None:
    """Send the access log (one JSON line per request) and warnings of uvicorn to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("dualrc.web.access")
    access.propagate = False
    if not common.quiet:
        access.addHandler(handler)
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.addHandler(handler)
    uvicorn.setLevel(logging.WARNING)
