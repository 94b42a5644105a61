"""Figures and tables as files and to loggers."""

import csv
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from brainet_pl.callbacks import log_figure, log_table
from brainet_pl.callbacks.logging import log_artifact
from brainet_pl.framework import CSVLogger, TensorBoardLogger, pl


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
        log_artifact(trainer, "structure", folder / "x.json", {})
        check_files(folder / "x" / "version_0" if logger else folder)


def test_a_logger_without_figures_says_where_the_files_are(tmp_path, quiet_trainer):
    trainer = quiet_trainer(tmp_path, logger=pl.loggers.logger.DummyLogger())
    with pytest.warns(UserWarning, match="DummyLogger takes no figures here: test/one is in .*test_one.png"):
        log_figure(trainer, "test/one", small_figure())
    with pytest.warns(UserWarning, match="DummyLogger takes no tables here: test/two is in .*test_two.csv"):
        log_table(trainer, "test/two", *TABLE)
    check_files(tmp_path)


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
