"""Routes for matches, estimates, warps, points and jobs."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from dualrc.matches import Estimate
from dualrc.web import exports, pairs, schemas
from dualrc.web.answers import checked, json_answer, json_body, schema, service_of, wait_for
from dualrc.web.job import Job
from dualrc.web.openapi import JOB, UPLOAD, Responses, binary, errors, form, raw, response
from dualrc.web.pairs import Pair
from dualrc.web.problems import Problem, known
from dualrc.web.routes_images import form_of, keep
from dualrc.web.security import client_of
from dualrc.web.uploads import Upload
from dualrc.web.wire import grid_of

router = APIRouter(prefix="/v1", tags=["pairs"])
jobs_router = APIRouter(prefix="/v1/jobs", tags=["pairs", "jobs"], responses=errors(404, 422))

Format = Annotated[Literal["json", "npz", "csv"], Query(description="Format of the response.")]
AnyFormat = Annotated[Literal["json", "npz", "csv", "colmap"], Query(description="Format of the response.")]
_MEDIA = (exports.MEDIA["npz"], "text/csv", exports.MEDIA["colmap"])


def _in_form(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field in a form, which omits a field instead of sending null."""
    kinds = [kind for kind in field.get("anyOf", []) if kind != {"type": "null"}]
    return (
        {key: value for key, value in field.items() if key not in ("anyOf", "default")} | kinds[0] if kinds else field
    )


_OPTIONS = {name: _in_form(field) for name, field in schemas.MatchOptions.model_json_schema()["properties"].items()}
_MATCH = schema(schemas.MatchBody)
_MATCH["requestBody"]["content"] |= form("image0", "image1", **_OPTIONS)
_WARP_BYTES = binary("Header and float32 triples.", "application/octet-stream")
_RESULT: Responses = {
    200: {"model": schemas.PairResult, **binary("The matches.", exports.MEDIA["npz"], "text/csv")[200]}
}
_ANY_RESULT: Responses = {200: {"model": schemas.PairResult, **binary("The matches.", *_MEDIA)[200]}}


@router.post(
    "/match",
    openapi_extra=_MATCH,
    summary="Match two images",
    **raw(_RESULT | response(schemas.JobStarted, "The job, with `wait=false`.", 202), *JOB, *UPLOAD),
)
async def match(
    request: Request,
    format: Format = "json",
    wait: Annotated[bool, Query(description="If false, respond at once with the id of a job.")] = True,
) -> Response:
    """Match two uploaded images (JSON with their ids) or two files (multipart form with the same fields)."""
    images, settings = await _asked(request)
    service = service_of(request)
    job = service.match(client_of(request.scope), images, settings)
    if not wait:
        return await json_answer(lambda: {"job": job.id}, 202)
    pair = known(service.pairs.get((await wait_for(request, job))["pair"]), "result")
    return await _formatted(pair, format)


async def _asked(request: Request) -> tuple[tuple[Upload, Upload], schemas.MatchOptions]:
    service = service_of(request)
    if request.headers.get("content-type", "").startswith("multipart/"):
        async with form_of(request, 2) as sent:
            fields = {key: value for key, value in sent.multi_items() if isinstance(value, str) and value != ""}
            options = checked(schemas.MatchOptions, fields)
            image0 = await keep(request, sent.get("image0"), "image0")
            try:
                image1 = await keep(request, sent.get("image1"), "image1")
            except Exception:
                # The client does not learn the id of the first image.
                service_of(request).images.delete(image0.id)
                raise
        return (image0, image1), options
    body = await json_body(request, schemas.MatchBody)
    return (service.images.get(body.image0), service.images.get(body.image1)), body


@router.get("/pairs/{number}", summary="Get a result", **raw(_ANY_RESULT, 404, 422))
async def get_pair(
    request: Request,
    number: str,
    format: AnyFormat = "json",
    estimate: Annotated[schemas.Kind | None, Query(description="Model to fit to the matches.")] = None,
    threshold_px: Annotated[schemas.Threshold, Query()] = 2.0,
    min_score: Annotated[
        float, Query(ge=0, le=1, description="Minimum score of the matches that it is fitted to.")
    ] = 0,
) -> Response:
    """Return the matches of a pair as JSON, npz, CSV or a COLMAP database with the two images.

    With `estimate`, the matches contain a model as `POST /v1/pairs/{number}/estimate` fits it.
    """
    pair = known(service_of(request).pairs.get(number), "result")
    if estimate is not None:
        fit = schemas.EstimateBody(kind=estimate, threshold_px=threshold_px, min_score=min_score)
        pair = replace(pair, matches=pair.matches.with_estimate(await _fitted(request, pair, fit)))
        return await _formatted(pair, format, fit)
    return await _formatted(pair, format)


@router.post(
    "/pairs/{number}/estimate",
    openapi_extra=schema(schemas.EstimateBody),
    summary="Fit a model",
    **raw(response(schemas.FittedModel, "The model."), 404, 413, 422),
)
async def estimate(request: Request, number: str) -> Response:
    """Fit a homography, fundamental or essential matrix to the existing matches.

    `inliers` has one flag for each match of the pair; it is false for matches excluded by `min_score` or `top`.
    """
    pair = known(service_of(request).pairs.get(number), "result")
    body = await json_body(request, schemas.EstimateBody)
    model = await _fitted(request, pair, body)
    return await json_answer(lambda: {**pairs.describe_estimate(model), "commands": pairs.commands(pair, body)})


async def _fitted(request: Request, pair: Pair, fit: schemas.EstimateBody) -> Estimate:
    service = service_of(request)

    def run() -> Estimate:
        return service.estimate(pair, fit.kind, fit.threshold_px, min_score=fit.min_score, top=fit.top)

    # Fitting uses one core for up to a second, so the number of concurrent fits is limited.
    async with request.app.state.fitting:
        return await run_in_threadpool(run)


@router.get("/pairs/{number}/warp", summary="Warp of a pair", **raw(_WARP_BYTES, *JOB))
async def pair_warp(
    request: Request,
    number: str,
    direction: Literal["01", "10"] = "01",
    max_side: Annotated[int, Query(ge=1, le=4096)] = 512,
) -> Response:
    """Return the position in the other image of every cell of a grid (format: docs/service.md)."""
    service = service_of(request)
    pair = known(service.pairs.get(number), "result")
    image0, image1 = pair.images if direction == "01" else pair.images[::-1]
    # Raises a Problem if an image has expired or was deleted.
    images = service.images.get(image0.id), service.images.get(image1.id)
    job = service.warp(client_of(request.scope), images, grid_of(image0.size, max_side), pair=pair)
    return Response((await wait_for(request, job))["bytes"], media_type="application/octet-stream")


@router.post(
    "/points",
    openapi_extra=schema(schemas.PointsBody),
    summary="Match given points",
    **raw(response(schemas.Points, "The positions."), *JOB),
)
async def points(request: Request) -> Response:
    """Return the positions in image 1 of points of image 0; null if no counterpart was found."""
    service, body = service_of(request), await json_body(request, schemas.PointsBody)
    if len(body.points) > service.config.max_points:
        message = f"There are {len(body.points)} points; send at most {service.config.max_points} at once."
        raise Problem(422, "too_many_points", message)
    images = service.images.get(body.image0), service.images.get(body.image1)
    asked = np.array(body.points, dtype=np.float32).reshape(-1, 2)
    job = service.match_points(client_of(request.scope), images, asked, body.min_score)
    found = (await wait_for(request, job))["matches"]

    def tell() -> dict[str, Any]:
        places = [None if None in place else place for place in pairs.rounded(found.points1)]
        return {"points1": places, "scores": pairs.rounded(found.scores, 6)}

    return await json_answer(tell)


@router.post("/warp", openapi_extra=schema(schemas.WarpBody), summary="Warp of two images", **raw(_WARP_BYTES, *JOB))
async def warp(request: Request) -> Response:
    """Return the warp of two images without matching them first."""
    service, body = service_of(request), await json_body(request, schemas.WarpBody)
    images = service.images.get(body.image0), service.images.get(body.image1)
    grid = grid_of(images[0].size, body.max_side)
    job = service.warp(client_of(request.scope), images, grid, min_score=body.min_score)
    return Response((await wait_for(request, job))["bytes"], media_type="application/octet-stream")


@jobs_router.get("/{number}", summary="State of a job", responses=response(schemas.Event, "The last event."))
async def get_job(request: Request, number: str) -> dict[str, Any]:
    """Return the data of the job's last event, with its name as `event`."""
    jobs = service_of(request).jobs
    name, data = jobs.snapshot(jobs.get(number))
    return {"event": name, **_public(data)}


@jobs_router.delete("/{number}", status_code=204, summary="Cancel a job", response_class=Response)
async def cancel_job(request: Request, number: str) -> Response:
    """Cancel a job: at once if it is queued, at its next step if it is running. The result is dropped."""
    jobs = service_of(request).jobs
    jobs.cancel(jobs.get(number))
    return Response(status_code=204)


@jobs_router.get("/{number}/events", summary="Follow a job", **raw(binary("The events.", "text/event-stream"), 503))
async def follow_job(request: Request, number: str) -> StreamingResponse:
    """Send server-sent events: `progress`, and finally `done`, `failed` or `cancelled`."""
    job = service_of(request).jobs.get(number)
    streams = request.app.state.streams
    if streams.locked():
        raise Problem(503, "too_many_streams", "Too many event streams are open; poll the job instead.", retry_s=5)
    return StreamingResponse(_events(request, job), media_type="text/event-stream")


async def _events(request: Request, job: Job) -> AsyncIterator[str]:
    async with request.app.state.streams:
        async for event in service_of(request).jobs.follow(job):
            if event is None:
                yield ": still there\n\n"
            else:
                yield f"event: {event[0]}\ndata: {json.dumps(_public(event[1]))}\n\n"


def _public(data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the data of a job that clients receive."""
    for kind in ("pair", "collection"):
        if kind in data:
            return {"result": f"/v1/{kind}s/{data[kind]}"}
    return {key: value for key, value in data.items() if isinstance(value, (str, int, float))}


async def _formatted(pair: Pair, kind: str, fit: schemas.EstimateBody | None = None) -> Response:
    headers = {"X-Pair": pair.id, "X-Image0": pair.images[0].id, "X-Image1": pair.images[1].id}
    if kind == "json":
        answer = await json_answer(lambda: pairs.describe(pair, fit))
        answer.headers.update(headers)
        return answer
    content = await run_in_threadpool(exports.export, pair, kind)
    headers["Content-Disposition"] = f'attachment; filename="{exports.FILES[kind]}"'
    return Response(content, media_type=exports.MEDIA[kind], headers=headers)
