"""Errors of the service: an HTTP status, a machine-readable code and a message."""

import logging
from typing import TypeVar

from PIL import Image

from dualrc.errors import ConfigError, DataError, DualRCError, ImageError, OutputError
from dualrc.matcher.budget import NoMemoryError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Problem(Exception):  # noqa: N818
    """Request error, sent as {"error": message, "code": code} with its status."""

    def __init__(self, status: int, code: str, message: str, *, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_s = status, code, message, retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Response headers for the status."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            # The rest of the body is not read, so the connection cannot be reused.
            headers["Connection"] = "close"
        return headers

    def body(self) -> dict[str, str]:
        """Return the JSON body."""
        return {"error": self.message, "code": self.code}


# What to do about an id that is unknown or has expired.
_REMEDIES = {
    "image": "upload it again",
    "result": "match the images again",
    "job": "send the request again",
    "collection": "match its images again",
}


def unknown(what: str) -> Problem:
    """Return the problem of an id that is unknown or has expired."""
    if (remedy := _REMEDIES.get(what)) is None:
        return Problem(404, "unknown_id", f"The reconstruction has no such {what}.")
    return Problem(404, "unknown_id", f"This {what} is unknown or has expired; {remedy}.")


def known(found: T | None, what: str) -> T:
    """Return what was found by its id, or raise the problem of an unknown id."""
    if found is None:
        raise unknown(what)
    return found


def from_error(error: Problem | DualRCError) -> Problem:
    """Return a problem unchanged, or the one that corresponds to an error of the library."""
    if isinstance(error, Problem):
        return error
    message = str(error)
    if isinstance(error, ImageError):
        if isinstance(error.__cause__, Image.DecompressionBombError):
            return Problem(413, "too_many_pixels", message)
        if isinstance(error, NoMemoryError):
            return Problem(503, "no_memory", message, retry_s=10)
        if "too small or too thin" in message:
            return Problem(422, "too_small", message)
        return Problem(415, "not_an_image", message)
    if isinstance(error, ConfigError):
        return Problem(422, "bad_setting", message)
    if isinstance(error, DataError):
        return Problem(422, "bad_data", message)
    if isinstance(error, OutputError):
        # The message names a path of the server.
        logger.error("%s", message)
        return Problem(507, "no_space", "The server cannot write the result, and its disk may be full; try later.")
    return Problem(500, "failed", message)
