"""Names of models and data: the same wherever nothing changed, and others for every change that could show."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset
from torchvision.transforms import v2

import brainet_pl
from brainet_pl.backbones.loading import Backbone
from brainet_pl.datamodules.base import Samples, image_transform
from brainet_pl.features import identity

CPU = torch.device("cpu")
SHIFT = 0.0


def shifted(x):
    return x + SHIFT


class Net(nn.Module):
    """A network with everything that features may depend on and weights do not show."""

    def __init__(self, power=1.0):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.power, self.act = power, F.relu
        self.register_buffer("grid", torch.ones(4, 1, 1), persistent=False)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.act(self.norm(self.conv(shifted(x)))) * self.grid
        return self.fc(x.mean(dim=(2, 3)).pow(self.power))


def name_of(model=None, change=None, **settings):
    torch.manual_seed(0)
    backbone = Backbone(Net() if model is None else model(), **settings).build()
    backbone.trace(torch.rand(2, 1, 6, 6))
    if change is not None:
        change(backbone.model)
    return identity.of_model(backbone, CPU)


SCRIPT = """
import torch
from brainet_pl.features import identity
from brainet_pl.backbones.loading import Backbone

torch.manual_seed(0)
backbone = Backbone("cifar_resnet20", layers="stages").build()
backbone.trace(torch.rand(2, 3, 32, 32))
found = identity.of_model(backbone, torch.device("cpu"))
"""


def test_the_name_of_a_model_is_the_same_in_another_process():
    """Both are fresh: what other tests have set, such as the precision of products, is part of the name."""
    command, names = [sys.executable, "-c", f"{SCRIPT}print(found)"], []
    for seed in ("7", "8"):
        env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        names.append(done.stdout.strip())
    assert len(names[0]) == 16
    assert names[0] == names[1]


def test_what_changes_nothing_keeps_the_name():
    plain = name_of()
    assert name_of() == plain
    assert name_of(change=lambda model: model.eval()) == plain
    assert name_of(change=lambda model: model.train()) == plain
    other = nn.Linear(2, 2)
    other.register_forward_hook(print)  # numbers of hooks count up in a process
    assert name_of(layers="norm") == name_of(layers="norm")


def patched(model):
    """A method of the object in place of the class's."""
    model.forward = lambda x: model.fc(x)


def one_weight(model):
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = torch.nextafter(model.conv.weight[0, 0, 0, 0], torch.tensor(9.0))


CHANGES = {
    "a weight by its last bit": one_weight,
    "statistics": lambda model: model.norm.running_mean.add_(1e-3),
    "a buffer that is not saved": lambda model: model.grid.mul_(2),
    "a setting of a layer": lambda model: setattr(model.norm, "eps", 1e-3),
    "an attribute": lambda model: setattr(model, "power", 2.0),
    "a function": lambda model: setattr(model, "act", torch.tanh),
    "a type": lambda model: setattr(model, "kind", torch.float16),
    "a tuple": lambda model: setattr(model.conv, "padding", (1, 0)),
    "a hook": lambda model: model.norm.register_forward_hook(lambda module, args, output: output * 2),
    "the method of an object": patched,
    "a layer's class": lambda model: setattr(model, "norm", nn.InstanceNorm2d(4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_model_gives_another_name(change):
    assert name_of(change=change) != name_of()


def test_other_layers_and_pools_give_other_names():
    settings = [{}, {"layers": "norm"}, {"layers": "conv"}, {"layers": "norm", "pool": "2x2"}, {"head_layer": ""}]
    assert len({name_of(**one) for one in settings}) == len(settings)


def test_code_is_no_part_of_the_name(monkeypatch):
    """A change of code is for the store to find, by running inputs (`test_store.py`)."""
    plain = name_of()
    monkeypatch.setitem(shifted.__globals__, "SHIFT", 1.0)
    monkeypatch.setattr(Net, "forward", lambda self, x: self.fc(self.conv(x).mean(dim=(2, 3))))
    assert name_of() == plain


def test_the_version_of_a_package_is_part_of_the_name(monkeypatch):
    plain = name_of()
    monkeypatch.setattr(sys.modules[Net.__module__.partition(".")[0]], "__version__", "2.0", raising=False)
    assert name_of() != plain


# -- data -------------------------------------------------------------------------------------------------------------


def images(n=20):
    return torch.arange(n * 64, dtype=torch.uint8).reshape(n, 1, 8, 8), torch.arange(n) % 3


def loader(data, **settings):
    return DataLoader(data, **({"batch_size": 8} | settings))


def data_name(x=None, y=None, prepare=None, seed=0, **settings):
    inputs, labels = images()
    prepare = image_transform((0.5,), (0.2,)) if prepare is None else prepare
    return identity.of_batches(
        loader(Samples(inputs if x is None else x, labels if y is None else y, prepare), **settings), seed
    )


def test_equal_data_has_an_equal_name_and_every_change_shows():
    plain = data_name()
    assert plain is not None
    assert data_name(seed=1) == plain == data_name(num_workers=1)  # nothing is drawn
    x, y = images()
    found = [
        plain,
        data_name(x=torch.where(torch.arange(20).view(-1, 1, 1, 1) == 7, x + 1, x)),
        data_name(x=x.flip(0)),
        data_name(x=x.float()),
        data_name(x=x.view(20, 1, 4, 16)),
        data_name(y=y.flip(0)),
        data_name(y=y.int()),
        data_name(prepare=image_transform((0.4,), (0.2,))),
        data_name(prepare=image_transform(None, None)),
        data_name(prepare=v2.Compose([v2.Resize(4), v2.ToDtype(torch.float32, scale=True)])),
        data_name(batch_size=9),
        data_name(drop_last=True),
    ]
    samples = Samples(x, y)
    subsets = [samples, Subset(samples, range(20)), Subset(samples, [1, 0]), Subset(samples, [0, 1])]
    subsets += [ConcatDataset([samples, samples]), TensorDataset(x, y), TensorDataset(x, y, y)]
    found += [identity.of_batches(loader(data), 0) for data in subsets]
    assert None not in found
    assert len(set(found)) == len(found)


def test_what_draws_depends_on_the_seed_and_on_the_workers():
    crop = image_transform((0.5,), (0.2,), augment_size=8)
    found = [data_name(prepare=crop, seed=seed, num_workers=workers) for seed, workers in ((0, 0), (1, 0), (0, 1))]
    assert None not in found
    assert len(set(found)) == 3
    assert data_name(prepare=image_transform((0.5,), (0.2,), augment_size=8)) == found[0]


class Louder(Samples):
    def __getitem__(self, i):
        return self.x[i] * 2, self.y[i]


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(3)


def test_what_cannot_be_told_has_no_name():
    x, y = images()
    assert data_name(prepare=lambda image: image / 2) is None
    assert data_name(prepare=v2.Compose([v2.Lambda(lambda image: image)])) is None
    assert data_name(prepare=v2.RandAugment()) is None
    samples = Samples(x, y)
    for data in (Louder(x, y), Subset(Louder(x, y), [0]), Endless()):
        assert identity.of_batches(loader(data), 0) is None
    assert identity.of_batches(loader(samples, collate_fn=list), 0) is None
    assert identity.of_batches(loader(samples, shuffle=True), 0) is None
    assert identity.of_batches([1, 2], 0) is None
    samples.more = lambda i: None
    assert identity.of_batches(loader(samples), 0) is None
    hooked = image_transform((0.5,), (0.2,))
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert data_name(prepare=hooked) is None


def test_arrays_and_odd_values_are_described():
    describe = identity._Data().describe
    for value in (np.arange(6).reshape(2, 3), np.float32(0.5), range(3), torch.float16, CPU, {"a": {1, 2}}, 1j):
        assert describe(value) is not None
    one, other = (identity.digest.fingerprint(describe(np.zeros(shape))) for shape in ((2, 3), (3, 2)))
    assert one != other
