"""An exported folder in registries, without any network; MLflow is in tests/engines."""

import json

import pytest

from brainet_pl.serving.registry import register_wandb

pytestmark = pytest.mark.integration  # a model is exported


class OnlineRun:
    """What `register_wandb` asks of a run that is online."""

    def __init__(self):
        self.logged, self.linked = [], []

    def log_artifact(self, artifact):
        self.logged.append(artifact)

    def link_artifact(self, artifact, target):
        self.linked.append((artifact, target))


def test_the_folder_is_an_artifact_and_linked(served):
    run = OnlineRun()
    artifact = register_wandb(served.folder, run, "digits", "production")
    assert run.logged == [artifact]
    assert run.linked == [(artifact, "wandb-registry-production/digits")]
    assert sorted(artifact.manifest.entries) == ["client.py", "example.npz", "model.json", "model.onnx"]
    about = json.loads((served.folder / "model.json").read_text())
    assert artifact.metadata["sha256"] == about["sha256"]
    assert artifact.type == "model"


@pytest.mark.slow  # W&B's own process takes its time
def test_an_offline_run_keeps_the_artifact_and_says_that_it_is_not_linked(served, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="p") as run:
        register_wandb(served.folder, run, "digits", None)
        with pytest.raises(ValueError, match="expected an online run to link digits to the registry model"):
            register_wandb(served.folder, run, "digits")
        run.alert(title="inputs have changed", text="text", level="WARN")
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    assert b"inputs have changed" in kept
    assert kept.count(b"digits") >= 1
