"""What bodies of requests may hold in memory, one and all together, without a server."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brainet_pl.serving.limits import FREE, HELD, Bodies, Limits, Refused, read_json

LIMITS = Limits(megabytes=0.2, seconds=0.2)


def messages(*parts, end=True):
    """What an ASGI server gives: the parts of a body, then its end, or nothing for ever."""
    waiting = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive():
        if waiting:
            return waiting.pop(0)
        if not end:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


def read(bodies, *parts, declared=0, end=True):
    return asyncio.run(bodies.read(messages(*parts, end=end), declared))


def test_a_body_is_read_and_let_go():
    bodies = Bodies(LIMITS)
    assert read(bodies, b"ab", b"", b"c") == b"abc"
    body = read(bodies, *[b"x" * 50_000] * 4)
    assert bodies.held == len(body) - FREE
    bodies.let_go(len(body))
    assert bodies.held == 0


@given(st.lists(st.integers(0, 250_000), max_size=40))
def test_all_together_hold_no_more_than_they_may_and_nothing_is_forgotten(sizes):
    bodies, kept = Bodies(LIMITS), []
    for size in sizes:
        parts = [*[b"x" * 40_000] * (size // 40_000), b"x" * (size % 40_000)]
        fits = size <= FREE or bodies.held + size - FREE <= HELD * 200_000
        if size > 200_000 or not fits:
            with pytest.raises(Refused, match="expected a body" if fits else "expected (a body|bodies)"):
                read(bodies, *parts)
        else:
            read(bodies, *parts)
            kept.append(size)
        assert bodies.held == sum(max(0, size - FREE) for size in kept) <= HELD * 200_000
    for size in kept:
        bodies.let_go(size)
    assert bodies.held == 0


def test_a_full_house_is_told_before_anything_is_read_and_small_bodies_are_taken():
    bodies = Bodies(LIMITS)
    held = [read(bodies, b"x" * 200_000) for _ in range(11)]  # 11 × 134,464 of 1,600,000 bytes

    async def never():
        raise AssertionError("it was read")

    with pytest.raises(Refused, match=r"bodies of at most 1\.6 MB in all requests at a time") as caught:
        asyncio.run(bodies.read(never, 199_000))
    assert caught.value.status == 429
    assert read(bodies, b"small", declared=5) == b"small"
    bodies.let_go(len(held.pop()))
    assert len(read(bodies, b"x" * 199_000, declared=199_000)) == 199_000


def test_what_was_read_of_a_body_that_ends_badly_is_let_go():
    bodies = Bodies(LIMITS)
    for parts, end, status in (([b"x" * 150_000], False, 408), ([b"x" * 150_000] * 2, True, 413)):
        with pytest.raises(Refused) as caught:
            read(bodies, *parts, end=end)
        assert (caught.value.status, bodies.held) == (status, 0)

    async def gone():
        return {"type": "http.disconnect"}

    with pytest.raises(Refused, match="the end of the connection"):
        asyncio.run(bodies.read(gone, 0))
    with pytest.raises(Refused, match=r"at most 0\.2 MB"):
        read(bodies, declared=10**17)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_json_is_read(value):
    assert read_json(bytearray(json.dumps(value).encode()), 0) == value


def test_lists_that_would_fill_the_memory_are_refused_before_they_are_read():
    for body in (b"[" + b"[]," * 10_000 + b"0]", b"[" + b'{"a":0},' * 10_000 + b"0]"):
        with pytest.raises(Refused, match="at most 10,000 lists and objects in a request") as caught:
            read_json(body, 100)
        assert caught.value.status == 413
        assert len(read_json(body, 10_001)) == 10_001
