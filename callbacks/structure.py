"""Learn the wiring from the training features at fit set-up, before the optimizer is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from brainet_pl._utils import atomic, checks
from brainet_pl._utils.framework import Callback, pl, rank_zero_info, rank_zero_warn
from brainet_pl._utils.inside import check_size, write_inside
from brainet_pl._utils.rng import isolated_cpu_rng
from brainet_pl._utils.shared import warn_if_shared
from brainet_pl.callbacks.logging import log_figure, log_files, run_folder
from brainet_pl.distributed.samples import first_asks, on_rank_zero
from brainet_pl.features.extraction import data_source
from brainet_pl.features.training import TrainingFeatures
from brainet_pl.fitting.structure import learn_tree
from brainet_pl.lightning.module import BRAINet
from brainet_pl.lightning.sharding import refuse_sharding
from brainet_pl.network import Head
from brainet_pl.network.carry import carry
from brainet_pl.structure import GGT, cache
from brainet_pl.structure.draw import draw_ggt
from brainet_pl.structure.independence import IndependenceTest
from brainet_pl.structure.settings import SAMPLES, StructureSettings
from brainet_pl.structure.stream import FeatureStream, StreamedData

SHOWN = 3  # lines of a tree's summary in the log: its sizes; the figure and `ggt.summary()` show the branches


Names = Callable[[], Sequence[str] | None]


def _no_names() -> None:
    return None


class StructureLearning(Callback):
    """Builds the head of a `BRAINet` from a tree learned on its own training features.

    The settings from `s` to `max_seconds` are those of `StructureSettings`. Learned trees are kept under `cache` by a
    fingerprint of features and settings, so a repeated run does not learn again; a checkpoint brings its own tree.

    Args:
        s: Number of samples, and so of branches, at every node of the tree, or a list of those of the root, of the
            nodes below it, and so on; [4, 1] is four whole structures, 1 a single one.
        max_order: Size of the largest condition set; the tree has at most `max_order + 1` levels. null sets no limit.
        test: Independence test, by name ("gaussian", "cmi", "fisher_z", "g2") or by the path of a class; "auto" is
            "g2" for features that are all categories, "gaussian" for any other.
        threshold: Threshold below which two features count as independent, in nats or as a significance level; "auto"
            finds the one at which the features fall apart best, null is the test's own.
        bootstrap: "half" draws half of the rows for each sample and checks again what tests of few variables miss;
            "paper" is Algorithm 1 to the letter.
        bins: Number of levels of a continuous feature in the discrete tests and scores.
        score: Score of a structure: "bdeu", "bge" or "bic"; null is the one that belongs to the test.
        ess: Equivalent sample size of BDeu, weight of the prior of BGe.
        seed: Seed of the random samples of rows.
        max_rows: Learn from a random sample of at most this many training samples; null takes all.
        max_tests: Stop splitting after this many independence tests, with a warning; null sets no limit.
        max_seconds: Stop splitting after this many seconds, with a warning; null sets no limit.
        file: Load this `structure.json` instead of learning.
        cache: Folder for learned trees; null is `structures` under the Trainer's root, "" keeps none.
        progress: Whether to show progress bars.
        every: With a backbone that trains, learn the tree again every `every` epochs from the features as they are
            then; layers of the head that both trees have keep their weights. null keeps the first tree.

    Attributes:
        kept: The share of the head's weights that the last tree took over from the one before; None before that.
    """

    def __init__(
        self,
        s: int | tuple[int, ...] = SAMPLES,
        max_order: int | None = 1,
        test: type[IndependenceTest] | str = "auto",
        threshold: float | Literal["auto"] | None = "auto",
        bootstrap: Literal["half", "paper"] = "half",
        bins: int = 3,
        score: str | None = None,
        ess: float = 1.0,
        seed: int = 0,
        max_rows: int | None = None,
        max_tests: int | None = None,
        max_seconds: float | None = None,
        file: str | None = None,
        cache: str | None = None,
        progress: bool = True,
        every: int | None = None,
    ) -> None:
        self.settings = StructureSettings(
            s, max_order, test, threshold, bootstrap, bins, score, ess, seed, max_rows, max_tests, max_seconds
        )
        self.file, self.cache, self.progress = file, cache, progress
        self.every = None if every is None else checks.whole("every", every, 1)
        if every is not None and file is not None:
            raise ValueError(
                "expected file or every, got both: a tree that is given is not learned again; leave one out"
            )
        self.kept: float | None = None
        self._facts: dict[str, float] = {}
        self._data: StreamedData | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Callback.setup is the last hook before the optimizer where the data is already there."""
        if stage != "fit":
            return
        if not isinstance(pl_module, BRAINet):
            raise TypeError(
                f"expected a BRAINet, got {type(pl_module).__name__}, of which StructureLearning knows no features and "
                "no head: for a LightningModule of your own give SwapHead('path.of.its.last.layer', "
                "structure=StructureLearning(…)) of brainet_pl.callbacks to the Trainer in its place"
            )
        self._check_every(trainer, pl_module)
        pl_module.shard_early()
        if not pl_module.needs_structure:
            return
        refuse_sharding(trainer)
        pl_module.choose_layers()
        pl_module.set_structure(self.learn(trainer, pl_module.training_features, _names_of(trainer, pl_module)))

    def learn(self, trainer: pl.Trainer, features: TrainingFeatures, names: Names = _no_names) -> GGT:
        """Learn the tree of training features; a collective. All processes read the data, and receive the same tree.

        Args:
            trainer: of the fit.
            features: of its training data.
            names: gives the names of the features, once there are features; None where they have none.
        """
        self._data = self._share(features) if trainer.world_size > 1 and self.file is None else None

        def work(ask: Callable[[Any], Any]) -> str:
            if self._data is not None:
                self._data.ask = ask
            return self._obtain(trainer, features, names).to_json()

        serve = (lambda request: None) if self._data is None else self._data.serve
        ggt = GGT.from_json(first_asks(trainer, work, serve))
        self._data = None
        if ggt.perplexity() < 1.01 and ggt.num_subnetworks > 1:
            rank_zero_warn("the posterior over sub-networks has collapsed: all passes will be the same network")
        return ggt

    def _check_every(self, trainer: pl.Trainer, module: BRAINet) -> None:
        """Refuse to learn again where nothing moves, or where a wrapper of processes holds the weights."""
        if self.every is None:
            return
        if module.backbone.frozen:
            raise ValueError(
                f"expected a backbone that trains to learn its tree again every {self.every} epochs, got a frozen one, "
                "whose features stay the same: set freeze to False in Backbone, or leave every out"
            )
        if trainer.world_size > 1:
            raise RuntimeError(
                f"expected one process to learn the tree again every {self.every} epochs, got {trainer.world_size}: "
                "DDP holds on to the weights it began with; train in one process, or leave every out"
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn again from the features as they are now, where that was asked for."""
        epoch = trainer.current_epoch
        if not isinstance(pl_module, BRAINet) or not self._is_due(epoch):
            return
        old = pl_module.head
        if old is None or not pl_module.head_settings.needs_tree:
            return
        ggt = self._obtain(trainer, pl_module.training_features, _names_of(trainer, pl_module))
        if old.ggt is not None and ggt.fingerprint == old.ggt.fingerprint:
            return
        # Its own draws: a resumed fit must not depend on where the global ones stand.
        with isolated_cpu_rng(self.settings.seed + epoch):
            pl_module.set_structure(ggt)
        assert pl_module.head is not None
        new = pl_module.head.train(old.training)
        carried = carry(old, new)
        for optimizer in trainer.optimizers:
            exchange(optimizer, old, new, carried.whole)
        rank_zero_info(f"another tree: {carried.share:.0%} of the head's weights were kept")
        self.kept = self._facts["structure/kept"] = carried.share
        self.report(trainer, ggt)

    def _is_due(self, epoch: int) -> bool:
        """Whether the tree is to be learned again at the start of an epoch."""
        return self.every is not None and epoch > 0 and epoch % self.every == 0

    def _share(self, features: TrainingFeatures) -> StreamedData:
        """The training features that all processes hold together."""
        # What is sampled is chosen before extraction, so all rows that are extracted are learned from.
        mine, _ = features.share(self.settings.max_rows, self.progress).concat()
        return StreamedData(FeatureStream.share(mine), self.settings.bins, self.settings.max_rows)

    def _obtain(self, trainer: pl.Trainer, features: TrainingFeatures, names: Names) -> GGT:
        start = time.monotonic()
        ggt = self._learned(trainer, features) if self.file is None else self._given(Path(self.file))
        self._facts = {
            "structure/seconds": time.monotonic() - start,
            "structure/ci_tests": float(ggt.settings.get("tests", 0)),
        }
        named = names()
        if named is not None and len(named) == ggt.num_variables:
            ggt = ggt.named(named)
        rank_zero_info("\n".join(ggt.summary().splitlines()[:SHOWN]))
        return ggt

    @staticmethod
    def _given(path: Path) -> GGT:
        if not path.is_file():
            raise FileNotFoundError(
                f"expected a learned structure in {path}, found no such file: drop `file` to learn one"
            )
        check_size(path)
        return GGT.from_json(path.read_text(encoding="utf-8"))

    def _learned(self, trainer: pl.Trainer, training: TrainingFeatures) -> GGT:
        features: Any = self._data
        if features is None:
            features = training.all(self.settings.max_rows, self.progress).features.numpy()
        if self.cache == "":
            return learn_tree(features, self.settings, progress=self.progress)
        folder = Path(trainer.default_root_dir) / "structures" if self.cache is None else Path(self.cache)
        path = folder / f"{cache.cache_key(features, self.settings)}.json"
        atomic.remove_leftovers(folder)
        warn_if_shared(folder, "learned structures")
        ggt = cache.load(path, features.d if isinstance(features, StreamedData) else features.shape[1])
        if ggt is not None:
            rank_zero_info(f"structure from {path}")
            return ggt
        ggt = learn_tree(features, self.settings, progress=self.progress)
        try:
            cache.store(path, ggt)
        except OSError as error:
            rank_zero_warn(
                f"the learned structure is not kept for other runs, because {path} can't be written: {error}"
            )
        return ggt

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the tree beside the checkpoints, log its size and draw it; a resumed run has logged it already."""
        if isinstance(pl_module, BRAINet) and pl_module.ggt is not None:
            self.report(trainer, pl_module.ggt)

    def report(self, trainer: pl.Trainer, ggt: GGT) -> None:
        """Write, log and draw a tree of a fit; a collective."""
        on_rank_zero(trainer, lambda: self._report(trainer, ggt))

    def _report(self, trainer: pl.Trainer, ggt: GGT) -> None:
        # Not trainer.log_dir: that is a collective, and only rank zero comes here.
        folder = Path(getattr(trainer.checkpoint_callback, "dirpath", None) or run_folder(trainer))
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            with write_inside(folder, "structure.json") as temporary:
                temporary.write_text(ggt.to_json(), encoding="utf-8")
        if trainer.ckpt_path is not None and "structure/kept" not in self._facts:
            return
        facts = self._facts | {
            "structure/subnetworks": float(min(ggt.num_subnetworks, 10**300)),
            "structure/unique_structures": float(min(ggt.num_unique_structures, 10**300)),
            "structure/perplexity": ggt.perplexity(),
        }
        for logger in trainer.loggers:
            logger.log_metrics(facts, step=trainer.global_step)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            log_figure(trainer, "structure/tree", draw_ggt(ggt))
            about = {"fingerprint": ggt.fingerprint} | facts
            log_files(trainer, "structure", [folder / "structure.json"], about, "structure", used=True)


def _names_of(trainer: pl.Trainer, module: BRAINet) -> Names:
    """The names of a model's features; without a backbone they are the columns of the data."""
    if module.backbone.raw:
        return lambda: getattr(data_source(trainer, module), "feature_names", None)
    return lambda: module.backbone.names


def exchange(optimizer: torch.optim.Optimizer, old: Head, new: Head, whole: Collection[str]) -> None:
    """Let an optimizer train the parameters of a new head in the place of those of an old one.

    What it remembers of a parameter stays where the parameter was carried over as a whole, and is dropped where parts
    of it begin afresh: moments and step counts are kept for a whole tensor, and old counts with new weights would make
    the first steps too long.
    """
    before, after = dict(old.named_parameters()), dict(new.named_parameters())
    names = {parameter: name for name, parameter in before.items()}
    added = [parameter for name, parameter in after.items() if name not in before]
    for group in optimizer.param_groups:
        kept = _exchanged(group["params"], names, after)
        if any(parameter in names for parameter in group["params"]):  # the head's
            kept, added = kept + added, []
        group["params"] = kept
    for name, parameter in before.items():
        state = optimizer.state.pop(parameter, None)
        if state is not None and name in whole:
            optimizer.state[after[name]] = state


def _exchanged(parameters: Sequence[Any], names: Mapping[Any, str], after: Mapping[str, Any]) -> list[Any]:
    """Parameters of an optimizer, those of the old head by the new ones of the same name; others of it are left out."""
    kept = []
    for parameter in parameters:
        name = names.get(parameter)
        if name is None:  # of the backbone
            kept.append(parameter)
        elif name in after:
            kept.append(after[name])
    return kept
