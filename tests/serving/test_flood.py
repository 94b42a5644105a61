"""A server among strangers, on the loopback: what they send has a bounded price, and leaves no memory behind."""

import io
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

MEGABYTE = b" " * 1_000_000
SAMPLE = [[[[0.0] * 8] * 8]]
LARGE_JSON = b'{"inputs": [' + b"0," * 9_400_000 + b"0]}"


def memory(server):
    """Megabytes that a process has, and the most that it had."""
    status = Path(f"/proc/{server.pid}/status")
    if not status.is_file():
        pytest.skip("the system does not say what a process holds")
    text = status.read_text()
    return [int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) / 1e3 for name in ("VmRSS", "VmHWM")]


def settled(server, below):
    """Megabytes that a process has, as soon as they are below these, or after ten seconds."""
    deadline = time.monotonic() + 10
    while memory(server)[0] > below and time.monotonic() < deadline:
        time.sleep(0.1)
    return memory(server)[0]


def ask(address, **request):
    return httpx.post(f"{address}/predict", **(request or {"json": {"inputs": SAMPLE}}), timeout=60)


def send_all_but_a_byte(port, kept):
    """Begin a request of 19 MB that never ends; its status, "" where the connection ended without one."""
    connection = socket.create_connection(("127.0.0.1", port))
    kept.append(connection)
    connection.settimeout(60)
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 19000001\r\n\r\n"
    try:
        connection.sendall(head.encode())
        for _ in range(19):
            connection.sendall(MEGABYTE)
        return connection.recv(20)[9:12].decode()
    except OSError:
        return ""


@pytest.mark.integration
def test_bodies_that_never_end_hold_no_more_than_they_may_and_leave_nothing(served, start, stop):
    server, address = start(served.folder, "--timeout", "6")
    assert ask(address).status_code == 200
    before, kept = memory(server)[0], []
    with ThreadPoolExecutor(60) as crowd:
        sent = [crowd.submit(send_all_but_a_byte, int(address.rpartition(":")[2]), kept) for _ in range(60)]
        time.sleep(3)
        assert ask(address).status_code == 200  # a small body is always taken
        statuses = [one.result(timeout=60) for one in sent]
    assert statuses.count("429") >= 40
    assert set(statuses) <= {"429", "408", ""}
    assert memory(server)[1] - before < 350  # eight of 20 MB, and what 60 connections buffer; it was 897
    for connection in kept:
        connection.close()
    assert settled(server, before + 40) < before + 40
    stop(server)


@pytest.mark.integration
def test_large_bodies_of_json_do_not_stop_the_others(served, start, stop):
    server, address = start(served.folder)
    assert ask(address).status_code == 200
    before, waits, statuses = memory(server)[0], [], []

    def post():
        answer = ask(address, content=LARGE_JSON, headers={"content-type": "application/json"})
        statuses.append(answer.status_code)

    senders = [threading.Thread(target=post) for _ in range(8)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        begin = time.monotonic()
        assert httpx.get(f"{address}/health", timeout=60).status_code == 200
        waits.append(time.monotonic() - begin)
        time.sleep(0.05)
    assert statuses == [413] * 8  # more samples than are taken; none was called too slow
    assert max(waits) < 3  # one body is read at a time; it was 5.6 seconds
    assert settled(server, before + 40) < before + 40
    stop(server)


def file_of(*size, kind="PNG"):
    file = io.BytesIO()
    Image.new("L", size).save(file, kind)
    return file.getvalue()


HOSTILE = [
    ("/predict", {"content": b"[" * 9_000, "headers": {"content-type": "application/json"}}, 400),
    ("/predict", {"content": b'{"inputs": {"\\ud800": [1]}}', "headers": {"content-type": "application/json"}}, 422),
    ("/predict", {"content": b"{}" * 11_000, "headers": {"content-type": "application/json"}}, 413),
    ("/predict", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
    ("/predict", {"json": {"inputs": SAMPLE * 300}}, 413),
    ("/predict", {"json": {"inputs": [[[[1e300] * 8] * 8]]}}, 200),
    ("/predict", {"json": {"rows": [{"a": 1}]}}, 422),
    ("/predict", {"json": {"inputs": SAMPLE}, "headers": {"origin": "https://evil.example"}}, 403),
    ("/predict", {"json": {"inputs": SAMPLE}, "headers": {"host": "evil.example"}}, 421),
    ("/predict/images", {"files": [("f", file_of(500, 1))]}, 200),
    ("/predict/images", {"files": [("f", file_of(1, 60_000))]}, 200),
    ("/predict/images", {"files": [("f", file_of(3_000, 2_000, kind="JPEG"))]}, 200),
    ("/predict/images", {"files": [("f", file_of(300, 200)[:-40])]}, 422),
    ("/predict/images", {"files": [("f", b"%!PS-Adobe-3.0 EPSF-3.0\n")]}, 422),
    ("/predict/images", {"content": b"--b", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400),
    ("/nowhere", {"json": {}}, 404),
]
GOOD = [
    ("/predict", {"json": {"inputs": SAMPLE}}, 200),
    ("/predict", {"json": {"inputs": {"input": SAMPLE * 40}}}, 200),
    ("/predict/images", {"files": [("f", file_of(9, 8)), ("f", file_of(20, 30))]}, 200),
]


@pytest.mark.slow
def test_twenty_thousand_requests_good_and_bad_leave_no_memory_behind(served, start, stop):
    server, address = start(served.folder)
    choose, held = random.Random(0), []
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(20_000):
            path, request, status = choose.choice(GOOD if number % 2 else HOSTILE)
            answer = client.post(path, **request)
            assert answer.status_code == status, (path, answer.text[:200])
            if number % 1_000 == 999:
                assert client.get("/drift").status_code == client.get("/metrics").status_code == 200
                held.append(memory(server)[0])
    assert max(held[10:]) - held[3] < 12  # megabytes
    stop(server)
