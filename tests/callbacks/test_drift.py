"""The alarm while predicting, and which features it names."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl.callbacks import DriftAlarm
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network import Linear
from brainet_pl.scores import Generative, TreeDensity
from brainet_pl.scores.moved import moved_features
from brainet_pl.structure import learn_structure


def test_a_change_while_predicting_is_warned_of(tmp_path, quiet_trainer):
    model = BRAINet(8, head=Linear(), scores=[Generative(progress=False)])
    data, alarm = Digits(), DriftAlarm()
    trainer = quiet_trainer(tmp_path, alarm, epochs=3)
    trainer.fit(model, datamodule=data)
    clean = torch.stack([x for x, _ in data.test_set])
    trainer.predict(model, DataLoader(TensorDataset(clean[:200]), 50))
    assert alarm.state.inputs == 200
    assert not alarm.state.alarm
    torch.manual_seed(0)
    noisy = clean[200:300].clone()
    noisy[:, 20] = torch.rand(100) * 6  # one pixel is broken
    with pytest.warns(UserWarning, match=r"ALARM at input 2\d\d.*moved most: feature 20"):
        trainer.predict(model, DataLoader(TensorDataset(noisy), 50))
    assert (alarm.state.inputs, alarm.state.alarm) == (300, True)
    assert (tmp_path / "figures" / "drift.png").is_file()


def test_a_model_without_validation_data_is_not_watched(tmp_path, quiet_trainer):
    model = BRAINet(3, head=Linear())
    model.predictor.build_head(model.head_settings, 4)
    alarm = DriftAlarm()
    with pytest.warns(UserWarning, match="inputs are not watched for a change"):
        quiet_trainer(tmp_path, alarm).predict(model, DataLoader(TensorDataset(torch.rand(4, 4)), 2))
    assert alarm.state is None
    with pytest.raises(ValueError, match="expected alpha between 0 and 1"):
        DriftAlarm(alpha=0)


def test_features_that_no_longer_go_together_are_named():
    """Feature 3 follows feature 1; then it keeps its own distribution, but follows nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 6))
    x[:, 3] = 0.95 * x[:, 1] + 0.3 * x[:, 3]
    new = rng.normal(size=(300, 6))
    same = new.copy()
    same[:, 3] = 0.95 * same[:, 1] + 0.3 * same[:, 3]
    ggt = learn_structure(x, test="gaussian", threshold=0.05, s=1, progress=False)
    density = TreeDensity(ggt, 1, normalize=False).fit(torch.from_numpy(x).float(), torch.zeros(2000))
    none = torch.zeros(300, dtype=torch.long)
    first, *others = moved_features(density, torch.from_numpy(new).float(), none)
    assert {first.feature, *first.parents} == {1, 3}
    assert first.excess > 5 > 2 > others[0].excess
    assert str(first).startswith(f"feature {first.feature} with {first.parents[0]} (")
    assert all(0.7 < one.excess < 1.4 for one in moved_features(density, torch.from_numpy(same).float(), none))
    discrete = TreeDensity(ggt, 1, kind="discrete", normalize=False).fit(torch.from_numpy(x).float(), torch.zeros(2000))
    assert moved_features(discrete, torch.from_numpy(new).float(), none) == []
