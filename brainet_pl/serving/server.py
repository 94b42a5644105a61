"""The server around the application: uvicorn, which also closes connections that ask for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from brainet_pl.serving.limits import Limits

KEEP_ALIVE = 5  # seconds that a connection is kept after an answer
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # settings of glibc's mallopt
LARGE = 131_072  # bytes from which memory goes back to the system; glibc begins with as many, and then forgets it


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection on which no request has begun for some seconds.

    uvicorn waits for ever for the first request of a connection, and for the end of a head that comes byte by byte:
    whoever opens connections and is silent would hold all of them.
    """

    seconds = Limits().seconds
    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop to wait once there is a request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._silence is None and not self.transport.is_closing():
            self._wait()  # the head of another request, of which a part is still missing

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection that was lost."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._silence = self.loop.call_later(self.seconds, self._close)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _close(self) -> None:
        self._silence = None
        if self.cycle is None or self.cycle.response_complete:
            with contextlib.suppress(h11.LocalProtocolError):
                self.conn.send(h11.ConnectionClosed())
            self.transport.close()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            print(f"serving on http://{host}:{port}", file=sys.stderr, flush=True)


def run(app: FastAPI, host: str, port: int, limits: Limits, connections: int) -> None:
    """Serve until SIGTERM or SIGINT; requests that were taken are answered first. At the end it says how many."""
    _raise_open_files()
    _give_memory_back()
    protocol: Any = type("Protocol", (ImpatientProtocol,), {"seconds": limits.seconds})
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws="none",
        log_level="error",  # a refused connection is in the metrics, and ten thousand are no ten thousand lines
        access_log=False,
        limit_concurrency=connections,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(limits.seconds) + 1,
    )
    server = _Server(config)
    with _signals_end_quietly():
        server.run()
    count = int(app.state.served.inputs._value.get())
    print(f"stopped after {server.server_state.total_requests} requests, {count} inputs", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more: the process would die of it, and leave files behind."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda *_: None) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _give_memory_back() -> None:
    """Let what was freed go back to the system: glibc keeps more and more of it after each large body and image."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another system, or another library of C
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, LARGE)
        library.mallopt(MMAP_THRESHOLD, LARGE)


def _raise_open_files() -> None:
    """Let the process have as many open files, and so connections, as the system allows it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
