"""A model over HTTP on the loopback: answers, limits, bad requests, metrics, and a stop that loses nothing."""

import asyncio
import http.client
import io
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from brainet_pl import ExportedModel
from brainet_pl.cli.serve import find_folder

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
from fastapi.testclient import TestClient  # noqa: E402

from brainet_pl.serving.app import make_app  # noqa: E402
from brainet_pl.serving.limits import Limits  # noqa: E402

JSON = {"content-type": "application/json"}


@pytest.fixture
def client(served):
    with TestClient(make_app(ExportedModel(served[1], 1), Limits(megabytes=0.2, batch=16, seconds=5))) as client:
        yield client


def file_of(x):
    picture = Image.fromarray((255 * np.asarray(x[0])).round().astype(np.uint8))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_answers_are_the_models(served, client):
    model, _, known = served
    with torch.no_grad():
        expected = model.predict_step(known[:5], 0)
    answer = client.post("/predict", json={"inputs": known[:5].tolist()})
    assert answer.status_code == 200
    for i, one in enumerate(answer.json()["answers"]):
        assert one["class"] == int(expected["class"][i])
        np.testing.assert_allclose(list(one["probabilities"].values()), expected["probabilities"][i], atol=1e-5)
        assert one["known"] == bool(expected["known"][i])
    named = client.post("/predict", json={"inputs": {"input": known[:5].tolist()}})
    assert named.json() == answer.json()
    pictures = client.post("/predict/images", files=[("files", file_of(x)) for x in known[:5]])
    assert [one["class"] for one in pictures.json()["answers"]] == expected["class"].tolist()
    assert client.get("/health").json()["status"] == "ok"
    about = client.get("/model").json()
    assert about["class_names"] == [str(i) for i in range(8)]
    assert "held_out" not in about


def test_a_change_of_inputs_is_in_drift_and_metrics(served, client):
    known = served[2]
    assert client.get("/drift").json() == {"watched": True, "alpha": 0.05, "inputs": 0, "evidence": 1.0, "alarm": False}
    for start in range(0, 96, 16):
        client.post("/predict", json={"inputs": known[start : start + 16].tolist()})
    state = client.get("/drift").json()
    assert (state["inputs"], state["alarm"]) == (96, False)
    torch.manual_seed(0)
    for _ in range(6):
        client.post("/predict", json={"inputs": (3 * torch.rand(16, 1, 8, 8)).tolist()})
    state = client.get("/drift").json()
    assert state["alarm"]
    assert 96 < state["alarm_at"] <= 192
    metrics = client.get("/metrics").text
    assert "brainet_drift_alarm 1.0" in metrics
    assert "brainet_inputs_total 192.0" in metrics
    assert float(re.search(r"^brainet_inputs_unknown_total (\S+)$", metrics, re.M)[1]) > 30
    assert 'brainet_requests_total{path="/predict",status="200"} 12.0' in metrics
    assert 'brainet_request_seconds_count{path="/predict"} 12.0' in metrics


SAMPLE = [[[[0.0] * 8] * 8]]
FILE = ("f", file_of(np.zeros((1, 8, 8))))


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"content": b"{", "headers": JSON}, 400, "expected JSON, got what is none"),
        ({"content": b"[" * 9_000, "headers": JSON}, 400, "expected JSON"),
        ({"content": b"[" * 100_000, "headers": JSON}, 413, "expected at most 10,000 lists and objects"),
        ({"content": b"\xff\xfe", "headers": JSON}, 400, "expected JSON"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "send application/json"),
        ({"json": {}}, 422, 'expected {"inputs"'),
        ({"json": [1]}, 422, 'expected {"inputs"'),
        ({"json": {"inputs": SAMPLE, "rows": []}}, 422, 'expected {"inputs"'),
        ({"json": {"inputs": SAMPLE, "threshold": 0.5}}, 422, 'expected {"inputs"'),
        ({"content": b'{"inputs": {"\\ud800": [1]}}', "headers": JSON}, 422, "got \\ud800"),
        ({"content": b'{"inputs": {"' + 9_000 * b"a" + b'": [1]}}', "headers": JSON}, 422, "aaa…"),
        ({"json": {"inputs": []}}, 422, "send at least one"),
        ({"json": {"inputs": "text"}}, 422, "expected a list of samples"),
        ({"json": {"inputs": {}}}, 422, "expected the input input"),
        ({"json": {"inputs": [[0.0] * 64]}}, 422, "expected input of the shape (B, 1, 8, 8), got (1, 64)"),
        ({"json": {"inputs": [[[[0.0] * 8] * 7 + [["x"] * 8]]]}}, 422, "expected numbers"),
        ({"json": {"inputs": [[[[0.0] * 8] * 7 + [[None] * 7]]]}}, 422, "expected numbers"),
        ({"json": {"inputs": SAMPLE * 17}}, 413, "expected at most 16 samples, got 17"),
        ({"json": {"rows": [{"a": 1}]}}, 422, "without a way to prepare rows"),
        ({"content": b" " * 300_000, "headers": JSON}, 413, "expected a body of at most 0.2 MB"),
        ({"content": (b" " * 50_000 for _ in range(6)), "headers": JSON}, 413, "expected a body of at most 0.2 MB"),
    ],
)
def test_bad_requests_have_a_status_and_a_sentence(client, request_, status, said):
    answer = client.post("/predict", **request_)
    assert answer.status_code == status
    assert said in answer.json()["detail"]
    assert "Traceback" not in answer.text
    assert client.post("/predict", json={"inputs": SAMPLE}).status_code == 200


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        ([("files", b"no image")], 422, "got bytes that can't be read as one"),
        ([("files", b"")], 422, "got bytes that can't be read as one"),
        ([("files", b"x" * 300_000)], 413, "expected a body of at most"),
        ([("files", b"x")] * 17, 413, "expected at most 16 files"),
        ([("files", (None, b"x"))], 422, "expected at least one image file"),
        ([("files", (None, b"x"))] * 40, 413, "expected at most 16 fields beside files"),
    ],
)
def test_bad_files_have_a_status_and_a_sentence(client, files, status, said):
    answer = client.post("/predict/images", files=files)
    assert answer.status_code == status
    assert said in answer.json()["detail"]


def test_other_pictures_are_taken(served, client):
    """Another size, in colour, and one that is cut off: an answer, or a status."""
    rng = np.random.default_rng(0)
    for mode, size in (("RGB", (31, 20)), ("L", (8, 8)), ("RGBA", (9, 9)), ("P", (50, 10))):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).convert(mode).save(file, "PNG")
        assert client.post("/predict/images", files=[("f", file.getvalue())]).status_code == 200
        cut = client.post("/predict/images", files=[("f", file.getvalue()[:-40])])
        assert cut.status_code == 422
    form = client.post("/predict/images", data={"a": "b"})
    assert form.status_code == 415
    assert client.get("/nowhere").status_code == 404
    wrong = client.get("/predict")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_a_media_type_is_the_same_in_large_letters(client):
    body = json.dumps({"inputs": SAMPLE})
    for kind in ("Application/JSON", "application/json; charset=utf-8", " APPLICATION/JSON;"):
        assert client.post("/predict", content=body, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("path", ["/model/", "/predict/", "//model"])
def test_no_path_is_sent_on_to_another_host(client, path):
    for method in ("GET", "POST"):
        answer = client.request(method, path, headers={"host": "evil.example"}, follow_redirects=False)
        assert answer.status_code == 404
        assert "location" not in answer.headers


def idle(served):
    """Waits until all that was asked has ended."""
    deadline = time.monotonic() + 10
    while served.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (served.running, served.bodies.held) == (0, 0)


def test_a_slow_model_is_told_a_crowd_is_sent_away_and_what_nobody_waits_for_is_not_asked(served):
    class Slow(ExportedModel):
        asked = 0

        def predict(self, inputs):
            self.asked += 1
            time.sleep(1.0)
            return super().predict(inputs)

    model = Slow(served[1], 1)
    app = make_app(model, Limits(seconds=0.3, waiting=2))
    with TestClient(app) as client, ThreadPoolExecutor(4) as crowd:
        found = list(crowd.map(lambda _: client.post("/predict", json={"inputs": SAMPLE}), range(4)))
        assert sorted({one.status_code for one in found}) == [429, 504]
        assert all(("retry-after" in one.headers) == (one.status_code == 429) for one in found)
        idle(app.state.served)
        assert model.asked == 1  # the second one was given up before its turn
        assert client.get("/health").status_code == 200


def test_images_that_nobody_waits_for_are_not_looked_at(served):
    class Slow(ExportedModel):
        looked = 0

        def predict_images(self, files):
            for _ in files:
                self.looked += 1
                time.sleep(0.2)
            return {}

    model = Slow(served[1], 1)
    app = make_app(model, Limits(seconds=0.3))
    with TestClient(app) as client:
        answer = client.post("/predict/images", files=[("f", b"x")] * 20)
        assert answer.status_code == 504
        idle(app.state.served)
    assert model.looked < 10


def test_a_server_that_fails_says_so_and_counts_it(served):
    class Broken(ExportedModel):
        def predict(self, inputs):
            raise RuntimeError("secret")

    with TestClient(make_app(Broken(served[1], 1)), raise_server_exceptions=False) as client:
        answer = client.post("/predict", json={"inputs": SAMPLE})
        assert (answer.status_code, answer.json()) == (500, {"detail": "the server failed; its log says why"})
        assert 'brainet_requests_total{path="/predict",status="500"} 1.0' in client.get("/metrics").text


@pytest.mark.integration
def test_web_pages_and_other_names_do_not_reach_a_local_server(served, start, stop):
    server, address = start(served[1], "--allow_host", "model.example")
    for headers, status in (
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "model.example", "sec-fetch-site": "same-origin", "origin": "https://model.example"}, 200),
        ({"host": "evil.example"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ):
        for path, content in (("/predict", {"json": {"inputs": SAMPLE}}), ("/predict/images", {"files": [FILE]})):
            answer = httpx.post(f"{address}{path}", headers=headers, **content, timeout=60)
            assert (answer.status_code, "detail" in answer.json()) == (status, status != 200)
            assert not [name for name in answer.headers if name.startswith("access-control")]
    stop(server)


def test_the_command_serves_and_a_stop_loses_nothing(served, start, stop):
    """SIGTERM in the middle of many requests: what the model was asked is answered, and the exit is clean.

    A connection between two requests is closed at once, maybe while its client writes the next one. The model never
    sees that request, so it is to be sent again elsewhere: the rule for clients in docs/howto/production.md.
    """
    server, address = start(served[1])
    answered, unseen, started = [], [], threading.Barrier(5)

    def ask(_):
        with httpx.Client(timeout=20) as client:
            for i in range(2000):
                try:
                    answer = client.post(f"{address}/predict", json={"inputs": SAMPLE})
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                    unseen.append(error)
                    return
                assert answer.status_code == 200
                assert len(answer.json()["answers"]) == 1
                answered.append(1)
                if i == 3:
                    started.wait(20)

    with ThreadPoolExecutor(4) as crowd:
        asked = [crowd.submit(ask, i) for i in range(4)]
        started.wait(20)
        time.sleep(0.05)
        counted = stop(server)
        for one in asked:
            one.result(timeout=60)
    assert len(unseen) == 4  # each client went on until there was nobody
    assert counted == len(answered) >= 16


@pytest.mark.slow
def test_ten_thousand_connections_are_answered(served, start, stop):
    """All open at a time, all with a request: each has a status; and silence is not kept for ever."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_500:
        pytest.skip("the system allows fewer open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server, address = start(served[1], "--max_connections", "500")
    try:
        statuses = asyncio.run(ask_from_many(int(address.rpartition(":")[2]), 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(statuses) == 10_000
    assert set(statuses) <= {b"200", b"429", b"503"}
    deadline = time.monotonic() + 20
    while httpx.post(f"{address}/predict", json={"inputs": SAMPLE}).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    stop(server)


async def ask_from_many(port, count):
    body = json.dumps({"inputs": SAMPLE}).encode()
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    made = []
    for _ in range(0, count, 250):
        made += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(250)))

    async def ask(reader, writer):
        writer.write(head.encode() + body)
        return (await asyncio.wait_for(reader.readline(), 60)).split()[1]

    found = await asyncio.gather(*(ask(*one) for one in made))
    for _, writer in made:
        writer.close()
    return found


def test_connections_that_say_nothing_are_closed_and_others_are_served(served, start, stop):
    """One says nothing, one sends a byte now and then: neither is kept longer than a request may take."""
    server, address = start(served[1], "--timeout", "2")
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as silent, socket.create_connection(("127.0.0.1", port)) as slow:
        silent.settimeout(20)
        slow.settimeout(20)
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
            while time.monotonic() - begin < 20:
                slow.sendall(b"P")
                time.sleep(0.2)
        assert time.monotonic() - begin < 10
        assert silent.recv(1) == b""
        assert httpx.post(f"{address}/predict", json={"inputs": SAMPLE}).status_code == 200
    stop(server)


def test_a_hundred_megabytes_are_refused_with_an_answer(served, start, stop):
    """Declared or not, the client that sends all of it reads a status, not a reset connection."""
    server, address = start(served[1])
    piece = b" " * 1_000_000
    for headers in ({"content-length": str(100 * len(piece))}, {}):
        client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)  # it reads when all is sent
        client.request(
            "POST",
            "/predict",
            (piece for _ in range(100)),
            JSON | headers | ({} if headers else {"transfer-encoding": "chunked"}),
            encode_chunked=not headers,
        )
        answer = client.getresponse()
        assert answer.status == 413
        assert b"expected a body of at most 20 MB" in answer.read()
        client.close()
    status = Path(f"/proc/{server.pid}/status")
    if status.is_file():
        assert int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) < 400_000  # it was never held as a whole
    assert stop(server) == 0


def test_what_is_served(served, tmp_path):
    assert find_folder(served[1], tmp_path) == served[1]
    with pytest.raises(FileNotFoundError, match="expected the folder of an exported model, of a run, or a checkpoint"):
        find_folder(tmp_path, tmp_path)
