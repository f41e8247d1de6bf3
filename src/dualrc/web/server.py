"""Server: listening socket, uvicorn, time limit of request headers and clean shutdown."""

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dualrc.errors import ConfigError
from dualrc.machine import keep_signals

logger = logging.getLogger(__name__)
# Names of the background threads that the modules `jobs` and `app` start.
THREADS = ("matching", "examples")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Maximum number of concurrent connections; further ones receive status 503.
_CONNECTIONS = 512
# Seconds that running requests get to finish when the server stops.
_GRACE_S = 3


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        remedy = "give another --port, or 0 for a free one" if port else "give another --host"
        raise ConfigError(f"Can't listen on {host} port {port} ({error.strerror or error}); {remedy}.") from error
    except OverflowError as error:
        raise ConfigError(f"Port {port} does not exist; give one from 0 to 65535.") from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def is_busy() -> bool:
    """Return whether a thread of the service is still running."""
    return any(thread.name in THREADS for thread in threading.enumerate())


class Connection(H11Protocol):
    """HTTP connection that is closed if the header of a request, or an unread body, does not arrive in time.

    uvicorn limits the pause between two requests, but not the time from the first to the last byte of a header.
    """

    # Time limit of a header, in seconds.
    header_s = 15.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first header."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a header."""
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._stop()

    def _limit(self) -> None:
        """Start the timer at the start of a header, and stop it at the end.

        It also limits the rest of a body that arrives after the response.
        """
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if self.conn.their_state is not h11.IDLE and not answered:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_s, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn server that a signal stops without ending the process."""

    def __init__(self, app: FastAPI, *, started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                # dualrc writes its own access log, without the ids of images.
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=15,
                limit_concurrency=_CONNECTIONS,
                h11_max_incomplete_event_size=64 * 1024,
                lifespan="on",
            )
        )
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server and call the `started` callback."""
        await super().startup(sockets)
        if self.started:
            self._tell()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM stop the server while it runs."""
        with keep_signals():
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, self.handle_exit)
            yield
