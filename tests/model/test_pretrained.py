"""A model in a folder of safetensors and JSON: the same answers afterwards, and no changed file is taken."""

import json

import pytest
import torch

from brainet_pl._utils.framework import pl
from brainet_pl.calibration import Conformal, DensityScaling
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.pretrained import from_pretrained, save_pretrained
from brainet_pl.network import Tree

pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, quiet_trainer):
    pl.seed_everything(0, verbose=False)
    model = BRAINet(8, head=Tree(num_params=4000), calibration=DensityScaling(), conformal=Conformal(), lr=0.01)
    learn = StructureLearning(threshold=0.1, progress=False)
    quiet_trainer(tmp_path_factory.mktemp("fit"), learn).fit(model, datamodule=Digits())
    return model.eval()


def test_the_same_answers_from_a_folder(fitted, run, tmp_path):
    folder = save_pretrained(fitted, tmp_path / "model", run)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = from_pretrained(folder)
    x = torch.rand(7, 64)
    with torch.no_grad():
        one, other = fitted.predict_step(x, 0), again.predict_step(x, 0)
    assert set(one) == set(other) >= {"probabilities", "known_p", "set"}
    for name, values in one.items():
        assert torch.equal(values, other[name]), name
    assert again.class_names == fitted.class_names
    card = (folder / "README.md").read_text()
    assert "| classes | 0, 1, 2, 3, 4, 5, 6, 7 |" in card
    assert "`test/cls/NLL`" in card
    assert "432 of test" in card or "433 of test" in card


def test_changed_files_are_refused(fitted, tmp_path):
    folder = save_pretrained(fitted, tmp_path / "model")
    assert "## Measured" not in (folder / "README.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-9] ^= 64
    (folder / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(ValueError, match=r"digest|damaged|changed"):
        from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in list(config)[:2]}))
    with pytest.raises(ValueError, match="expected what save_pretrained writes"):
        from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected config\.json"):
        from_pretrained(folder)
    with pytest.raises(ValueError, match="expected a model with a head"):
        save_pretrained(BRAINet(3), tmp_path / "none")
