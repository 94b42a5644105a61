"""An exported model over HTTP: predictions of numbers, rows and images, health, metrics, and the drift alarm.

`POST /predict` takes JSON, `{"inputs": [[…], …]}`, `{"inputs": {"name": […], …}}` or `{"rows": [{…}, …]}`.
`POST /predict/images` takes image files as a form. `GET /model` says what the model takes and gives, `GET /drift`
whether inputs have changed, `GET /health` whether it runs, `GET /metrics` is for Prometheus. What can't be answered has
a status of 400 (not understood), 408 (sent too slowly), 413 (too large), 415 (of another kind), 422 (not the model's
inputs), 429 (too busy) or 504 (too slow), and a sentence under `detail`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException

from brainet_pl.monitoring import DriftMonitor
from brainet_pl.monitoring.drift import DriftState
from brainet_pl.serving.folder import ExportedModel

Outputs = dict[str, Any]
WATCHED = 256  # inputs that are shown to the drift monitor at a time, unless somebody asks for its state before


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        megabytes: of its body.
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
        self.running = 0
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

    async def answer(self, work: Callable[[], Outputs]) -> list[dict[str, Any]]:
        """Run the model on another thread, within the time that there is."""
        if self.running >= self.limits.waiting:
            raise HTTPException(
                429, f"expected at most {self.limits.waiting} requests at a time, got more: try again later"
            )
        self.running += 1
        future = asyncio.get_running_loop().run_in_executor(self.pool, self._run, work)
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.limits.seconds)
        except asyncio.TimeoutError as error:
            raise HTTPException(
                504, f"expected an answer within {self.limits.seconds:g} s, got none: send fewer samples"
            ) from error
        except (ValueError, OverflowError) as error:
            raise HTTPException(422, str(error)) from error

    def _done(self, future: Any) -> None:
        self.running -= 1
        if not future.cancelled():
            future.exception()  # nobody may be waiting for it any more

    def _run(self, work: Callable[[], Outputs]) -> list[dict[str, Any]]:
        outputs = work()
        self.watch(outputs)
        return self.model.as_answers(outputs)

    def watch(self, outputs: Mapping[str, Any]) -> None:
        """Count inputs, and keep what the monitor is to see of them, at the latest when /drift or /metrics asks."""
        size = len(next(iter(outputs.values())))
        self.inputs.inc(size)
        if "known" in outputs:
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


def make_app(model: ExportedModel, limits: Limits | None = None, alpha: float = 0.05) -> FastAPI:
    """The application that serves an exported model; any ASGI server runs it."""
    served = Served(model, limits or Limits(), alpha)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        served.pool.shutdown(wait=True)

    app = FastAPI(title="brainet", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.served = served

    @app.middleware("http")
    async def measured(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        start, route = time.perf_counter(), request.scope["path"]
        response = await call(request)
        path = route if route in KNOWN_PATHS else "other"
        served.requests.labels(path, str(response.status_code)).inc()
        served.seconds.labels(path).observe(time.perf_counter() - start)
        return response

    @app.exception_handler(StarletteHTTPException)
    async def told(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status_code)

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

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "expected JSON, got another content-type: send application/json")
        limit_body(request, served.limits)
        try:
            asked = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"expected JSON, got what is none ({error}): correct it") from error
        if not isinstance(asked, dict) or len(asked.keys() & {"inputs", "rows"}) != 1:
            raise HTTPException(422, 'expected {"inputs": …} or {"rows": …}, got others: send one of the two')
        kind = "inputs" if "inputs" in asked else "rows"
        check_batch(asked[kind], served.limits.batch)
        work = (lambda: model.predict(asked[kind])) if kind == "inputs" else (lambda: model.predict_rows(asked[kind]))
        return {"answers": await served.answer(work)}

    @app.post("/predict/images")
    async def predict_images(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "multipart/form-data":
            raise HTTPException(
                415, "expected image files as a form, got another content-type: send multipart/form-data"
            )
        limit_body(request, served.limits)
        async with request.form(max_files=served.limits.batch, max_fields=16) as form:
            uploads = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
            files = [await upload.read() for upload in uploads]
        if not files:
            raise HTTPException(422, "expected at least one image file, got none: send some")
        return {"answers": await served.answer(lambda: model.predict_images(files))}

    return app


KNOWN_PATHS = ("/predict", "/predict/images", "/health", "/model", "/drift", "/metrics")


def limit_body(request: Request, limits: Limits) -> None:
    """Let the body of a request end with an error where it is too large or too slow, whatever its headers say."""
    most, receive, seen = int(limits.megabytes * 1e6), request.receive, 0
    deadline = time.monotonic() + limits.seconds

    def grown(size: int) -> None:
        if size > most:
            raise HTTPException(
                413, f"expected a body of at most {limits.megabytes:g} MB, got more: send fewer samples"
            )

    async def counted() -> Any:
        nonlocal seen
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError as error:
            raise HTTPException(
                408, f"expected the body within {limits.seconds:g} s, got a part: send it whole"
            ) from error
        seen += len(message.get("body", b""))
        grown(seen)
        return message

    declared = request.headers.get("content-length", "")
    grown(int(declared) if declared.isdigit() else 0)
    request._receive = counted


def check_batch(given: Any, most: int) -> None:
    """Refuse more samples than a request may have, before they are made into numbers."""
    columns = list(given.values()) if isinstance(given, dict) else [given]
    for column in columns:
        if not isinstance(column, list) or not column:
            raise HTTPException(422, "expected a list of samples, got none: send at least one")
        if len(column) > most:
            raise HTTPException(413, f"expected at most {most} samples, got {len(column)}: send them in parts")
