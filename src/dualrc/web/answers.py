"""What routes share: the service of an app, bodies that are checked, JSON made off the event loop, waiting for jobs."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from dualrc.files import parse_json
from dualrc.web.jobs import Job
from dualrc.web.problems import Problem
from dualrc.web.security import client_of
from dualrc.web.service import Service

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
# Between two looks at whether a client that waits is still there.
_POLL_S = 0.5


def service_of(request: Request) -> Service:
    """The service of the app that got this request."""
    found: Service = request.app.state.service
    return found


def client(request: Request) -> str:
    """Who asks."""
    return client_of(request.scope)


async def json_body(request: Request, kind: type[Body]) -> Body:
    """The checked JSON body of a request."""
    try:
        content = parse_json(await request.body())
    except ValueError as error:
        raise Problem(422, "bad_json", f"The body is not JSON ({error}); send a JSON object.") from error
    return checked(kind, content)


def checked(kind: type[Body], content: Any) -> Body:
    """Fields of a request, or a problem that names the wrong one."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise Problem(422, "bad_field", f"{where}: {first['msg']}; see /openapi.json.") from error


def schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


async def json_answer(make: Callable[[], Any], status: int = 200) -> Response:
    """A JSON answer; long lists are written on another thread."""

    def encode() -> bytes:
        return json.dumps(make(), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()

    return Response(await run_in_threadpool(encode), status, media_type="application/json")


async def wait_for(request: Request, job: Job) -> Any:
    """The result of a job; it is cancelled if the client goes away."""
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
