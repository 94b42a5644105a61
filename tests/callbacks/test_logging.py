"""Figures and tables as files and to loggers."""

import csv
import functools
import importlib.util
import inspect
from pathlib import Path
from typing import ClassVar

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from brainet_pl._utils.framework import CSVLogger, TensorBoardLogger, pl
from brainet_pl.callbacks import log_figure, log_table
from brainet_pl.callbacks import logging as logging_module
from brainet_pl.callbacks.logging import log_chart, log_files, log_matrix
from brainet_pl.callbacks.sinks import outline, sink_of
from brainet_pl.evaluation.chart import Axis, Chart, Matrix, Panel, Series


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small_figure():
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    return figure


PICTURE = np.arange(16, dtype=np.uint8).reshape(4, 4)
TABLE = (["name", "value", "picture"], [["a|b", 0.5, PICTURE], ["c", None, PICTURE + 1]])


def check_files(folder):
    assert (folder / "figures" / "test_one.png").is_file()
    rows = read(folder / "tables" / "test_two.csv")
    assert [(row["name"], row["value"]) for row in rows] == [("a|b", "0.5"), ("c", "")]
    saved = matplotlib.image.imread(folder / "tables" / rows[0]["picture"])
    np.testing.assert_allclose(saved[..., 0] * 255, PICTURE, atol=0.5)


def test_files_without_a_logger_and_beside_the_csv(tmp_path, quiet_trainer):
    for folder, logger in ((tmp_path / "a", False), (tmp_path / "b", CSVLogger(str(tmp_path / "b"), name="x"))):
        trainer = quiet_trainer(folder, logger=logger)
        log_figure(trainer, "test/one", small_figure())
        log_table(trainer, "test/two", *TABLE)
        log_table(trainer, "test/two", *TABLE)  # again, over the first
        log_files(trainer, "structure", [folder / "x.json"], {})
        check_files(folder / "x" / "version_0" if logger else folder)


CHART = Chart(
    "test/three",
    "test",
    "How to read it.",
    "What it shows.",
    [Panel("p", "Panel", Axis("x"), Axis("y"), [Series("a", [0.0, 1.0], [1.0, 2.0])])],
)
MATRIX = Matrix(["cat", "dog"], [[3, 1], [0, 2]])


def send(trainer, folder):
    """Everything that a test sends."""
    log_figure(trainer, "test/one", small_figure())
    log_table(trainer, "test/two", *TABLE)
    log_chart(trainer, CHART)
    log_matrix(trainer, "test/four", MATRIX)
    (folder / "x.json").write_text("{}")
    log_files(trainer, "structure", [folder / "x.json"], {"a": 1})


class Numbers(pl.loggers.logger.Logger):
    """A logger of numbers and nothing else."""

    name, version = "numbers", 0

    def log_metrics(self, metrics, step=None):
        """Nothing is kept."""

    def log_hyperparams(self, params, *args, **kwargs):
        """Nothing is kept."""


def test_a_logger_without_figures_is_told_of_in_one_line(tmp_path, quiet_trainer, monkeypatch):
    told = []
    monkeypatch.setattr(logging_module, "rank_zero_info", told.append)
    send(quiet_trainer(tmp_path, logger=Numbers()), tmp_path)
    assert told == [f"Numbers takes no pictures: they are in {tmp_path / 'figures'}"]
    check_files(tmp_path)
    assert (tmp_path / "figures" / "test_three.png").is_file()
    assert (tmp_path / "figures" / "test_four.png").is_file()


class Calls:
    """Keeps what it is called with; only the methods that it is given are there."""

    def __init__(self, **methods):
        self.calls = []
        for name, method in methods.items():
            setattr(self, name, self._kept(name, method))

    def _kept(self, name, method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            inspect.signature(method).bind(*args, **kwargs)  # what the real one would refuse
            self.calls.append((name, args, kwargs))

        return call


def other(experiment, **more):
    """A logger around an experiment."""
    return type("Other", (Numbers,), {"experiment": experiment, **more})()


def test_mlflow_gets_everything_as_files_of_its_run(tmp_path, quiet_trainer):
    def log_artifact(run_id, local_path, artifact_path=None):
        """As MlflowClient has it."""

    client = Calls(log_artifact=log_artifact)
    send(quiet_trainer(tmp_path, logger=other(client, run_id="r1")), tmp_path)
    sent = [(args[0], Path(args[1]).name, args[2]) for _, args, _ in client.calls]
    assert sent == [
        ("r1", "test_one.png", "figures"),
        ("r1", "test_two.csv", "tables"),
        ("r1", "test_three.png", "figures"),
        ("r1", "test_four.png", "figures"),
        ("r1", "x.json", "structure"),
    ]


def test_a_logger_with_images_gets_pictures(tmp_path, quiet_trainer):
    class Images(Numbers):
        seen: ClassVar = []

        def log_image(self, key, images, step=None):
            self.seen.append((key, [Path(image).name for image in images]))

    send(quiet_trainer(tmp_path, logger=Images()), tmp_path)
    assert Images.seen == [
        ("test/one", ["test_one.png"]), ("test/three", ["test_three.png"]), ("test/four", ["test_four.png"])
    ]  # fmt: skip


def test_the_real_loggers_are_known_by_what_they_can_do(tmp_path, monkeypatch):
    """With the real packages, where they are installed."""
    found = {}
    if importlib.util.find_spec("mlflow"):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # since 3 it asks for a database, which skinny has not
        found["MLflowSink"] = pl.loggers.MLFlowLogger("x", tracking_uri=f"{tmp_path.as_uri()}/mlruns")
    if importlib.util.find_spec("tensorboard"):
        found["TensorBoardSink"] = TensorBoardLogger(str(tmp_path))
    found["FolderSink"] = CSVLogger(str(tmp_path))
    assert {name: type(sink_of(logger)).__name__ for name, logger in found.items()} == {name: name for name in found}


def test_bars_become_the_line_along_their_tops():
    assert outline(Series("a", [0.0, 1.0, 2.0], [5.0, 7.0], "bars")) == ([0.0, 1.0, 1.0, 2.0], [5.0, 5.0, 7.0, 7.0])


def test_tensorboard_gets_both(tmp_path, quiet_trainer):
    pytest.importorskip("tensorboard", reason="no TensorBoard here: pip install tensorboard to test it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(str(tmp_path), name="x")
    trainer = quiet_trainer(tmp_path, logger=logger)
    log_figure(trainer, "test/one", small_figure())
    log_table(trainer, "test/two", *TABLE)
    check_files(Path(logger.log_dir))
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()
    assert {"test/one", "test/two/picture"} <= set(tags["images"])
    (text,) = events.Tensors("test/two/text_summary")
    assert b"| a\\|b | 0.5 |" in text.tensor_proto.string_val[0]


def test_a_row_of_another_length_is_named(tmp_path, quiet_trainer):
    with pytest.raises(ValueError, match=r"expected 2 cells in every row of t \(a, b\), got 1 in row 1"):
        log_table(quiet_trainer(tmp_path), "t", ["a", "b"], [[1, 2], [3]])
