"""MLflow itself, without a network: a fit, a test and a prediction, and what they kept of it."""

import json

import pytest

from brainet_pl import BRAINet
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import Evaluation, PredictionFile, StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.network import Tree

pytestmark = pytest.mark.slow
CHARTS = {"test/reliability", "test/risk_coverage", "test/passes", "ood/held_out/histograms", "ood/held_out/curves"}
PICTURES = {*CHARTS, "structure/tree", "test/confusion"}
TABLES = {"test/most_uncertain", "test/classes", "ood/table"}


def file_names(names):
    return {name.replace("/", "_") for name in names}


def run(folder, logger):
    """One epoch on digits, its test and its prediction."""
    evaluation = Evaluation(image_shape=(8, 8))
    callbacks = [StructureLearning(threshold=0.1, progress=False, cache=""), evaluation, PredictionFile()]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=callbacks, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = BRAINet(8, head=Tree(num_params=4000), lr=0.01)
    trainer.fit(model, datamodule=Digits())
    trainer.test(model, datamodule=Digits(), verbose=False)
    trainer.predict(model, datamodule=Digits())
    return json.loads((folder / "record.json").read_text())


def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    logger = pl.loggers.MLFlowLogger(
        "digits", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifact_location=str(tmp_path / "artifacts")
    )
    record = run(tmp_path / "run", logger)
    client = logger.experiment

    def kept(folder):
        return {file.path.partition("/")[2] for file in client.list_artifacts(logger.run_id, folder)}

    assert kept("figures") == {f"{name}.png" for name in file_names(PICTURES)}
    assert kept("tables") == {f"{name}.csv" for name in file_names(TABLES)}
    assert kept("evaluation") == {"record.json", "scores.csv", "report.html"}
    assert (kept("structure"), kept("predictions")) == ({"structure.json"}, {"predictions.csv"})
    assert len(kept("model")) == 1
    metrics = client.get_run(logger.run_id).data.metrics
    for metric in record["metrics"]:
        key = metric["key"].replace("@", "")  # MLflow takes no such sign, and Lightning leaves it out
        assert metrics[key] == pytest.approx(metric["value"], abs=1e-6), key
    assert metrics["cost/head/parameters"] == record["model"]["costs"]["head"]["parameters"]
