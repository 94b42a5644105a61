"""Adapters from loggers to one small interface for what they take beside numbers: charts, pictures, tables, files.

What a logger does not take is in the run's folder all the same, and `logging.py` says so once. The package of a logger
is imported only when such a logger is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from brainet_pl._utils.framework import is_csv, is_wandb
from brainet_pl.evaluation.chart import Chart, Series
from brainet_pl.evaluation.compare.tables import markdown_text


class SavedFigure(NamedTuple):
    """A picture: its name, its figure, the PNG file it was saved to, and the step to log it at."""

    name: str
    figure: Figure
    path: Path
    step: int


class SavedTable(NamedTuple):
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
    """A logger that takes nothing but numbers; subclasses override what theirs can.

    Args:
        logger: A logger of Lightning.
    """

    takes: tuple[str, ...] = ()  # "pictures", "tables"
    quiet = False  # whether nothing needs to be said about what is not taken

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def picture(self, drawn: SavedFigure) -> None:
        """Log a matplotlib figure under its name."""

    def chart(self, chart: Chart, drawn: SavedFigure) -> None:
        """Log a chart as data; where a logger has no such thing, as its picture."""
        self.picture(drawn)

    def table(self, table: SavedTable) -> None:
        """Log the rows of a table under its name."""

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> None:
        """Log files of a kind, such as "model", that the run has made, with what is known about them."""

    def uses(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any]) -> bool:
        """Note files that the run is made from, where a logger draws how one thing came from another."""
        return False


class FolderSink(Sink):
    """A logger whose place is the run's folder, where everything is written anyway."""

    quiet = True


OVERLAID = ("test/reliability", "test/risk_coverage", "test/coverage", "test/refusal")  # charts that compare runs


class WandbSink(Sink):
    """Weights & Biases: charts that overlay runs, tables with pictures, versioned artifacts, a summary."""

    takes = ("pictures", "tables")

    def picture(self, drawn: SavedFigure) -> None:
        """Logs the figure as an image of W&B."""
        self.logger.log_image(drawn.name, [str(drawn.path)], step=drawn.step)

    def chart(self, chart: Chart, drawn: SavedFigure) -> None:
        """The first panel of charts in which runs are compared as W&B's own chart, which overlays runs; else a picture.

        Each chart of its own is an artifact with a table: all panels of a test would be a dozen of them.
        """
        if chart.name not in OVERLAID:
            self.picture(drawn)
            return
        panel = chart.panels[0]
        rows = [[s.name, a, b] for s in panel.series for a, b in zip(*outline(s), strict=True)]
        titles = {"title": panel.title, "x-axis-title": panel.x.label, "y-axis-title": panel.y.label}
        # lines by class; W&B's own ROC and PR curves are this too
        self._plot(chart.name, "wandb/area-under-curve/v0", ["class", "x", "y"], rows, titles, drawn.step)

    def table(self, table: SavedTable) -> None:
        """As a table, thumbnails as images in it."""
        import wandb

        data = [
            [wandb.Image(rgb(cell)) if isinstance(cell, np.ndarray) else cell for cell in row] for row in table.rows
        ]
        self.logger.log_table(table.name, columns=table.columns, data=data, step=table.step)

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> None:
        """As a version of an artifact; equal content stays one version.

        An offline run keeps it until `wandb sync`; a disabled one has no place for it.
        """
        artifact = self._artifact(kind, name, paths, facts)
        if artifact is not None:
            self.logger.experiment.log_artifact(artifact, aliases=aliases or None)

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

    def _plot(
        self, name: str, kind: str, columns: list[Any], rows: list[list[Any]], titles: dict[str, Any], step: int
    ) -> None:
        """Log a custom chart of W&B."""
        import wandb

        table = wandb.Table(columns=columns, data=rows)
        made = wandb.plot_table(kind, table, {column: column for column in columns}, titles)
        self.logger.experiment.log({name: made, "trainer/global_step": step})


class TensorBoardSink(Sink):
    """Anything with TensorBoard's `add_figure`, `add_text` and `add_images`."""

    takes = ("pictures", "tables")

    def picture(self, drawn: SavedFigure) -> None:
        """Adds the figure to TensorBoard's images."""
        self.logger.experiment.add_figure(drawn.name, drawn.figure, drawn.step)

    def table(self, table: SavedTable) -> None:
        """As text in Markdown; pictures of one size as images beside it."""
        self.logger.experiment.add_text(table.name, markdown(table.columns, table.plain), table.step)
        for j, column in enumerate(table.columns):
            pictures = [row[j] for row in table.rows if isinstance(row[j], np.ndarray)]
            if pictures and len({p.shape for p in pictures}) == 1:
                grid = np.stack([rgb(p) for p in pictures])
                self.logger.experiment.add_images(f"{table.name}/{column}", grid, table.step, dataformats="NHWC")


class MLflowSink(Sink):
    """MLflow's client: everything is an artifact of the run."""

    takes = ("pictures", "tables")

    def picture(self, drawn: SavedFigure) -> None:
        """Logs the figure as a PNG among the run's files."""
        self._artifact(drawn.path, "figures")

    def table(self, table: SavedTable) -> None:
        """Logs the table as a CSV file of the run."""
        self._artifact(table.path, "tables")

    def files(self, kind: str, name: str, paths: Sequence[Path], facts: Mapping[str, Any], aliases: list[str]) -> None:
        """In a folder of their kind."""
        for path in paths:
            self._artifact(path, kind)

    def _artifact(self, path: Path, folder: str) -> None:
        self.logger.experiment.log_artifact(self.logger.run_id, str(path), folder)


class ImageSink(Sink):
    """Any other logger with a `log_image(key, images)`, and perhaps `log_table(key, columns, data)`, as W&B's has."""

    def __init__(self, logger: Any) -> None:
        super().__init__(logger)
        self.takes = ("pictures", "tables") if hasattr(logger, "log_table") else ("pictures",)

    def picture(self, drawn: SavedFigure) -> None:
        """As an image, by its file."""
        self.logger.log_image(drawn.name, [str(drawn.path)], step=drawn.step)

    def table(self, table: SavedTable) -> None:
        """Logs the rows as a table, without pictures in it."""
        self.logger.log_table(table.name, columns=table.columns, data=[list(r) for r in table.plain], step=table.step)


def sink_of(logger: Any) -> Sink:
    """The way to hand things to a logger."""
    if is_wandb(logger):
        return WandbSink(logger)
    if is_csv(logger):
        return FolderSink(logger)
    experiment = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):
        return TensorBoardSink(logger)
    if _takes(experiment, "log_artifact", "run_id"):
        return MLflowSink(logger)
    return ImageSink(logger) if hasattr(logger, "log_image") else Sink(logger)


def _takes(thing: Any, method: str, argument: str) -> bool:
    """Whether a thing has a method with an argument of this name."""
    found = getattr(thing, method, None)
    try:
        return found is not None and argument in inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False


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
    texts = [[markdown_text(str(cell)) for cell in cells] for cells in (columns, *rows)]
    lines = [texts[0], ["---"] * len(columns), *texts[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
