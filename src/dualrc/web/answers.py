"""Helpers shared by the routes: request validation, JSON responses and waiting for jobs."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from dualrc.files import parse_json
from dualrc.web.job import Job
from dualrc.web.problems import Problem
from dualrc.web.service import Service

Body = TypeVar("Body", bound=BaseModel)
# Seconds between two checks that a waiting client is still connected.
_POLL_S = 0.5


def service_of(request: Request) -> Service:
    """Return the service of the app that received this request."""
    return request.app.state.service


async def json_body(request: Request, kind: type[Body]) -> Body:
    """Return the validated JSON body of a request."""
    try:
        content = parse_json(await request.body())
    except ValueError as error:
        raise Problem(422, "bad_json", f"The body is not JSON ({error}); send a JSON object.") from error
    if not isinstance(content, dict):
        raise Problem(422, "bad_field", "The body is not a JSON object; send an object with the fields of the request.")
    return checked(kind, content)


def checked(kind: type[Body], content: Any) -> Body:
    """Return validated fields of a request, or raise a Problem that names the first invalid one."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Problem(422, "bad_field", f"{where}: {first['msg']}; see /openapi.json.") from error


def schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


async def json_answer(make: Callable[[], Any], status: int = 200) -> Response:
    """Return a JSON response; it is encoded on another thread because lists can be long."""

    def encode() -> bytes:
        return json.dumps(make(), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()

    return Response(await run_in_threadpool(encode), status, media_type="application/json")


async def wait_for(request: Request, job: Job) -> Any:
    """Return the result of a job; the job is cancelled if the client disconnects."""
    jobs = service_of(request).jobs
    task = asyncio.ensure_future(jobs.result(job))
    try:
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            if await request.is_disconnected():
                raise Problem(499, "gone", "The client has closed the connection.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            jobs.cancel(job)
