"""One density for each layer: against densities fitted one by one, in weights, in a model and its checkpoint."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import Backbone, BRAINet
from brainet_pl.calibration import DensityScaling
from brainet_pl.export.graph import export_program
from brainet_pl.network import Linear
from brainet_pl.scores import Generative, ScoreContext, Stages
from brainet_pl.scores.fitting import fit_score
from brainet_pl.tasks.passes import Passes

WIDTHS = (6, 10)


def layers(n=600, seed=0):
    """Dependent features of two layers, the second on another scale, and labels."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=draw)
    causes = torch.randn(n, 4, generator=draw) + y[:, None]
    mixing = torch.randn(4, 16, generator=torch.Generator().manual_seed(9))
    x = causes @ mixing + 0.5 * torch.randn(n, 16, generator=draw)
    return torch.cat([x[:, :6], 100 * x[:, 6:]], dim=1), y


def fitted(**settings):
    x, y = layers()
    score = Stages(progress=False, **settings)
    score.set_context(ScoreContext(3, widths=WIDTHS))
    fit_score(score, x, y)
    return score


def seen(x):
    return Passes(torch.zeros(1, len(x), 3), None, x, torch.full((len(x), 3), 1 / 3))


@pytest.mark.parametrize("most", [None, 5])
def test_the_sum_of_densities_that_were_fitted_one_by_one(most):
    (x, y), (new, _) = layers(), layers(50, seed=1)
    expected = torch.zeros(50)
    for columns in (slice(0, 6), slice(6, 16)):
        one = Generative(threshold=0.001, normalize=False, max_parents=16, max_features=most, progress=False)
        one.set_context(ScoreContext(3))
        fit_score(one, x[:, columns], y)
        inside, outside = (one(seen(part[:, columns]))["generative"] for part in (x, new))
        expected += (outside - inside.mean()) / inside.std(correction=0)
    torch.testing.assert_close(fitted(max_features=most)(seen(new))["stages"], expected, rtol=1e-3, atol=1e-3)


def test_a_narrow_layer_counts_as_much_as_a_wide_one():
    score, (x, _) = fitted(), layers(200, seed=2)
    first, second = x.clone(), x.clone()
    first[:, :6] = first[torch.randperm(200, generator=torch.Generator().manual_seed(0))][:, :6].flip(1)
    second[:, 6:] = second[:, 6:].flip(1)
    plain, *odd = (score(seen(part))["stages"].mean() for part in (x, first, second))
    assert abs(plain) < 0.5  # of deviations
    assert all(mean > plain + 3 for mean in odd)


def test_it_travels_in_weights():
    score, (x, _) = fitted(max_features=5), layers(20, seed=3)
    other = Stages()
    assert not other.ready
    other.load_state_dict(score.state_dict())
    assert other.ready
    torch.testing.assert_close(other(seen(x))["stages"], score(seen(x))["stages"])
    with pytest.raises(ValueError, match=r"expected 16 features of auto .* as in training, got 15"):
        other(seen(x[:, 1:]))
    empty = Stages()
    empty.load_state_dict(Stages().state_dict())
    assert not empty.ready


def test_nan_is_nan_and_never_an_error():
    x = layers(4)[0]
    x[1, 3] = torch.nan
    assert fitted()(seen(x))["stages"].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("wrong", [{"threshold": -1}, {"s": 0}, {"max_features": 0}, {"layers": []}, {"name": "a b"}])
def test_settings_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match=r"expected .* got"):
        Stages(**wrong)


def test_in_a_model_its_checkpoint_and_an_exported_program(tmp_path, quiet_trainer):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    x, y = torch.rand(300, 1, 8, 8), torch.arange(300) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=100)
    model = BRAINet(3, backbone=Backbone(net), head=Linear(), calibration=DensityScaling())
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(model, loader, loader)
    score = model.scores.members["Stages"]
    assert score.widths.tolist() == [12, 16]
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    again = BRAINet.load_from_checkpoint(path, backbone=Backbone(net))
    odd = torch.cat([x[:5], 5 * x[:5]])
    found, other = (one.eval().predict_step((odd,), 0) for one in (model, again))
    torch.testing.assert_close(found["probabilities"], other["probabilities"])
    torch.testing.assert_close(found["known_p"], other["known_p"])
    assert not found["known"][5:].any()
    program, _, names = export_program(model)
    exported = dict(zip(names, program.module()(odd), strict=True))
    torch.testing.assert_close(exported["known_p"], found["known_p"])
    torch.testing.assert_close(exported["probabilities"], found["probabilities"])
