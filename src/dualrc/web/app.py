"""FastAPI application: routes, middleware, error handlers and the web page."""

import asyncio
import logging
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Match
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import dualrc
from dualrc.colmap import import_pycolmap
from dualrc.config import Quality
from dualrc.errors import ConfigError, DualRCError
from dualrc.matcher import Matcher
from dualrc.web import openapi, routes_images, routes_pairs, routes_sets, schemas
from dualrc.web.answers import service_of
from dualrc.web.examples import EXAMPLES, Examples
from dualrc.web.metrics import Metrics
from dualrc.web.problems import Problem, from_error
from dualrc.web.reconstruction import Reconstruction
from dualrc.web.security import Guard, answer
from dualrc.web.service import Service
from dualrc.web.settings import ServerConfig

logger = logging.getLogger(__name__)
public = APIRouter(tags=["server"])
router = APIRouter(tags=["server"])
STATIC = Path(__file__).parent / "static"
# Maximum number of seconds between two removals of expired data.
_SWEEP_S = 30.0
# Maximum number of models that are fitted at the same time.
_FITTING = 2
_DESCRIPTION = "Dense correspondences between two images. Everything stays on this machine."


class _Page(StaticFiles):
    """Static files of the page. Browsers revalidate them, so a new version appears at once."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or the page itself for the root."""
        answer = await super().get_response(path, scope)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


def create_app(
    matcher: Matcher,
    config: ServerConfig | None = None,
    *,
    reconstruction: Reconstruction | None = None,
    prepare: bool = True,
) -> FastAPI:
    """Return the app that serves a matcher and, optionally, a reconstruction.

    `prepare` warms up the matcher and renders the examples in the background.
    """
    config = config or ServerConfig()
    metrics = Metrics()
    # Import pycolmap here, not at the first download: imported on another thread, it replaces the signal handlers.
    with suppress(ConfigError):
        import_pycolmap()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory(prefix="dualrc-serve-") as folder:
            service = app.state.service = Service(matcher, Path(folder), config)
            examples = app.state.examples = Examples(service.images)
            app.state.uploading = asyncio.Semaphore(config.max_uploads)
            app.state.fitting = asyncio.Semaphore(_FITTING)
            app.state.streams = asyncio.Semaphore(config.max_streams)
            service.jobs.open()
            sweeper = asyncio.create_task(_sweep(service))
            if prepare:
                service.jobs.when_idle(service.warm_up)
                threading.Thread(target=_render, args=(examples, service), name="examples", daemon=True).start()
            try:
                yield
            finally:
                sweeper.cancel()
                await asyncio.to_thread(service.jobs.close)

    app = FastAPI(
        title="dualrc",
        version=dualrc.__version__,
        description=_DESCRIPTION,
        lifespan=life,
        # FastAPI's documentation pages load scripts from other servers.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=openapi.errors(*openapi.EVERY),
    )
    app.state.metrics, app.state.reconstruction = metrics, reconstruction
    app.add_middleware(Guard, config=config, metrics=metrics)
    _add_handlers(app)
    app.include_router(public)
    # The Guard checks the token; this is its description in /openapi.json.
    token = [] if config.token is None else [Security(HTTPBearer(scheme_name="token", auto_error=False))]
    pairs, sets = (routes_pairs.router, routes_pairs.jobs_router), (routes_sets.router, routes_sets.model_router)
    for part in (router, routes_images.router, *pairs, *sets):
        app.include_router(part, dependencies=token)
    # Not mounted: a mount at the root would answer for routes that require another method.
    app.router.default = _Page(directory=STATIC, html=True, check_dir=False)
    return app


@public.get("/healthz", summary="Check that the server runs", response_model=schemas.Health)
async def _health() -> dict[str, str]:
    """Return the status and the version; this route needs no token."""
    return {"status": "ok", "version": dualrc.__version__}


@router.get("/v1/info", summary="Versions and limits of this server", response_model=schemas.Info)
async def _info(request: Request) -> dict[str, Any]:
    """Return versions, limits and examples."""
    service, model = service_of(request), request.app.state.reconstruction
    matcher, settings = service.matcher, asdict(service.config)
    return {
        # The limits, by their names in the config.
        **{name: settings[name] for name in schemas.Info.model_fields.keys() & settings.keys()},
        "version": dualrc.__version__,
        "preset": matcher.network.config.preset,
        "weights": matcher.weights_hash,
        "device": str(matcher.device),
        "engine": matcher.engine,
        "precision": matcher.precision,
        "qualities": list(get_args(Quality)),
        "examples": [example.describe() for example in EXAMPLES],
        "reconstruction": None if model is None else model.summary(),
    }


@router.get("/metrics", summary="Metrics in the Prometheus text format", response_class=PlainTextResponse)
async def _metrics(request: Request) -> PlainTextResponse:
    """Return counters and gauges in the Prometheus text format."""
    service, metrics = service_of(request), request.app.state.metrics
    gauges = {
        "dualrc_queue_depth": ("Jobs in the queue.", service.jobs.depth),
        "dualrc_jobs_running": ("Jobs running.", service.jobs.running),
        "dualrc_images": ("Stored images.", len(service.images)),
        "dualrc_image_file_bytes": ("Size of image files on disk.", service.images.disk_bytes),
        "dualrc_pixel_cache_bytes": ("Memory of decoded images and views.", service.images.pixel_bytes),
        "dualrc_feature_cache_bytes": ("Memory of features.", service.features.size),
        "dualrc_warp_cache_bytes": ("Memory of warps.", service.warps.size),
        "dualrc_pairs": ("Stored results.", len(service.pairs)),
        "dualrc_pair_bytes": ("Memory of results.", service.pairs.size),
    }
    text = metrics.text(gauges, service.jobs.outcomes, dict(service.jobs.batches))
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_handlers(app: FastAPI) -> None:
    """Answer every error with JSON that contains a message and a code."""

    @app.exception_handler(Problem)
    @app.exception_handler(DualRCError)
    async def error_handler(_: Request, error: Problem | DualRCError) -> JSONResponse:
        return answer(from_error(error))

    @app.exception_handler(RequestValidationError)
    async def validation_handler(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}; see /openapi.json."
        return answer(Problem(422, "bad_field", message))

    @app.exception_handler(HTTPException)
    async def http_handler(request: Request, error: HTTPException) -> JSONResponse:
        code, message = {
            404: ("not_found", "There is nothing here; see /openapi.json."),
            405: ("wrong_method", "This address requires another method; see /openapi.json."),
        }.get(error.status_code, ("failed", str(error.detail)))
        response = answer(Problem(error.status_code, code, message))
        response.headers.update(error.headers or {})
        if error.status_code == 405 and (allowed := _allowed(app, request.scope)):
            response.headers["Allow"] = ", ".join(allowed)
        return response

    @app.exception_handler(Exception)
    async def crash_handler(_: Request, error: Exception) -> JSONResponse:
        logger.error("A request failed.", exc_info=error)
        return answer(Problem(500, "failed", "The server failed; see its log."))


def _allowed(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods that the routes for a path accept; each route knows only its own."""
    asked = {method: {**scope, "method": method} for method in ("GET", "POST", "DELETE")}
    found = [method for method in asked if any(route.matches(asked[method])[0] is Match.FULL for route in app.routes)]
    return [*found, "HEAD"] if "GET" in found else found


async def _sweep(service: Service) -> None:
    """Remove expired data periodically."""
    while True:
        await asyncio.sleep(min(_SWEEP_S, service.config.keep_s))
        with suppress(OSError):
            await asyncio.to_thread(service.sweep)


def _render(examples: Examples, service: Service) -> None:
    """Render the examples, until the server stops."""
    try:
        examples.prepare(lambda: service.jobs.closing)
    except Exception:
        if not service.jobs.closing:
            logger.exception("The examples could not be rendered.")
