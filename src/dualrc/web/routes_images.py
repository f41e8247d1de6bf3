"""Routes for uploaded images and for examples."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as FromPath
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from dualrc.web.answers import service_of
from dualrc.web.examples import Examples, find
from dualrc.web.openapi import UPLOAD, binary, errors, form, raw
from dualrc.web.problems import Problem
from dualrc.web.schemas import ExampleImages, Image
from dualrc.web.security import client_of
from dualrc.web.uploads import Upload

router = APIRouter(prefix="/v1", tags=["images"])

MaxSide = Annotated[int, Query(ge=16, le=8192, description="Maximum long side of the view, in pixels.")]
# The image of an id never changes, so browsers may cache it.
_CACHED = {"Cache-Control": "private, max-age=600, immutable"}
JPEG = binary("The image.", "image/jpeg")


@asynccontextmanager
async def form_of(request: Request, files: int) -> AsyncIterator[FormData]:
    """Yield the multipart form of a request and close its files afterwards."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Problem(415, "not_multipart", "Send the file as multipart/form-data.")
    # If too many uploads are active, the request waits here before its body is read.
    async with request.app.state.uploading:
        try:
            sent = await request.form(max_files=files, max_fields=16, max_part_size=64 * 1024)
        except HTTPException as error:
            raise Problem(422, "bad_form", f"The form can't be read ({error.detail}); send it again.") from error
        try:
            yield sent
        finally:
            await sent.close()


async def keep(request: Request, file: object, field: str) -> Upload:
    """Store one file of a form."""
    if not isinstance(file, UploadFile):
        raise Problem(422, "no_file", f"The form has no file in its field `{field}`; send an image there.")
    images = service_of(request).images
    return await run_in_threadpool(images.add, file.file, file.filename, client_of(request.scope))


@router.post(
    "/images",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": form("file")}},
    summary="Upload an image",
    response_model=Image,
    responses=errors(*UPLOAD),
)
async def upload_image(request: Request) -> dict[str, Any]:
    """Store an image for a limited time; its features are extracted once and reused for all its matches."""
    service = service_of(request)
    async with form_of(request, 1) as sent:
        upload = await keep(request, sent.get("file"), "file")
    service.prefetch(upload)
    return service.images.describe(upload)


@router.get("/images/{number}", summary="Describe an image", response_model=Image, responses=errors(404, 422))
async def describe_image(request: Request, number: str) -> dict[str, Any]:
    """Return the name, the size and the seconds until the image expires."""
    images = service_of(request).images
    return images.describe(images.get(number))


@router.get("/images/{number}/view", summary="View an image as JPEG", **raw(JPEG, 404, 422))
async def view_image(request: Request, number: str, max_side: MaxSide = 2048) -> Response:
    """Return the upright image, with a long side of at most `max_side` pixels."""
    images = service_of(request).images
    jpeg = await run_in_threadpool(images.view, images.get(number), max_side)
    return Response(jpeg, media_type="image/jpeg", headers=_CACHED)


@router.delete("/images/{number}", status_code=204, summary="Delete an image", **raw({}, 404, 422))
async def delete_image(request: Request, number: str) -> Response:
    """Delete an image before it expires."""
    service_of(request).images.delete(number)
    return Response(status_code=204)


@router.get("/examples/{name}/view/{side}", summary="View an image of an example", **raw(JPEG, 404, 422, 503))
async def view_example(
    request: Request, name: str, side: Annotated[int, FromPath(ge=0, le=1)], max_side: MaxSide = 320
) -> Response:
    """Return one of the two images as JPEG, or 503 while it is not rendered yet."""
    examples: Examples = request.app.state.examples
    if (uploads := examples.ready(name)) is None:
        raise Problem(503, "not_ready", "This example is not rendered yet; request it again later.", retry_s=5)
    jpeg = await run_in_threadpool(service_of(request).images.view, uploads[side], max_side)
    return Response(jpeg, media_type="image/jpeg", headers=_CACHED)


@router.post(
    "/examples/{name}", summary="Use an example", response_model=ExampleImages, responses=errors(404, 422, 503)
)
async def use_example(request: Request, name: str) -> dict[str, Any]:
    """Return two rendered images, which can be used like uploads and do not expire."""
    examples: Examples = request.app.state.examples
    service = service_of(request)
    uploads = await run_in_threadpool(examples.get, name)
    for upload in uploads:
        service.prefetch(upload)
    images = [service.images.describe(upload) for upload in uploads]
    return {"image0": images[0], "image1": images[1], "truth": find(name).truth}
