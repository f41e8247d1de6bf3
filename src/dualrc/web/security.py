"""Checks of every request: host, origin, token and body size; security headers and the access log."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualrc.web.metrics import Metrics
from dualrc.web.problems import Problem
from dualrc.web.settings import ServerConfig
from dualrc.web.uploads import too_many_bytes

access_log = logging.getLogger("dualrc.web.access")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "geolocation=(), microphone=(), payment=(), usb=()",
}
# Maximum size of the boundaries and fields around the files of a form, in bytes.
_MULTIPART_EXTRA = 64 * 1024
_SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """ASGI middleware that rejects forbidden requests, adds security headers and logs every response."""

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: Metrics) -> None:
        self.app, self.config, self.metrics = app, config, metrics
        self._token = None if config.token is None else config.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        number, start, method = secrets.token_hex(8), time.perf_counter(), scope["method"]
        if method == "HEAD":
            # uvicorn sends the headers of the response to GET without its body.
            scope = {**scope, "method": "GET"}
        answered = {"status": 0, "bytes": 0}

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered["status"] = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in {**HEADERS, "X-Request-ID": number}.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
            elif message["type"] == "http.response.body":
                answered["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            headers = Headers(scope=scope)
            try:
                self._check(scope, headers)
                limited = self._limited(scope, headers, receive)
            except Problem as problem:
                await answer(problem)(scope, receive, reply)
            else:
                await self.app(scope, limited, reply)
        except asyncio.CancelledError:
            # The server is stopping and does not wait any longer for this request.
            if not answered["status"]:
                await answer(Problem(503, "closing", "The server is stopping."))(scope, receive, reply)
        finally:
            self._note({**scope, "method": method}, number, answered, time.perf_counter() - start)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.config.hosts and _host_of(f"//{host}") not in self.config.hosts:
            # DNS rebinding: a foreign page could let its own host name resolve to this server.
            message = f"This server does not answer to that host name; use {self.config.hosts[0]}."
            raise Problem(421, "wrong_host", message)
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != host
        if foreign or (scope["method"] not in _SAFE and headers.get("sec-fetch-site") in ("cross-site", "same-site")):
            raise Problem(403, "wrong_origin", "Requests from pages of other servers are refused; open this server's.")
        if self._token is not None and is_protected(scope["path"]):
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
                message = "This server needs its token; send the header Authorization: Bearer TOKEN."
                raise Problem(401, "token", message)

    def _limited(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Return a `receive` that limits the size and the duration of the body."""
        multipart = headers.get("content-type", "").startswith("multipart/")
        files, each = (2 if scope["path"] == "/v1/match" else 1), self.config.max_bytes
        most = files * each + _MULTIPART_EXTRA if multipart else self.config.max_json
        problem = too_many_bytes(each) if multipart else too_many_bytes(most, "body", "send less at once")
        length, count = headers.get("content-length", "0"), 0
        announced = int(length) if length.isdecimal() else 0
        deadline = time.monotonic() + self.config.upload_s
        ended = False

        async def limited() -> Message:
            nonlocal count, ended
            if ended:
                # After the body, only a disconnect follows, which has no time limit.
                return await receive()
            message = await _in_time(receive, deadline)
            count += len(message.get("body", b""))
            ended = message["type"] != "http.request" or not message.get("more_body", False)
            if count > most:
                ended = ended or await _drain(receive, most, deadline)
                raise problem
            return message

        if announced > 2 * most:
            raise problem
        return limited

    def _note(self, scope: Scope, number: str, answered: Mapping[str, int], seconds: float) -> None:
        # Without a response, the request counts as failed.
        status = answered["status"] or 500
        # Log the route pattern, not the path: a path contains ids, which give access to images.
        route = getattr(scope.get("route"), "path", None) or ("static" if status < 400 else "unknown")
        self.metrics.request(route, scope["method"], status, seconds)
        note: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request": number,
            "client": client_of(scope),
            "method": scope["method"],
            "route": route,
            "status": status,
            "bytes": answered["bytes"],
            "ms": round(seconds * 1000, 1),
        }
        access_log.info(json.dumps(note))


def answer(problem: Problem) -> JSONResponse:
    """Return the response to a request with a problem."""
    return JSONResponse(problem.body(), problem.status, problem.headers)


def client_of(scope: Scope) -> str:
    """Return the address of the client."""
    client = scope.get("client")
    return client[0] if client else "local"


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        # For example, brackets that are not closed.
        return ""


def is_protected(path: str) -> bool:
    """Return whether a path requires the token."""
    return path in ("/metrics", "/v1") or path.startswith("/v1/")


async def _in_time(receive: Receive, deadline: float) -> Message:
    try:
        return await asyncio.wait_for(receive(), max(0.001, deadline - time.monotonic()))
    except TimeoutError:
        raise Problem(408, "too_slow", "The upload took too long; send a smaller file.") from None


async def _drain(receive: Receive, most: int, deadline: float) -> bool:
    """Read and discard more of the body, since a browser that is still sending would not see the response."""
    count = 0
    while count < most:
        message = await _in_time(receive, deadline)
        count += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return True
    return False
