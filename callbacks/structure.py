"""Learn the wiring from the training features at fit set-up, before the optimizer is made."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from brainet_pl import __version__
from brainet_pl.callbacks.logging import log_artifact, log_figure, run_folder
from brainet_pl.features import extract_features, structure_loader
from brainet_pl.module import BRAINet, refuse_sharding
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.structure.canonical import canonical_order
from brainet_pl.structure.draw import draw_ggt
from brainet_pl.structure.learn import ScoreName, TestName


class StructureLearning(Callback):
    """Builds the head of a `BRAINet` from a tree learned on its own training features.

    The settings from `s` to `max_seconds` are those of `learn_structure`. Learned trees are kept under `cache` by a
    fingerprint of features and settings, so a repeated run does not learn again; a checkpoint brings its own tree.

    Args:
        file: load this `structure.json` instead of learning.
        cache: folder for learned trees; None is `structures` under the Trainer's root, "" keeps none.
        progress: show progress bars.
    """

    def __init__(
        self,
        s: int = 2,
        max_order: int | None = 1,
        test: TestName = "gaussian",
        threshold: float | None = None,
        bins: int = 3,
        score: ScoreName | None = None,
        ess: float = 1.0,
        seed: int = 0,
        max_rows: int | None = None,
        max_tests: int | None = None,
        max_seconds: float | None = None,
        file: str | None = None,
        cache: str | None = None,
        progress: bool = True,
    ) -> None:
        self.settings: dict[str, Any] = {
            "s": s,
            "max_order": max_order,
            "test": test,
            "threshold": threshold,
            "bins": bins,
            "score": score,
            "ess": ess,
            "seed": seed,
            "max_rows": max_rows,
            "max_tests": max_tests,
            "max_seconds": max_seconds,
        }
        self.file, self.cache, self.progress = file, cache, progress
        self._facts: dict[str, float] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Callback.setup is the last hook before the optimizer where the data is already there."""
        if stage != "fit" or not isinstance(pl_module, BRAINet) or not pl_module.needs_structure:
            return
        refuse_sharding(trainer)
        # One rank learns; the others receive its tree, so that all build the same head.
        text = self._obtain(trainer, pl_module).to_json() if trainer.is_global_zero else ""
        ggt = GGT.from_json(trainer.strategy.broadcast(text))
        pl_module.set_structure(ggt)
        if ggt.perplexity() < 1.01 and ggt.num_subnetworks > 1:
            rank_zero_warn("the posterior over sub-networks has collapsed: all passes will be the same network")

    def _obtain(self, trainer: pl.Trainer, module: BRAINet) -> GGT:
        start = time.monotonic()
        if self.file is not None:
            path = Path(self.file)
            if not path.is_file():
                raise FileNotFoundError(
                    f"expected a learned structure in {path}, found no such file: drop `file` to learn one"
                )
            ggt = GGT.from_json(path.read_text())
        else:
            loader = structure_loader(trainer, module, self.settings["max_rows"])
            device = trainer.strategy.root_device
            rows, progress = self.settings["max_rows"], self.progress
            backbone = nn.Identity() if module.features_given else module.backbone
            features = extract_features(
                backbone,
                loader,
                device=device,
                max_rows=rows,
                progress=progress,
            ).numpy()
            # The digest does not see the order of columns, but a stored tree is numbered by it.
            order = canonical_order(features)
            key = json.dumps([__version__, order.digest, order.columns.tolist(), self.settings], sort_keys=True)
            stored = self._cached(trainer, hashlib.sha256(key.encode()).hexdigest()[:16])
            if stored is not None and stored.is_file():
                rank_zero_info(f"structure from {stored}")
                ggt = GGT.from_json(stored.read_text())
            else:
                ggt = learn_structure(features, progress=progress, **self.settings)
                if stored is not None:
                    _write(stored, ggt.to_json())
        self._facts = {
            "structure/seconds": time.monotonic() - start,
            "structure/ci_tests": float(ggt.settings.get("tests", 0)),
        }
        rank_zero_info(ggt.summary())
        return ggt

    def _cached(self, trainer: pl.Trainer, key: str) -> Path | None:
        if self.cache == "":
            return None
        folder = Path(trainer.default_root_dir) / "structures" if self.cache is None else Path(self.cache)
        return folder / f"{key}.json"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Numbers and the drawing to the loggers, the tree beside the checkpoints."""
        if not trainer.is_global_zero or not isinstance(pl_module, BRAINet) or pl_module.ggt is None:
            return
        ggt = pl_module.ggt
        facts = self._facts | {
            "structure/subnetworks": float(min(ggt.num_subnetworks, 10**300)),
            "structure/unique_structures": float(min(ggt.num_unique_structures, 10**300)),
            "structure/perplexity": ggt.perplexity(),
        }
        for logger in trainer.loggers:
            logger.log_metrics(facts, step=trainer.global_step)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            log_figure(trainer, "structure/tree", draw_ggt(ggt))
            path = self._beside_checkpoints(trainer)
            _write(path, ggt.to_json())
            log_artifact(trainer, "structure", path, {"fingerprint": ggt.fingerprint} | facts)

    @staticmethod
    def _beside_checkpoints(trainer: pl.Trainer) -> Path:
        # Not trainer.log_dir: that is a collective, and only rank zero comes here.
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or run_folder(trainer)
        return Path(folder) / "structure.json"


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all: another run may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)
