"""Small heads train on one thread, and torch has its threads back afterwards."""

import pytest
import torch

from brainet_pl._utils.framework import Callback
from brainet_pl.callbacks import Threads
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import MLP


class Seen(Callback):
    def on_train_batch_start(self, *_):
        self.count = torch.get_num_threads()


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("callbacks", "params", "expected"),
    [([], 4000, 1), ([], 400_000, 2), ([Threads(None)], 4000, 2), ([Threads(1)], 400_000, 1)],
)
def test_threads_of_a_fit(callbacks, params, expected, tmp_path, quiet_trainer):
    seen = Seen()
    fit = quiet_trainer(tmp_path, seen, *callbacks, limit_train_batches=1, limit_val_batches=1)
    fit.fit(BRAINet(8, head=MLP(num_params=params)), datamodule=Digits())
    assert seen.count == expected
    assert torch.get_num_threads() == 2


def test_what_the_user_sets_stands(tmp_path, quiet_trainer, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    seen = Seen()
    model = BRAINet(8, head=MLP(num_params=4000))
    quiet_trainer(tmp_path, seen, limit_train_batches=1, limit_val_batches=1).fit(model, datamodule=Digits())
    assert seen.count == 2


def test_a_fit_that_fails_gives_them_back(tmp_path, quiet_trainer):
    class Fails(Callback):
        def on_train_batch_start(self, *_):
            raise RuntimeError("stop")

    model = BRAINet(8, head=MLP(num_params=4000))
    with pytest.raises(RuntimeError, match="stop"):
        quiet_trainer(tmp_path, Fails()).fit(model, datamodule=Digits())
    assert torch.get_num_threads() == 2
