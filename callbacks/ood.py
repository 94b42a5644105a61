"""Out-of-distribution evaluation while testing: all sets × all scores, from the passes that the test makes anyway."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from brainet_pl.callbacks.gather import joined
from brainet_pl.callbacks.logging import run_folder
from brainet_pl.ood import ood_metrics

Results = dict[str, dict[str, dict[str, float]]]  # set → score → metric → value


def check_near(names: Iterable[str], near: Iterable[str]) -> None:
    """Every name in `near` must be one of the sets."""
    known = list(names)
    unknown = sorted(set(near) - set(known))
    if unknown:
        raise ValueError(
            f"expected near to name out-of-distribution sets ({', '.join(known) or 'there are none'}), got "
            f"{', '.join(unknown)}: correct near, or add the set"
        )


def group_means(found: Results, near: Sequence[str]) -> Results:
    """Means over the near and over the far sets, each where there are at least two; counts are added up."""
    means: Results = {}
    for group, names in (("near", [n for n in found if n in near]), ("far", [n for n in found if n not in near])):
        if near and len(names) > 1:
            means[f"{group}_mean"] = {
                score: {
                    metric: sum(found[n][score][metric] for n in names) / (1 if metric == "n_ood" else len(names))
                    for metric in metrics
                }
                for score, metrics in found[names[0]].items()
            }
    return means


class OODEvaluation(Callback):
    """Logs `ood/<set>/<score>/<metric>` for every out-of-distribution set of the datamodule.

    Where the datamodule marks some sets as near and there are several of a kind, their means are logged as the sets
    `near_mean` and `far_mean`.

    The datamodule's test loaders are the test set, then one for each of its `ood_sets`. A configured set without a
    sample ends the test with an error: it can't be skipped unnoticed. Without such sets only the file is written.

    Args:
        score_file: write every sample's scores to this CSV file in the run's folder; "" writes none.
    """

    def __init__(self, score_file: str = "scores.csv") -> None:
        self.score_file = score_file
        self._scores: dict[int, list[dict[str, Tensor]]] = {}

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an earlier test; a wrong name is told before the work, not after it."""
        self._scores = {}
        data = trainer.datamodule  # type: ignore[attr-defined]
        check_near(getattr(data, "ood_sets", ()), getattr(data, "near", ()))

    def on_test_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the scores of a batch."""
        if isinstance(outputs, dict) and "scores" in outputs:
            scores = {name: values.detach().cpu() for name, values in outputs["scores"].items()}
            self._scores.setdefault(dataloader_idx, []).append(scores)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare each set with the test set by every score."""
        names = list(getattr(trainer.datamodule, "ood_sets", {}))  # type: ignore[attr-defined]
        gathered = joined(self._scores)
        missing = [name for i, name in enumerate(names, start=1) if not gathered.get(i)]
        if names and (missing or not gathered.get(0)):
            none = ", ".join(missing) or "the test set"
            raise RuntimeError(
                f"expected scores of the test set and of {', '.join(names)}, got none of {none}: "
                "test with a datamodule whose test_dataloader returns the test set and then every set of ood_sets"
            )
        found = {
            name: {score: ood_metrics(gathered[0][score], unknown) for score, unknown in gathered[i].items()}
            for i, name in enumerate(names, start=1)
        }
        found |= group_means(found, getattr(trainer.datamodule, "near", ()))  # type: ignore[attr-defined]
        for name, scores in found.items():
            for score, metrics in scores.items():
                for metric, value in metrics.items():
                    pl_module.log(f"ood/{name}/{score}/{metric}", value, rank_zero_only=True, add_dataloader_idx=False)
        if self.score_file and gathered.get(0) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(run_folder(trainer) / self.score_file, ["test", *names], gathered)

    @rank_zero_only
    def _write(self, path: Path, names: list[str], scores: dict[int, dict[str, Tensor]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["set", "sample", *scores[0]])
            for i, name in enumerate(names):
                columns = [values.tolist() for values in scores[i].values()]
                writer.writerows([name, j, *row] for j, row in enumerate(zip(*columns, strict=True)))
