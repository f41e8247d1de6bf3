"""Errors of the service: a status, a code for programs and one sentence for people."""

from PIL import Image

from dualrc.errors import ConfigError, DataError, DualRCError, ImageError


class Problem(Exception):  # noqa: N818
    """A request that can't be answered; becomes {"error": message, "code": code} with its status."""

    def __init__(self, status: int, code: str, message: str, *, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_s = status, code, message, retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            # The rest of the body is not read: the connection can't serve another request.
            headers["Connection"] = "close"
        return headers

    def body(self) -> dict[str, str]:
        """The JSON body."""
        return {"error": self.message, "code": self.code}


def unknown(what: str) -> Problem:
    """An id that is not known, or not any more."""
    return Problem(404, "unknown_id", f"This {what} is unknown or has expired; make it again.")


def from_error(error: DualRCError) -> Problem:
    """An error of the library as an answer."""
    message = str(error)
    if isinstance(error, ImageError):
        if isinstance(error.__cause__, Image.DecompressionBombError):
            return Problem(413, "too_many_pixels", message)
        if "not enough memory" in message or "of memory" in message:
            return Problem(503, "no_memory", message, retry_s=10)
        if "too small or too thin" in message:
            return Problem(422, "too_small", message)
        return Problem(415, "not_an_image", message)
    if isinstance(error, ConfigError):
        return Problem(422, "bad_setting", message)
    if isinstance(error, DataError):
        return Problem(422, "bad_data", message)
    return Problem(500, "failed", message)
