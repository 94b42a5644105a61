"""Pushing a model to a hub, and reading it from there: a small hub on the loopback, asked by huggingface_hub itself."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.pretrained import from_pretrained, push_to_hub
from brainet_pl.network import Linear

hub = pytest.importorskip("huggingface_hub")
COMMIT = "1" * 40
REPO = "someone/digits"


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a push and a download ask for."""

    def log_message(self, *words):
        pass

    def reply(self, content, status=200, headers=()):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self):
        body = self.read_body()
        self.server.asked.append(self.path)
        if self.path == "/api/repos/create":
            self.server.private = json.loads(body).get("private", json.loads(body).get("visibility") == "private")
            self.reply({"url": f"{self.server.address}/{REPO}", "name": REPO, "id": "1"})
        elif "/preupload/" in self.path:
            files = [one | {"uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
            self.reply({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.reply({"commitUrl": f"{self.server.address}/{REPO}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.reply({})

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if REPO not in path:
            self.reply({"error": "Repository not found"}, 404, headers=[("X-Error-Code", "RepoNotFound")])
        elif f"/resolve/{COMMIT}/" in path:
            content = self.server.files[path.rpartition(f"/resolve/{COMMIT}/")[2]]
            tag = hashlib.sha256(content).hexdigest()
            self.reply(content, headers=[("ETag", f'"{tag}"'), ("X-Repo-Commit", COMMIT)])
        elif "/tree/" in path:
            named = self.server.files.items()
            self.reply([{"type": "file", "path": name, "size": len(it), "oid": "0" * 40} for name, it in named])
        else:
            names = [{"rfilename": name} for name in self.server.files]
            info = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": names, "tags": [], "private": True}
            self.reply(info | {"downloads": 0, "likes": 0})

    do_HEAD = do_GET


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    made.files, made.asked, made.private = {}, [], None
    made.address = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_model_goes_to_a_hub_and_comes_back(server, tmp_path):
    model = BRAINet(3, head=Linear())
    model.predictor.build_head(Linear(), 5)
    where = push_to_hub(model.eval(), REPO, endpoint=server.address, token="hf_none")
    assert where.endswith(COMMIT)
    assert server.private
    assert sorted(name for name in server.files if not name.startswith(".")) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    server.files["weights.pkl"] = b"a file of somebody else's"
    x = torch.rand(4, 5)
    access = {"endpoint": server.address, "cache_dir": tmp_path, "token": "hf_none"}
    with torch.no_grad():
        expected, found = model.predict_step(x, 0), from_pretrained(REPO, hub=access).predict_step(x, 0)
    assert torch.equal(found["probabilities"], expected["probabilities"])
    assert not any("weights.pkl" in path for path in server.asked)
    with pytest.raises(FileNotFoundError, match="expected a folder or a model of a hub, got 'someone/else'"):
        from_pretrained("someone/else", hub=access)
