"""What each logger takes beside numbers: charts, pictures, tables and files, told by what it can do.

A sink is one logger seen through one small interface. It says whether it has taken a thing; what nobody takes is in the
run's folder all the same, and `logging.py` says so once. Nothing here imports a logger's package before that logger is
there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from brainet_pl._utils.framework import is_csv, is_wandb
from brainet_pl.evaluation.chart import Chart, Matrix, Panel, Series


class Drawn(NamedTuple):
    """A picture: its name, its figure, the PNG file it was saved to, and the step to log it at."""

    name: str
    figure: Figure
    path: Path
    step: int


class Tabled(NamedTuple):
    """A table: its name, columns, rows, rows without pictures as the CSV file has them, that file, and the step.

    A cell of `rows` is a text, a number, None, or a picture: uint8 (H, W) or (H, W, 3).
    """

    name: str
    columns: list[str]
    rows: Sequence[Sequence[Any]]
    plain: Sequence[Sequence[Any]]
    path: Path
    step: int


class Sink:
    """A logger that takes nothing but numbers; others override what they can.

    Args:
        logger: of Lightning.
    """

    quiet = False  # whether nothing needs to be said about what is not taken

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def picture(self, drawn: Drawn) -> bool:
        """Takes a matplotlib figure by its name."""
        return False

    def chart(self, chart: Chart, drawn: Drawn) -> bool:
        """Take a chart as data; where there is no such thing, its picture."""
        return self.picture(drawn)

    def matrix(self, matrix: Matrix, drawn: Drawn) -> bool:
        """Take a matrix of counts; where there is no such thing, its picture."""
        return self.picture(drawn)

    def table(self, table: Tabled) -> bool:
        """Takes the rows of a table by its name."""
        return False

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> bool:
        """Take files of a kind, such as "model", that the run has made, with what is known about them."""
        return False

    def uses(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any]) -> bool:
        """Note files that the run is made from, where a logger draws how one thing came from another."""
        return False


class Files(Sink):
    """A logger whose place is the run's folder, where everything is written anyway."""

    quiet = True


class WandbSink(Sink):
    """Weights & Biases: charts that overlay runs, tables with pictures, versioned artifacts, a summary."""

    def picture(self, drawn: Drawn) -> bool:
        """Logs the figure as an image of W&B."""
        self.logger.log_image(drawn.name, [str(drawn.path)], step=drawn.step)
        return True

    def chart(self, chart: Chart, drawn: Drawn) -> bool:
        """A custom chart for each panel; of panels that are looked at one at a time, the first."""
        import wandb

        panels = chart.panels[:1] if chart.choose else chart.panels
        for panel in panels:
            name = chart.name if len(panels) == 1 else f"{chart.name}/{panel.key}"
            scatter = [series for series in panel.series if series.kind == "points"]
            if scatter:
                rows = [[a, b] for series in scatter for a, b in zip(series.x, series.y, strict=True)]
                made = wandb.plot_table(
                    "wandb/scatter/v0",
                    wandb.Table(columns=["x", "y"], data=rows),
                    {"x": "x", "y": "y"},
                    {"title": panel.title},
                )
            else:
                made = wandb.plot_table(
                    "wandb/area-under-curve/v0",  # lines by class; W&B's own ROC and PR curves are this too
                    wandb.Table(columns=["class", "x", "y"], data=_lines(panel)),
                    {"x": "x", "y": "y", "class": "class"},
                    {"title": panel.title, "x-axis-title": panel.x.label, "y-axis-title": panel.y.label},
                )
            self._log({name: made}, drawn.step)
        return True

    def matrix(self, matrix: Matrix, drawn: Drawn) -> bool:
        """Logs a confusion matrix as W&B's own chart."""
        import wandb

        rows = [
            [matrix.names[i], matrix.names[j], count]
            for i, counts in enumerate(matrix.counts)
            for j, count in enumerate(counts)
        ]
        columns: list[Any] = ["Actual", "Predicted", "nPredictions"]
        made = wandb.plot_table(
            "wandb/confusion_matrix/v1",
            wandb.Table(columns=columns, data=rows),
            {column: column for column in columns},
            {"title": "Confusion matrix"},
        )
        self._log({drawn.name: made}, drawn.step)
        return True

    def table(self, table: Tabled) -> bool:
        """As a table, thumbnails as images in it."""
        import wandb

        data = [
            [wandb.Image(rgb(cell)) if isinstance(cell, np.ndarray) else cell for cell in row] for row in table.rows
        ]
        self.logger.log_table(table.name, columns=table.columns, data=data, step=table.step)
        return True

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> bool:
        """As a version of an artifact; equal content stays one version.

        An offline run keeps it until `wandb sync`; a disabled one has no place for it.
        """
        artifact = self._artifact(kind, name, paths, facts)
        if artifact is not None:
            self.logger.experiment.log_artifact(artifact, aliases=aliases or None)
        return True

    def uses(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any]) -> bool:
        """As an input of the run: in W&B's graph an arrow leads from the artifact to the run, and on to what it logs.

        `use_artifact` refuses offline and waits for an upload online. What it would hand over is this: the files, for
        W&B to find the version with the same content, or make one, and then to note its use; `wandb sync` does so too.
        """
        artifact = self._artifact(kind, name, paths, facts)
        if artifact is not None:
            self.logger.experiment._log_artifact(artifact, is_user_created=True, use_after_commit=True)
        return True

    def _artifact(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any]) -> Any:
        """The files as a version of `name`, or of `<kind>-<run>`; None for a run that keeps nothing."""
        if getattr(self.logger.experiment, "disabled", False):
            return None
        import wandb

        artifact = wandb.Artifact(name or f"{kind}-{self.logger.version}", type=kind, metadata=dict(facts))
        for path in paths:
            artifact.add_file(str(path), name="model.ckpt" if kind == "model" else path.name)  # as Lightning calls it
        return artifact

    def _log(self, content: dict[str, Any], step: int) -> None:
        self.logger.experiment.log(content | {"trainer/global_step": step})


class TensorBoardSink(Sink):
    """Anything with TensorBoard's `add_figure`, `add_text` and `add_images`."""

    def picture(self, drawn: Drawn) -> bool:
        """Adds the figure to TensorBoard's images."""
        self.logger.experiment.add_figure(drawn.name, drawn.figure, drawn.step)
        return True

    def table(self, table: Tabled) -> bool:
        """As text in Markdown; pictures of one size as images beside it."""
        self.logger.experiment.add_text(table.name, markdown(table.columns, table.plain), table.step)
        for j, column in enumerate(table.columns):
            pictures = [row[j] for row in table.rows if isinstance(row[j], np.ndarray)]
            if pictures and len({p.shape for p in pictures}) == 1:
                grid = np.stack([rgb(p) for p in pictures])
                self.logger.experiment.add_images(f"{table.name}/{column}", grid, table.step, dataformats="NHWC")
        return True


class MLflowSink(Sink):
    """MLflow's client: everything is an artifact of the run."""

    def picture(self, drawn: Drawn) -> bool:
        """Logs the figure as a PNG among the run's files."""
        return self._artifact(drawn.path, "figures")

    def table(self, table: Tabled) -> bool:
        """Logs the table as a CSV file of the run."""
        return self._artifact(table.path, "tables")

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> bool:
        """In a folder of their kind."""
        for path in paths:
            self._artifact(path, kind)
        return True

    def _artifact(self, path: Path, folder: str) -> bool:
        self.logger.experiment.log_artifact(self.logger.run_id, str(path), folder)
        return True


class CometSink(Sink):
    """Hands charts, tables and files to Comet's experiment."""

    def picture(self, drawn: Drawn) -> bool:
        """Logs the figure as one of Comet's figures."""
        self.logger.experiment.log_figure(figure_name=drawn.name, figure=drawn.figure, step=drawn.step)
        return True

    def matrix(self, matrix: Matrix, drawn: Drawn) -> bool:
        """Logs a confusion matrix as Comet's own chart."""
        self.logger.experiment.log_confusion_matrix(
            matrix=matrix.counts, labels=matrix.names, file_name=f"{drawn.path.stem}.json", step=drawn.step
        )
        return True

    def table(self, table: Tabled) -> bool:
        """Logs the rows as a table, without pictures in it."""
        self.logger.experiment.log_table(
            f"{table.path.name}", tabular_data=[list(row) for row in table.plain], headers=table.columns
        )
        return True

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> bool:
        """Logs files as assets of the experiment."""
        for path in paths:
            self.logger.experiment.log_asset(str(path), file_name=f"{kind}/{path.name}")
        return True


class TrackioSink(Sink):
    """A run of Trackio, which takes images and tables among its numbers."""

    def picture(self, drawn: Drawn) -> bool:
        """Logs the figure as an image of Trackio."""
        import trackio  # type: ignore[import-not-found, unused-ignore]

        self.logger.experiment.log({drawn.name: trackio.Image(str(drawn.path), caption=drawn.name)}, step=drawn.step)
        return True

    def table(self, table: Tabled) -> bool:
        """Logs the rows as a table, without pictures in it."""
        import pandas  # type: ignore[import-untyped, unused-ignore]  # a dependency of Trackio
        import trackio

        frame = pandas.DataFrame([list(row) for row in table.plain], columns=table.columns)
        self.logger.experiment.log({table.name: trackio.Table(dataframe=frame)}, step=table.step)
        return True

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> bool:
        """As a version of an artifact, where this version of Trackio has them."""
        import trackio

        run = self.logger.experiment
        if not hasattr(run, "log_artifact"):
            return False
        artifact = trackio.Artifact(name or f"{kind}-{run.name}", type=kind, metadata=dict(facts))
        for path in paths:
            artifact.add_file(path)
        run.log_artifact(artifact, aliases=[alias for alias in aliases if alias != "latest"])  # it has that by itself
        return True


class ImageSink(Sink):
    """Any other logger with a `log_image(key, images)`, and perhaps `log_table(key, columns, data)`, as W&B's has."""

    def picture(self, drawn: Drawn) -> bool:
        """As an image, by its file."""
        self.logger.log_image(drawn.name, [str(drawn.path)], step=drawn.step)
        return True

    def table(self, table: Tabled) -> bool:
        """Logs the rows as a table, without pictures in it."""
        if not hasattr(self.logger, "log_table"):
            return False
        self.logger.log_table(table.name, columns=table.columns, data=[list(r) for r in table.plain], step=table.step)
        return True


def sink_of(logger: Any) -> Sink:
    """The way to hand things to a logger."""
    if is_wandb(logger):
        return WandbSink(logger)
    if is_csv(logger):
        return Files(logger)
    experiment = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):
        return TensorBoardSink(logger)
    if type(experiment).__module__.split(".")[0] == "trackio":
        return TrackioSink(logger)
    if _takes(experiment, "log_artifact", "run_id"):
        return MLflowSink(logger)
    if _takes(experiment, "log_figure", "figure_name"):
        return CometSink(logger)
    return ImageSink(logger) if hasattr(logger, "log_image") else Sink(logger)


def _takes(thing: Any, method: str, argument: str) -> bool:
    """Whether a thing has a method with an argument of this name."""
    found = getattr(thing, method, None)
    try:
        return found is not None and argument in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


def _lines(panel: Panel) -> list[list[Any]]:
    """Rows of class, x and y; bars as the outline of their steps."""
    return [[series.name, a, b] for series in panel.series for a, b in zip(*outline(series), strict=True)]


def outline(series: Series) -> tuple[list[float], list[float]]:
    """The points of a line; bars become the line along their tops."""
    if series.kind != "bars":
        return series.x, series.y
    edges = [edge for pair in zip(series.x[:-1], series.x[1:], strict=True) for edge in pair]
    return edges, [value for value in series.y for _ in range(2)]


def rgb(picture: Any) -> Any:
    """Makes an image of bytes (H, W) or (H, W, 3) one with three channels, (H, W, 3)."""
    return np.repeat(picture[..., None], 3, axis=-1) if picture.ndim == 2 else picture


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Writes the rows of a table in Markdown."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines)
