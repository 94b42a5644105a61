"""One exported model for all tests of this folder: an export takes longer than what is asked of it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from brainet_pl import BRAINet, export_folder
from brainet_pl._utils.framework import pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import Conformal, TemperatureScaling
from brainet_pl.datamodules import Digits
from brainet_pl.network import Linear
from brainet_pl.scores import Mahalanobis
from brainet_pl.serving.images import ImageSteps

ROOT = Path(__file__).parents[2]


class Served(NamedTuple):
    model: BRAINet
    folder: object
    known: torch.Tensor  # test inputs (N, 1, 8, 8)


@pytest.fixture(scope="session")
def served(tmp_path_factory, quiet_trainer):
    """A model of 8 × 8 images that takes numbers and files, its folder, and known inputs."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    place = tmp_path_factory.mktemp("served")
    pl.seed_everything(0, verbose=False)
    data = Digits(images=True)
    model = BRAINet(
        8,
        backbone=Backbone(nn.Flatten(), head_layer=""),
        head=Linear(),
        scores=[Mahalanobis()],
        calibration=TemperatureScaling(),
        conformal=Conformal(),
        lr=0.01,
    )
    quiet_trainer(place, epochs=4).fit(model, datamodule=data)
    held, known = (torch.stack([x for x, _ in part]) for part in (data.val_set, data.test_set))
    folder = export_folder(model.eval(), place / "model", held=held, images=ImageSteps(8, 8, channels=1))
    return Served(model, folder, known)


@pytest.fixture
def start():
    """A function (folder, *words) -> the process of `brainet serve`, which ends with the test, and its address."""
    started = []

    def begin(folder, *words):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "brainet_pl.cli", "serve", str(folder), "--port", "0", *words]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        said = started[-1].stderr.readline()
        assert "serving on http://127.0.0.1:" in said, said + started[-1].stderr.read()[-2000:]
        return started[-1], said.split()[-1]

    yield begin
    for server in started:
        if server.poll() is None:
            server.kill()
        server.communicate()


@pytest.fixture
def stop():
    """A function (server) -> how many inputs it answered: it ends a server cleanly."""
    return stopped


def stopped(server):
    """End a server; its last words, and how many inputs it answered."""
    server.send_signal(signal.SIGTERM)
    _, said = server.communicate(timeout=60)
    assert server.returncode == 0, said[-2000:]
    assert "Traceback" not in said
    return int(re.search(r"stopped after \d+ requests, (\d+) inputs", said)[1])
