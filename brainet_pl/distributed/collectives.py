"""Collectives: gather or sum what each process has, or let the first process work while the others serve it.

Everything here needs `torch.distributed` alone, and does nothing special where there is one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")
HEARTBEAT = 1.0  # seconds between two messages of the working process that it is alive


def processes() -> int:
    """The number of processes; 1 where there is no process group."""
    return torch.distributed.get_world_size() if _grouped() else 1


def rank() -> int:
    """The rank of this process."""
    return torch.distributed.get_rank() if _grouped() else 0


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def all_gather(own: T) -> list[T]:
    """The object of each process, in the order of ranks; a collective, so all processes must call it."""
    if processes() == 1:
        return [own]
    found: list[T | None] = [None] * processes()
    torch.distributed.all_gather_object(found, own)
    return found  # type: ignore[return-value]


def exchange(work: Callable[[], T]) -> list[T]:
    """The result of `work` in each process, in the order of ranks; where it fails in one, an error is raised in all.

    A collective, so all processes must call it; `work` itself must not contain one.
    """
    if processes() == 1:
        return [work()]
    error: BaseException | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as failure:
        error = failure
    found = all_gather((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for number, (_, failed) in enumerate(found):
        if failed is not None:
            raise RuntimeError(f"process {number} failed while all worked together: {failed}")
    return [value for value, _ in found]  # type: ignore[misc]


def run_or_fail_together(work: Callable[[], T]) -> T:
    """The result of `work` in this process; where it fails in one, an error is raised in all. A collective."""
    kept: list[T] = []
    exchange(lambda: kept.append(work()))
    return kept[0]


def summed(array: NDArray[Any]) -> NDArray[Any]:
    """The sum of an array of floats over all processes; a collective."""
    return total(torch.from_numpy(array)).numpy() if processes() > 1 else array


def total(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, on the tensor's device; a collective."""
    if processes() == 1:
        return tensor
    # NCCL reads the memory of a GPU only.
    there = tensor.cuda() if torch.distributed.get_backend() == "nccl" else tensor.clone()
    torch.distributed.all_reduce(there)
    return there.to(tensor.device)


def serve_rank_zero(work: Callable[[Callable[[Any], Any]], T], serve: Callable[[Any], Any]) -> T:
    """Run `work` in the first process and return its result in all; all processes serve its requests meanwhile.

    A collective, so all processes must call it. `work` gets a function `ask`: `ask(request)` runs `serve(request)` in
    all processes, which may contain collectives, and returns the result of the first process.
    """
    if processes() == 1:
        return work(serve)

    def broadcast(state: Any) -> Any:
        box = [state]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    return keep_alive(work, serve, rank() == 0, broadcast)


def keep_alive(
    work: Callable[[Callable[[Any], Any]], T], serve: Callable[[Any], Any], first: bool, broadcast: Callable[[Any], Any]
) -> T:
    """`serve_rank_zero` with a given broadcast: the first process works in a thread, its main thread sends to others.

    It sends a message every second. So the work may take longer than the timeout of the process group, and if a process
    dies meanwhile, the others notice at once.
    """
    desk = _Desk()
    if first:
        # A process that fails does not wait for it.
        threading.Thread(target=desk.run, args=(work,), daemon=True).start()
    while True:
        state, error = desk.look() if first else ({}, None)
        state = broadcast(state)
        if error is not None:
            raise error  # the original, with its traceback
        if "failure" in state:
            raise RuntimeError(f"the first process failed while this one waited for it: {state['failure']}")
        if "result" in state:
            result: T = state["result"]
            return result
        if "request" in state:
            reply = serve(state["request"])
            if first:
                desk.answer(reply)


class _Desk:
    """Passes messages between the working thread and the main thread, which alone may use collectives."""

    def __init__(self) -> None:
        self._news, self._answered = threading.Event(), threading.Event()
        self._state: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._reply: Any = None

    def run(self, work: Callable[[Callable[[Any], Any]], Any]) -> None:
        try:
            self._state = {"result": work(self._ask)}
        except BaseException as error:  # of any kind: the waiting processes must get it
            self._error = error
            self._state = {"failure": f"{type(error).__name__}: {error}"}
        self._news.set()

    def _ask(self, request: Any) -> Any:
        self._state = {"request": request}
        self._news.set()
        self._answered.wait()
        self._answered.clear()
        return self._reply

    def look(self) -> tuple[dict[str, Any], BaseException | None]:
        """The message of the working thread, after a second at the latest; an empty state says that it is alive."""
        if not self._news.wait(HEARTBEAT):
            return {}, None
        self._news.clear()
        return self._state, self._error

    def answer(self, reply: Any) -> None:
        self._reply = reply
        self._answered.set()
