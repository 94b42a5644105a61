"""The LightningModule: a backbone, a head whose wiring is learned before fitting, one shared step, honest metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import MetricCollection

from brainet_pl.backbones import FeatureExtractor, make_backbone, remove_head
from brainet_pl.baselines import BayesHead, LinearHead, MLPHead
from brainet_pl.ensemble import EnsembleHead, stacked_tree
from brainet_pl.generative import GenerativeScore
from brainet_pl.head import BRAINetHead, Sampling
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Classification, LossName, TaskName, make_task

HeadName = Literal["brainet", "brainet_ensemble", "brainet_dropout", "linear", "mlp", "mc_dropout", "ensemble", "bayes"]
STRUCTURED = ("brainet", "brainet_ensemble", "brainet_dropout")  # heads that wait for a learned tree
Inference = Literal["stochastic", "simultaneous", "enumerated"]
STORED = "brainet"  # the checkpoint's entry with everything that rebuilds the head


class Passes(NamedTuple):
    """Outputs (T, B, O) of one set of passes, their weights (T,) or None for equal ones, and the features (B, d)."""

    outputs: Tensor
    weights: Tensor | None
    features: Tensor


class BRAINet(pl.LightningModule):
    """A model whose head is a BRAINet, or one of the heads it is compared with.

    Args:
        num_classes: C, for classification.
        task: "classification", or "regression": a number with its uncertainty, in its own units.
        loss: "cross_entropy" or "confidence" (DeVries & Taylor 2018), which learns a further score; for regression
            "gaussian", the negative log-likelihood of mean and variance. None is the task's first.
        label_smoothing: of either loss of classification.
        temperature_scaling: of classification: fit a temperature on the validation data after every epoch, and predict
            with it; the test reports both, `test/…` before and `test/scaled/…` after.
        backbone: a module, a name (`cifar_resnet20`, `torchvision/resnet18`, `timm/…`), or None for raw features.
        backbone_weights: a file of weights, or the name of published ones.
        head_layer: the backbone's classification layer; None finds it, "" removes nothing.
        freeze_backbone: keep the backbone as it is, batch-norm statistics included.
        head: "brainet"; "brainet_ensemble" and "brainet_dropout", a deep ensemble and MC-dropout on the MAP structure;
            or for comparison "linear", "mlp", "mc_dropout", "ensemble", "bayes".
        num_params: parameters of the head.
        dropout: inside the head; 0.1 for "mc_dropout" and "brainet_dropout" if not given.
        hidden: hidden layers of the heads without a structure. members: of the ensembles.
        norm: batch norm in every layer ("bayes" always has it), or null for a bias.
        sampling: sub-networks for each "batch" (the paper) or each "sample" while training.
        min_width: neurons that every BRAINet layer has at the least.
        temperature: of the posterior over sub-networks; None is a tempered default that does not collapse.
        inference: how a BRAINet predicts: "stochastic" with `passes` draws, "simultaneous" or "enumerated".
        passes: T, also of MC-dropout and Bayes by backprop.
        lr: learning rate of the head. backbone_lr: of a backbone that is not frozen; None is a tenth of `lr`.
        optimizer: takes parameter groups; None is Adam.
        lr_scheduler: takes the optimizer; stepped every epoch.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        backbone: nn.Module | str | None = None,
        backbone_weights: str | None = None,
        head_layer: str | None = None,
        freeze_backbone: bool = True,
        task: TaskName = "classification",
        loss: LossName | None = None,
        temperature_scaling: bool = False,
        head: HeadName = "brainet",
        num_params: int = 16_000,
        dropout: float | None = None,
        hidden: int = 2,
        members: int = 5,
        norm: Literal["batch"] | None = "batch",
        sampling: Sampling = "sample",
        min_width: int = 1,
        temperature: float | None = None,
        inference: Inference = "stochastic",
        passes: int = 15,
        label_smoothing: float = 0.0,
        lr: float = 1e-3,
        backbone_lr: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        skip = ["optimizer", "lr_scheduler"] + (["backbone"] if isinstance(backbone, nn.Module) else [])
        self.save_hyperparameters(ignore=skip)
        if passes < 1:
            raise ValueError(f"expected passes of at least 1, got {passes}")
        model = make_backbone(backbone, backbone_weights)
        model = None if model is None else remove_head(model, head_layer)
        self.backbone = FeatureExtractor(model, frozen=freeze_backbone or model is None)
        self.head: nn.Module | None = None
        self.generative: GenerativeScore | None = None  # set by the callback `GenerativeFit`
        self.head_name = head
        settings = {"loss": loss, "label_smoothing": label_smoothing, "temperature_scaling": temperature_scaling}
        self.task = make_task(task, num_classes, settings)
        self.inference: Inference = inference
        self.passes = passes
        self.cli_config: dict[str, Any] | None = None  # set by the command line, and kept in checkpoints
        self.features_given = False  # set by the feature cache: batches hold features, not inputs
        self._head_settings: dict[str, Any] = {
            "num_params": num_params,
            "dropout": (0.1 if head in ("mc_dropout", "brainet_dropout") else 0.0) if dropout is None else dropout,
            "hidden": hidden,
            "members": members,
            "norm": norm,
            "sampling": sampling,
            "min_width": min_width,
            "temperature": "auto" if temperature is None else temperature,
        }
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self._lr, self._backbone_lr = lr, backbone_lr
        self.val_metrics, self.test_metrics = self.task.metrics("val/"), self.task.metrics("test/")
        self.scaled_metrics = self.task.metrics("test/scaled/") if temperature_scaling else None

    # -- head ---------------------------------------------------------------------------------------------------------

    @property
    def ggt(self) -> GGT | None:
        """The learned tree, once there is one; of the heads on a MAP structure, that structure."""
        return getattr(self.head, "ggt", None) if self.head_name in STRUCTURED else None

    @property
    def needs_structure(self) -> bool:
        """Whether the head waits for a tree."""
        return self.head is None and self.head_name in STRUCTURED

    def set_structure(self, ggt: GGT) -> None:
        """Build the head for a learned tree, or for its MAP structure."""
        out, s = self.task.out_features, self._head_settings
        keys = ["num_params", "dropout", "min_width", "norm"]
        if self.head_name == "brainet":
            keys += ["sampling", "temperature"]
            head: nn.Module = BRAINetHead(ggt, out, **{k: s[k] for k in keys})
        else:
            members = s["members"] if self.head_name == "brainet_ensemble" else 1
            head = EnsembleHead(ggt, out, members=members, **{k: s[k] for k in keys})
        self.head = head.to(self.device)

    def build_head(self, in_features: int) -> None:
        """Build one of the heads that need only the number of features."""
        s, sizes = self._head_settings, (in_features, self.task.out_features)
        budget, norm = s["num_params"], s["norm"]
        makers: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: LinearHead(*sizes),
            "mlp": lambda: MLPHead(*sizes, budget, s["hidden"], s["dropout"], norm),
            "mc_dropout": lambda: MLPHead(*sizes, budget, s["hidden"], s["dropout"], norm),
            "ensemble": lambda: EnsembleHead(
                stacked_tree(in_features, s["hidden"]), sizes[1], budget, s["members"], dropout=s["dropout"], norm=norm
            ),
            "bayes": lambda: BayesHead(*sizes, budget, s["hidden"]),
        }
        if self.head_name not in makers:
            known = ", ".join([*STRUCTURED, *makers])
            raise ValueError(f"expected head to be {known}, got {self.head_name!r}")
        self.head = makers[self.head_name]()
        self._in_features = in_features

    def setup(self, stage: str) -> None:
        """Runs after the structure callback and before the optimizer: other heads are built from the data's shape.

        A checkpoint is restored after this hook, so a missing BRAINet head is no error yet.
        """
        refuse_sharding(self.trainer)
        if stage == "fit" and self.head is None and self.head_name not in STRUCTURED:
            self.build_head(self._dry_pass())
        if stage == "fit" and self.task.needs_targets:
            self.task.prepare(self._all_targets())

    def _all_targets(self) -> Tensor:
        """(N,) targets of the training data, in a fixed order: the same in all processes."""
        from brainet_pl.features import structure_loader

        targets = [self._pair(batch)[1] for batch in structure_loader(self.trainer, self)]
        if not targets:
            raise ValueError("expected training data to learn the scale of the target from, got an empty loader")
        return torch.cat(targets)

    def _dry_pass(self) -> int:
        """The number of features of the first training sample."""
        from brainet_pl.features import extract_features, first_batch

        sample = first_batch(self.trainer)[:2]
        if self.features_given:
            return int(sample.shape[1])
        return int(extract_features(self.backbone, [sample], progress=False).shape[1])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what rebuilds the head, as JSON-able primitives only."""
        ggt = self.ggt
        stored = {"ggt": ggt.to_dict()} if ggt is not None else {"in_features": getattr(self, "_in_features", None)}
        generative = None if self.generative is None else self.generative.to_dict()
        checkpoint[STORED] = _primitive(stored | {"config": self.cli_config, "generative": generative})
        # The checkpoint holds the backbone's weights: the file they once came from must not be asked for again.
        for settings in (checkpoint.get("hyper_parameters"), (checkpoint[STORED]["config"] or {}).get("model")):
            if settings and "backbone_weights" in settings:
                settings["backbone_weights"] = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the head from the checkpoint before its weights are loaded; the checkpoint's own tree wins."""
        stored = checkpoint.get(STORED)
        if stored is None:
            raise ValueError(
                "expected a checkpoint of BRAINet, got one without its structure: load it with its own class"
            )
        self.cli_config = self.cli_config or stored.get("config")
        if "ggt" in stored:
            ggt = GGT.from_dict(stored["ggt"])
            if self.ggt is None or self.ggt.fingerprint != ggt.fingerprint:
                self.set_structure(ggt)
        elif self.head is None and stored["in_features"] is not None:
            self.build_head(int(stored["in_features"]))
        generative = stored.get("generative")  # where there is none, one fitted earlier has no weights to load
        self.generative = None if generative is None else GenerativeScore.from_dict(generative).to(self.device)

    # -- forward ------------------------------------------------------------------------------------------------------

    def extract(self, x: Tensor) -> Tensor:
        """Inputs (B, …) → features (B, d); features pass as they are where the cache gives them."""
        if self.features_given and x.dim() == 2:
            return x
        return torch.as_tensor(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs → the prediction averaged over passes: class probabilities (B, C), or mean and variance (B, 2)."""
        outputs, weights, _ = self.passes_of(x)
        return self.task.final(self.task.predictive(outputs, weights))

    def passes_of(self, x: Tensor) -> Passes:
        """Inputs → outputs of all passes. The backbone runs once; only the head runs T times."""
        features = self.extract(x)
        weights: Tensor | None = None
        head = self._require_head()
        if not isinstance(head, BRAINetHead):
            outputs = head.passes(features, self.passes)  # type: ignore[operator]
        elif self.inference == "stochastic":
            outputs = head.stochastic(features, self.passes).logits
        elif self.inference == "enumerated":
            outputs, weights = head.enumerate(features)
        else:
            outputs = head.simultaneous(features).unsqueeze(0)
        return Passes(outputs, weights, features)

    def _require_head(self) -> nn.Module:
        if self.head is None:
            raise RuntimeError(
                "expected a learned structure for the BRAINet head, got none: add the callback "
                "brainet_pl.callbacks.StructureLearning() to the Trainer, call model.set_structure(ggt), or give a "
                "checkpoint (ckpt_path=...)"
            )
        return self.head

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of the head, and of the backbone where it is not frozen."""
        x, y = self._unpack(batch)
        head = self._require_head()
        loss = self.task.loss(head(self.extract(x)), y)
        if isinstance(head, BayesHead):
            loss = loss + head.penalty() / self._train_size()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Metrics of the averaged prediction."""
        x, y = self._unpack(batch)
        passes = self.passes_of(x)
        predicted = self.task.predictive(passes.outputs, passes.weights)
        self._update(self.val_metrics, predicted, y)
        if not self._calibrates:
            return
        if self.scaled_metrics is not None:
            self._classification.temperature_fit.update(predicted, y)
        if self.generative is not None and isinstance(self.task, Classification):
            self.generative.watch(self._scores(passes))

    @property
    def _calibrates(self) -> bool:
        """Only a fit's own validation may set the temperature and the reference of scores.

        The sanity check sees a network that has not trained, and `trainer.validate` may be given any data, test data
        included.
        """
        return self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking

    def on_validation_epoch_end(self) -> None:
        """Fit what needs validation data, before a checkpoint is written: the temperature, the reference of scores."""
        if not self._calibrates:
            return
        if self.generative is not None:
            self.generative.settle()
        if self.scaled_metrics is not None:
            task = self._classification
            task.tau.copy_(task.temperature_fit.compute())
            task.temperature_fit.reset()
            self.log("val/cal/temperature", task.tau)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Metrics on the first loader; for callbacks, on all loaders, what the passes gave.

        Returns:
            `scores` (name → (B,)), `outputs` (T, B, O), `weights` (T,) or None, `target` (B,) or None past the first.
        """
        passes = self.passes_of(batch[0])
        outputs, weights, _ = passes
        target = None
        if dataloader_idx == 0:
            _, target = self._unpack(batch)
            predicted = self.task.predictive(outputs, weights)
            self._update(self.test_metrics, predicted, target)
            if self.scaled_metrics is not None:
                self._update(self.scaled_metrics, self.task.final(predicted), target)
        return {"scores": self._scores(passes), "outputs": outputs, "weights": weights, "target": target}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """The prediction and every measure of uncertainty, from one set of passes."""
        passes = self.passes_of(batch[0] if isinstance(batch, list | tuple) else batch)
        return self.task.predict(passes.outputs, passes.weights) | self._scores(passes)

    def _scores(self, passes: Passes) -> dict[str, Tensor]:
        """All scores (B,) of one set of passes: the task's and, once it is fitted, the generative ones."""
        outputs, weights, features = passes
        scores = self.task.scores(outputs, weights)
        if self.generative is None:
            return scores
        if not isinstance(self.task, Classification):
            return scores | self.generative.scores(features)
        probs = self.task.predictive(outputs, weights)
        return scores | self.generative.scores(features, probs, scores["energy"])

    def _update(self, metrics: MetricCollection, predicted: Tensor, target: Tensor) -> None:
        metrics.update(predicted, target)
        self.log_dict(metrics, on_step=False, on_epoch=True, add_dataloader_idx=False)

    @property
    def _classification(self) -> Classification:
        assert isinstance(self.task, Classification)
        return self.task

    @staticmethod
    def _pair(batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise ValueError(
                f"expected batches (inputs, targets), got {type(batch).__name__}: return both from the dataset"
            )
        return batch[0], batch[1]

    def _unpack(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = self._pair(batch)
        return x, self.task.check(y)

    def _train_size(self) -> int:
        batches = float(self.trainer.num_training_batches)
        if batches == float("inf"):
            raise ValueError("expected training data of known size for Bayes by backprop, got an endless loader")
        size = getattr(self.trainer.train_dataloader, "batch_size", None) or 1
        return max(1, int(batches * size * self.trainer.world_size))

    # -- optimizer ----------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Adam with a fixed rate (the paper) unless told otherwise; the backbone in a group of its own."""
        groups: list[dict[str, Any]] = [{"params": list(self._require_head().parameters()), "lr": self._lr}]
        if not self.backbone.frozen:
            rate = self._lr / 10 if self._backbone_lr is None else self._backbone_lr
            groups.append({"params": list(self.backbone.parameters()), "lr": rate})
        optimizer = torch.optim.Adam(groups) if self._optimizer is None else self._optimizer(groups)
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}


class SwappedModel(nn.Module):
    """A feature extractor with a BRAINet head: logits (B, C) out, like the model it came from."""

    def __init__(self, backbone: FeatureExtractor, head: BRAINetHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        """(B, …) → (B, C)."""
        return torch.as_tensor(self.head(self.backbone(x)))

    @torch.no_grad()
    def predict(self, x: Tensor, passes: int = 15) -> Tensor:
        """(B, …) → probabilities (T, B, C) of T sub-networks; the backbone runs once."""
        return self.head.stochastic(self.backbone(x), passes).logits.softmax(dim=-1)


def swap_head(
    model: nn.Module,
    data: GGT | Tensor | Iterable[Any],
    num_classes: int,
    *,
    head_layer: str | None = None,
    freeze: bool = True,
    head: dict[str, Any] | None = None,
    **learn: Any,
) -> SwappedModel:
    """Replace the classification layer of a trained model by a BRAINet head, outside Lightning.

    Args:
        model: any classifier; it is copied, never changed.
        data: a learned tree, or inputs to learn one from: a tensor, or batches of inputs or of (inputs, …).
        num_classes: outputs of the new head.
        head_layer: the layer to remove; None finds it.
        freeze: keep the backbone as it is.
        head: settings of `BRAINetHead`; 16,000 parameters if it does not say.
        **learn: settings of `learn_structure`.
    """
    from brainet_pl.features import extract_features

    backbone = FeatureExtractor(remove_head(model, head_layer), frozen=freeze)
    if isinstance(data, GGT):
        ggt = data
    else:
        batches: Iterable[Any] = data.split(256) if isinstance(data, Tensor) else data  # type: ignore[no-untyped-call]
        ggt = learn_structure(extract_features(backbone, batches), **learn)
    settings = head or {}
    if "num_params" not in settings and "width" not in settings:
        settings = {"num_params": 16_000, **settings}
    device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    return SwappedModel(backbone, BRAINetHead(ggt, num_classes, **settings).to(device))


def refuse_sharding(trainer: pl.Trainer) -> None:
    """Strategies that restore checkpoints after sharding would need the head before its shape is known."""
    name = type(trainer.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise RuntimeError(
            f"expected a strategy that loads checkpoints before sharding (auto, ddp), got {name}: a head whose shape "
            "is learned can't be sharded yet"
        )


def _primitive(value: Any) -> Any:
    """Tuples to lists, all the way down, so that a checkpoint loads with weights_only=True and dumps as JSON."""
    if isinstance(value, dict):
        return {k: _primitive(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_primitive(v) for v in value]
    return value
