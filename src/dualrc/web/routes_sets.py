"""Routes for collections and for a finished reconstruction."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi import Path as FromPath
from starlette.concurrency import run_in_threadpool

from dualrc.web import schemas
from dualrc.web.answers import json_answer, json_body, schema, service_of
from dualrc.web.openapi import binary, errors, raw, response
from dualrc.web.pairs import Collection
from dualrc.web.problems import Problem, known
from dualrc.web.reconstruction import Reconstruction
from dualrc.web.routes_images import JPEG, MaxSide
from dualrc.web.security import client_of

router = APIRouter(prefix="/v1/collections", tags=["collections"])
model_router = APIRouter(prefix="/v1/reconstruction", tags=["reconstruction"])
Number = Annotated[int, FromPath(ge=0, lt=1 << 53)]


@router.post(
    "",
    status_code=202,
    openapi_extra=schema(schemas.CollectionBody),
    summary="Match all pairs of a set of images",
    response_model=schemas.CollectionStarted,
    responses=errors(404, 413, 422, 429, 503),
)
async def collect(request: Request) -> dict[str, str]:
    """Start a job whose events contain the numbers of `done` and `total` pairs; single matches take precedence."""
    service, body = service_of(request), await json_body(request, schemas.CollectionBody)
    if len(body.images) > service.config.max_collection or len(set(body.images)) < len(body.images):
        message = f"Give 2 to {service.config.max_collection} different images."
        raise Problem(422, "bad_collection", message)
    collection = Collection(images=tuple(map(service.images.get, body.images)))
    job = service.collect(client_of(request.scope), collection)
    return {"job": job.id, "collection": collection.id}


@router.get(
    "/{number}", summary="Scores of a collection", **raw(response(schemas.CollectionResult, "The scores."), 404, 422)
)
async def get_collection(request: Request, number: str) -> Response:
    """Return the images, a matrix of pair scores (null for unmatched pairs) and the results by "i,j"."""
    collection = known(service_of(request).collections.get(number), "collection")
    return await json_answer(collection.describe)


@model_router.get("", summary="Images and cameras", **raw(response(schemas.Model, "Poses and cameras."), 404))
async def get_reconstruction(request: Request) -> Response:
    """Return poses and cameras of the upright images; the center of the first pixel is (0, 0), params are COLMAP's."""
    return await json_answer(_reconstruction(request).describe)


@model_router.get(
    "/points",
    summary="All points",
    **raw(binary("Count, coordinates, colors and track lengths.", "application/octet-stream"), 404),
)
async def get_points(request: Request) -> Response:
    """Return all points in little-endian order: uint32 count, float32 xyz, uint8 rgb, uint32 track lengths."""
    packed = await run_in_threadpool(_reconstruction(request).packed)
    return Response(packed, media_type="application/octet-stream")


@model_router.get(
    "/points/{index}",
    summary="A point and its track",
    response_model=schemas.ModelPoint,
    responses=errors(404, 422),
)
async def get_point(request: Request, index: Number) -> dict[str, Any]:
    """Return a point and its observations, in pixels of the upright images."""
    return _reconstruction(request).point(index)


@model_router.get("/images/{number}/view", summary="View an image of the reconstruction", **raw(JPEG, 404, 415, 422))
async def view(request: Request, number: Number, max_side: MaxSide = 1024) -> Response:
    """Return the upright image as JPEG."""
    jpeg = await run_in_threadpool(_reconstruction(request).view, number, max_side)
    return Response(jpeg, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=600"})


def _reconstruction(request: Request) -> Reconstruction:
    found: Reconstruction | None = request.app.state.reconstruction
    if found is None:
        message = "This server has no reconstruction; start it with dualrc serve DIR."
        raise Problem(404, "no_reconstruction", message)
    return found
