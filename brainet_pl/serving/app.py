"""An exported model over HTTP: predictions of numbers, rows and images, health, metrics, and the drift alarm.

`POST /predict` takes JSON, `{"inputs": [[…], …]}`, `{"inputs": {"name": […], …}}` or `{"rows": [{…}, …]}`.
`POST /predict/images` takes image files as a form. `GET /model` says what the model takes and gives, `GET /drift`
whether inputs have changed, `GET /health` whether it runs, `GET /metrics` is for Prometheus, `GET /openapi.json`
describes all of it. What can't be answered has a status and a sentence under `detail`; `openapi.STATUSES` lists them.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from brainet_pl.monitoring import DriftMonitor
from brainet_pl.monitoring.drift import DriftState
from brainet_pl.serving.folder import ExportedModel
from brainet_pl.serving.forms import files_of_form
from brainet_pl.serving.limits import Bodies, Limits, Refused, read_json
from brainet_pl.serving.openapi import openapi_of
from brainet_pl.serving.origins import check_host, check_site

Outputs = dict[str, Any]
Ask = Callable[[bytearray, threading.Event], Outputs]  # a body, and whether nobody waits any more → what the model says
WATCHED = 256  # inputs that are shown to the drift monitor at a time, unless somebody asks for its state before
LONG = 4_096  # lists along a side whose length is free
SENTENCE = 1_000  # characters of what is said of a request: it may repeat a part of it


class Served:
    """A model with its metrics, its monitor and the threads that run it.

    Args:
        model: the exported model.
        limits: what a request may ask for.
        alpha: the probability of a false drift alarm.
    """

    def __init__(self, model: ExportedModel, limits: Limits, alpha: float = 0.05) -> None:
        self.model, self.limits, self.alpha = model, limits, alpha
        self.monitor: DriftMonitor | None = model.monitor(alpha)
        self.state: DriftState | None = None
        self.containers = most_containers(model, limits.batch)
        self.running = 0
        self.bodies = Bodies(limits)
        self._lock = threading.Lock()
        self._unseen: list[dict[str, Any]] = []  # signals that the monitor is to see
        self._unseen_inputs = 0
        self.pool = ThreadPoolExecutor(limits.threads, "predict")
        self.registry = CollectorRegistry()
        name, one = "brainet_", self.registry
        self.requests = Counter(f"{name}requests", "requests by status", ["path", "status"], registry=one)
        self.seconds = Histogram(f"{name}request_seconds", "time until a request was answered", ["path"], registry=one)
        self.inputs = Counter(f"{name}inputs", "inputs that were predicted", registry=one)
        self.unknown = Counter(f"{name}inputs_unknown", "inputs that the model called unknown", registry=one)
        self.evidence = Gauge(f"{name}drift_evidence", "evidence that inputs have changed", registry=one)
        self.alarm = Gauge(f"{name}drift_alarm", "1 after an alarm, else 0", registry=one)

    async def answer(self, request: Request, kind: str, ask: Ask) -> Response:
        """Read the body of a request, and answer it on another thread, within the time that there is."""
        if media_type(request.headers) != kind:
            raise Refused(415, f"expected {kind}, got another content-type: send {kind}")
        self._make_room()
        body = await self.bodies.read(request.receive, declared_length(request.headers))
        size = len(body)
        try:
            self._make_room()
        except Refused:
            self.bodies.let_go(size)
            raise
        self.running += 1
        given_up = threading.Event()
        future = asyncio.get_running_loop().run_in_executor(self.pool, self._run, ask, body, given_up)
        future.add_done_callback(lambda done: self._done(done, size))
        try:
            content = await asyncio.wait_for(asyncio.shield(future), self.limits.seconds)
        except asyncio.TimeoutError as error:
            given_up.set()
            raise too_slow(self.limits) from error
        except (ValueError, OverflowError) as error:
            raise Refused(422, str(error)) from error
        return Response(content, media_type="application/json")

    def _make_room(self) -> None:
        most = self.limits.waiting
        if self.running >= most:
            raise Refused(429, f"expected at most {most} requests at a time, got more: try again later")

    def _done(self, future: Any, size: int) -> None:
        self.running -= 1
        self.bodies.let_go(size)
        if not future.cancelled():
            future.exception()  # nobody may be waiting for it any more

    def _run(self, ask: Ask, body: bytearray, given_up: threading.Event) -> bytes:
        """All that takes long: read what is asked, run the model, write the answer."""
        try:
            if given_up.is_set():
                raise too_slow(self.limits)
            outputs = ask(body, given_up)
        finally:
            body.clear()  # whoever else still knows it, its memory is free
        self.watch(outputs)
        return json.dumps({"answers": self.model.as_answers(outputs)}, allow_nan=False).encode()

    def ask_json(self, body: bytearray, given_up: threading.Event) -> Outputs:
        """What the model says of the inputs, rows or texts in a body of JSON."""
        asked = read_json(body, self.containers)
        kind = next(iter(asked)) if isinstance(asked, dict) and len(asked) == 1 else None
        ways = {"inputs": self.model.predict, "rows": self.model.predict_rows, "texts": self.model.predict_texts}
        if kind not in ways:
            raise Refused(422, 'expected {"inputs": …}, {"rows": …} or {"texts": …}, got others: send one of them')
        check_batch(asked[kind], self.limits.batch)
        return ways[kind](asked[kind])

    def ask_images(self, content_type: str, body: bytearray, given_up: threading.Event) -> Outputs:
        """What the model says of the image files in a form."""
        files = files_of_form(body, content_type, self.limits.batch)
        if not files:
            raise Refused(422, "expected at least one image file, got none: send some")
        return self.model.predict_images(self._while_wanted(files, given_up))

    def _while_wanted(self, files: Sequence[bytes], given_up: threading.Event) -> Iterator[bytes]:
        for file in files:
            if given_up.is_set():
                raise too_slow(self.limits)
            yield file

    def watch(self, outputs: Mapping[str, Any]) -> None:
        """Count inputs, and keep what the monitor is to see of them, at the latest when /drift or /metrics asks."""
        size = len(next(iter(outputs.values())))
        self.inputs.inc(size)
        if "known" in outputs and np.ndim(outputs["known"]) == 1:
            self.unknown.inc(int((~np.asarray(outputs["known"], dtype=bool)).sum()))
        if self.monitor is None:
            return
        with self._lock:  # inputs in one order, whatever thread predicts them
            self._unseen.append(self.model.signals(outputs))
            self._unseen_inputs += size
        if self._unseen_inputs >= WATCHED:
            self.catch_up()

    def catch_up(self) -> None:
        """Show the monitor the inputs that it has not seen: many at a time take it far less time than one by one."""
        with self._lock:
            if self.monitor is None or not self._unseen:
                return
            parts, self._unseen, self._unseen_inputs = self._unseen, [], 0
            self.state = self.monitor.update({n: np.concatenate([part[n] for part in parts]) for n in parts[0]})
            self.evidence.set(self.state.evidence)
            self.alarm.set(float(self.state.alarm))

    def drift(self) -> dict[str, Any]:
        """What the monitor knows, as JSON can hold it."""
        if self.monitor is None:
            return {"watched": False}
        self.catch_up()
        state = self.state
        found: dict[str, Any] = {"watched": True, "alpha": self.alpha, "inputs": 0, "evidence": 1.0, "alarm": False}
        if state is None:
            return found
        known = ("inputs", "evidence", "alarm", "alarm_at", "changed_at", "leading", "column", "signals")
        return found | {name: getattr(state, name) for name in known}


class Gate:
    """The first to see a request, and the last to see its answer: it refuses strangers, and counts.

    Args:
        app: what answers.
        served: has the metrics.
        hosts: names of this server beside localhost.
    """

    def __init__(self, app: ASGIApp, served: Served, hosts: Collection[str]) -> None:
        self.app, self.served, self.hosts = app, served, frozenset(name.lower() for name in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, route = time.perf_counter(), scope["path"]
        path = route if route in KNOWN_PATHS else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.served.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            headers = Headers(scope=scope)
            check_host(headers.get("host", ""), str((scope.get("server") or ("",))[0]), self.hosts)
            check_site(scope["method"], headers)
        except Refused as refusal:
            await refused(refusal)(scope, receive, counted)
        else:
            await self._passed_on(path, scope, receive, counted)
        self.served.seconds.labels(path).observe(time.perf_counter() - start)

    async def _passed_on(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:  # the answer to it is made outside of here
            self.served.requests.labels(path, "500").inc()
            raise


def make_app(
    model: ExportedModel, limits: Limits | None = None, alpha: float = 0.05, hosts: Collection[str] = ()
) -> FastAPI:
    """The application that serves an exported model; any ASGI server runs it.

    Args:
        model: the exported model.
        limits: what a request may ask for.
        alpha: the probability of a false drift alarm.
        hosts: names beside localhost by which requests may call a server that listens on this machine alone.
    """
    served = Served(model, limits or Limits(), alpha)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        served.pool.shutdown(wait=True)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.served = served
    app.add_middleware(Gate, served=served, hosts=hosts)

    @app.exception_handler(Refused)
    async def told(request: Request, error: Refused) -> JSONResponse:
        return refused(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the server failed; its log says why"}, 500)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "inputs": model.inputs}

    @app.get("/model")
    async def about() -> dict[str, Any]:
        shown = {name: value for name, value in model.about.items() if name != "held_out"}
        return shown | {"limits": {"batch": served.limits.batch, "megabytes": served.limits.megabytes}}

    @app.get("/drift")
    async def drift() -> dict[str, Any]:
        return served.drift()

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        served.catch_up()
        return PlainTextResponse(generate_latest(served.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/openapi.json")
    async def description() -> dict[str, Any]:
        return openapi_of(model, served.limits)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return await served.answer(request, "application/json", served.ask_json)

    @app.post("/predict/images")
    async def predict_images(request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        return await served.answer(request, "multipart/form-data", partial(served.ask_images, kind))

    return app


KNOWN_PATHS = ("/predict", "/predict/images", "/health", "/model", "/drift", "/metrics", "/openapi.json")


def refused(refusal: Refused) -> JSONResponse:
    """The answer to a request that is refused; what it repeats of the request is cut, and written as text."""
    sentence = refusal.sentence if len(refusal.sentence) <= SENTENCE else refusal.sentence[:SENTENCE] + "…"
    detail = sentence.encode("utf-8", "backslashreplace").decode("utf-8")  # half a pair of surrogates is no text
    return JSONResponse({"detail": detail}, refusal.status, {"Retry-After": "1"} if refusal.status == 429 else None)


def too_slow(limits: Limits) -> Refused:
    """What is said where there was no answer in time."""
    return Refused(504, f"expected an answer within {limits.seconds:g} s, got none: send fewer samples")


def media_type(headers: Mapping[str, str]) -> str:
    """What a body is, without settings; in small letters, since it is the same in large ones."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def declared_length(headers: Mapping[str, str]) -> int:
    """Bytes that a request says its body has; 0 where it does not."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0


def most_containers(model: ExportedModel, batch: int) -> int:
    """Lists and objects in the largest request that a model takes."""
    lists = sum(math.prod(n or LONG for n in one["shape"][1:-1]) for one in model.inputs)
    cells = 0 if model.features is None else len(model.features)
    return 2 * batch * (1 + lists + cells)


def check_batch(given: Any, most: int) -> None:
    """Refuse more samples than a request may have, before they are made into numbers."""
    columns = list(given.values()) if isinstance(given, dict) else [given]
    for column in columns:
        if not isinstance(column, list) or not column:
            raise Refused(422, "expected a list of samples, got none: send at least one")
        if len(column) > most:
            raise Refused(413, f"expected at most {most} samples, got {len(column)}: send them in parts")
