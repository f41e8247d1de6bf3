"""OpenAPI description of the service: responses of every route, and errors."""

from typing import Any

from fastapi import Response
from pydantic import BaseModel

from dualrc.web.schemas import Error

# Meaning of the statuses of errors.
_ERRORS = {
    401: "Missing or wrong token.",
    403: "Request from the page of another site.",
    404: "Unknown or expired id.",
    408: "Upload too slow.",
    409: "The job was cancelled.",
    413: "Too many bytes or pixels.",
    415: "Not a readable image, or not a multipart form.",
    421: "Wrong host name.",
    422: "Invalid field, or image too small.",
    429: "Too many jobs of this client; see Retry-After.",
    500: "The server failed; see its log.",
    503: "Queue full, or not enough memory; see Retry-After.",
    504: "Time limit exceeded.",
}
# Statuses with which any route, a route that queues a job, or one that receives a file can answer.
EVERY = (401, 403, 421, 500)
JOB = (404, 409, 413, 415, 422, 429, 503, 504)
UPLOAD = (408, 413, 415, 422, 503)

_BINARY = {"type": "string", "format": "binary"}
Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Return the description of errors."""
    return {status: {"model": Error, "description": _ERRORS[status]} for status in sorted(set(statuses))}


def raw(content: Responses, *statuses: int) -> dict[str, Any]:
    """Return the options of a route that encodes its response by itself, with this content or one of these errors."""
    return {"response_class": Response, "responses": content | errors(*statuses)}


def response(kind: type[BaseModel], description: str, status: int = 200) -> Responses:
    """Return the description of a JSON response that a route encodes by itself."""
    return {status: {"model": kind, "description": description}}


def binary(description: str, *media: str) -> Responses:
    """Return the description of a response with bytes of one of several media types."""
    content = {kind: {"schema": {"type": "string"} if kind.startswith("text/") else _BINARY} for kind in media}
    return {200: {"content": content, "description": description}}


def form(*files: str, **fields: Any) -> dict[str, Any]:
    """Return the description of a multipart form with files and further fields."""
    properties = {**dict.fromkeys(files, _BINARY), **fields}
    return {"multipart/form-data": {"schema": {"type": "object", "required": [*files], "properties": properties}}}
