"""What requests may ask for, what their bodies may hold in memory all together, and how a refusal is said."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

HELD = 8  # bodies of the largest size that may be held in memory at a time
FREE = 65_536  # bytes of a body that are always taken: a server holds as many for each connection, asked or not
MOST_CONTAINERS = 10_000  # lists and objects of JSON that are read whatever the model takes; they are some 2 MB
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        megabytes: of its body; eight times as much may be held by all requests together.
        batch: samples in it.
        seconds: until it is answered.
        waiting: requests that wait or run at a time; further ones are sent away.
        threads: that run the model.
    """

    megabytes: float = 20.0
    batch: int = 256
    seconds: float = 30.0
    waiting: int = 64
    threads: int = 1


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        sentence: what was expected, what came, and what to do.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Bodies:
    """The bodies of requests that are held in memory: each and all together no larger than they may be.

    Bytes count as they come: who declares much and sends nothing takes nothing from others, and small bodies are
    always taken.

    Args:
        limits: what one request may ask for.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.most = int(limits.megabytes * 1e6)
        self.held = 0

    async def read(self, receive: Receive, declared: int) -> bytearray:
        """The whole body of a request; it counts until `let_go` is told its size.

        Args:
            receive: gives the next message of the request, as ASGI has it.
            declared: bytes that the request says it has; 0 where it does not.
        """
        self._check(declared, declared)
        body, deadline = bytearray(), time.monotonic() + self.limits.seconds
        try:
            more = True
            while more:
                message = await self._next(receive, deadline)
                part = message.get("body", b"")
                self._check(len(body) + len(part), _counted(len(body) + len(part)) - _counted(len(body)))
                self.held += _counted(len(body) + len(part)) - _counted(len(body))
                body += part
                more = message.get("more_body", False)
        except BaseException:
            self.let_go(len(body))
            raise
        return body

    def let_go(self, size: int) -> None:
        """A body of so many bytes is held no longer."""
        self.held -= _counted(size)

    async def _next(self, receive: Receive, deadline: float) -> Mapping[str, Any]:
        seconds = self.limits.seconds
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError as error:
            raise Refused(408, f"expected the body within {seconds:g} s, got a part: send it whole") from error
        if message["type"] == "http.disconnect":
            raise Refused(400, "expected the whole body, got a part and the end of the connection: send it whole")
        return message

    def _check(self, size: int, more: int) -> None:
        """Refuse a body of this size, of which so many bytes are yet to be held."""
        if size > self.most:
            raise Refused(413, f"expected a body of at most {self.limits.megabytes:g} MB, got more: send fewer samples")
        if size > FREE and self.held + more > HELD * self.most:
            raise Refused(
                429,
                f"expected bodies of at most {HELD * self.limits.megabytes:g} MB in all requests at a time, got more: "
                "try again later",
            )


def _counted(size: int) -> int:
    return max(0, size - FREE)


def read_json(body: bytes | bytearray, containers: int) -> Any:
    """The JSON of a body, with no more lists and objects than these: a few bytes of them become many in memory."""
    most = max(containers, MOST_CONTAINERS)
    if body.count(b"[") + body.count(b"{") > most:
        raise Refused(413, f"expected at most {most:,} lists and objects in a request, got more: send fewer samples")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"expected JSON, got what is none ({error}): correct it") from error
