"""The LightningModule: a backbone, a head whose wiring is learned before fitting, one shared step, honest metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection

from brainet_pl import uncertainty
from brainet_pl.backbones import FeatureExtractor, make_backbone, remove_head
from brainet_pl.baselines import BayesHead, EnsembleHead, LinearHead, MLPHead
from brainet_pl.head import BRAINetHead, Sampling
from brainet_pl.metrics import classification_metrics
from brainet_pl.ood import predictive_scores
from brainet_pl.structure import GGT, learn_structure

HeadName = Literal["brainet", "linear", "mlp", "mc_dropout", "ensemble", "bayes"]
Inference = Literal["stochastic", "simultaneous", "enumerated"]
STORED = "brainet"  # the checkpoint's entry with everything that rebuilds the head


class BRAINet(pl.LightningModule):
    """A classifier whose head is a BRAINet, or one of the heads it is compared with.

    Args:
        num_classes: C.
        backbone: a module, a name (`cifar_resnet20`, `torchvision/resnet18`, `timm/…`), or None for raw features.
        backbone_weights: a file of weights, or the name of published ones.
        head_layer: the backbone's classification layer; None finds it, "" removes nothing.
        freeze_backbone: keep the backbone as it is, batch-norm statistics included.
        head: "brainet", or for comparison "linear", "mlp", "mc_dropout", "ensemble", "bayes".
        num_params: parameters of the head.
        dropout: inside the head; 0.1 for "mc_dropout" if not given.
        hidden: hidden layers of the other heads. members: of the ensemble.
        sampling: sub-networks for each "batch" (the paper) or each "sample" while training.
        min_width: neurons that every BRAINet layer has at the least.
        temperature: of the posterior over sub-networks; None is a tempered default that does not collapse.
        inference: how a BRAINet predicts: "stochastic" with `passes` draws, "simultaneous" or "enumerated".
        passes: T, also of MC-dropout and Bayes by backprop.
        label_smoothing: of the cross-entropy.
        lr: learning rate of the head. backbone_lr: of a backbone that is not frozen; None is a tenth of `lr`.
        optimizer: takes parameter groups; None is Adam.
        lr_scheduler: takes the optimizer; stepped every epoch.
    """

    def __init__(
        self,
        num_classes: int,
        backbone: nn.Module | str | None = None,
        backbone_weights: str | None = None,
        head_layer: str | None = None,
        freeze_backbone: bool = True,
        head: HeadName = "brainet",
        num_params: int = 16_000,
        dropout: float | None = None,
        hidden: int = 2,
        members: int = 5,
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
        self.head_name, self.num_classes = head, num_classes
        self.inference: Inference = inference
        self.passes = passes
        self.cli_config: dict[str, Any] | None = None  # set by the command line, and kept in checkpoints
        self.features_given = False  # set by the feature cache: batches hold features, not inputs
        self._head_settings: dict[str, Any] = {
            "num_params": num_params,
            "dropout": (0.1 if head == "mc_dropout" else 0.0) if dropout is None else dropout,
            "hidden": hidden,
            "members": members,
            "sampling": sampling,
            "min_width": min_width,
            "temperature": "auto" if temperature is None else temperature,
        }
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self._lr, self._backbone_lr, self._label_smoothing = lr, backbone_lr, label_smoothing
        self.val_metrics = classification_metrics(num_classes, "val/")
        self.test_metrics = classification_metrics(num_classes, "test/")

    # -- head ---------------------------------------------------------------------------------------------------------

    @property
    def ggt(self) -> GGT | None:
        """The learned tree, once there is one."""
        return self.head.ggt if isinstance(self.head, BRAINetHead) else None

    @property
    def needs_structure(self) -> bool:
        """Whether the head waits for a tree."""
        return self.head is None and self.head_name == "brainet"

    def set_structure(self, ggt: GGT) -> None:
        """Build the BRAINet head for a learned tree."""
        keys = ("num_params", "dropout", "sampling", "min_width", "temperature")
        self.head = BRAINetHead(ggt, self.num_classes, **{k: self._head_settings[k] for k in keys}).to(self.device)

    def _build_other_head(self, in_features: int) -> None:
        """Build one of the heads that need only the number of features."""
        s, sizes = self._head_settings, (in_features, self.num_classes)
        makers: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: LinearHead(*sizes),
            "mlp": lambda: MLPHead(*sizes, s["num_params"], s["hidden"], s["dropout"]),
            "mc_dropout": lambda: MLPHead(*sizes, s["num_params"], s["hidden"], s["dropout"]),
            "ensemble": lambda: EnsembleHead(*sizes, s["num_params"], s["hidden"], s["members"]),
            "bayes": lambda: BayesHead(*sizes, s["num_params"], s["hidden"]),
        }
        if self.head_name not in makers:
            raise ValueError(f"expected head to be brainet, {', '.join(makers)}, got {self.head_name!r}")
        self.head = makers[self.head_name]()
        self._in_features = in_features

    def setup(self, stage: str) -> None:
        """Runs after the structure callback and before the optimizer: other heads are built from the data's shape.

        A checkpoint is restored after this hook, so a missing BRAINet head is no error yet.
        """
        refuse_sharding(self.trainer)
        if stage == "fit" and self.head is None and self.head_name != "brainet":
            self._build_other_head(self._dry_pass())

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
        checkpoint[STORED] = _primitive(stored | {"config": self.cli_config})
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
            self._build_other_head(int(stored["in_features"]))

    # -- forward ------------------------------------------------------------------------------------------------------

    def extract(self, x: Tensor) -> Tensor:
        """Inputs (B, …) → features (B, d); features pass as they are where the cache gives them."""
        if self.features_given and x.dim() == 2:
            return x
        return torch.as_tensor(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs → class probabilities (B, C), averaged over passes."""
        probs, weights, _ = self.predictions(x)
        return uncertainty.predictive(probs, weights)

    def predictions(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Inputs → probabilities (T, B, C), weights (T,) or None for equal ones, and logits (T, B, C).

        The backbone runs once; only the head runs T times.
        """
        features = self.extract(x)
        weights: Tensor | None = None
        head = self._require_head()
        if not isinstance(head, BRAINetHead):
            logits = head.passes(features, self.passes)  # type: ignore[operator]
        elif self.inference == "stochastic":
            logits = head.stochastic(features, self.passes).logits
        elif self.inference == "enumerated":
            logits, weights = head.enumerate(features)
        else:
            logits = head.simultaneous(features).unsqueeze(0)
        return logits.float().softmax(dim=-1), weights, logits

    def _require_head(self) -> nn.Module:
        if self.head is None:
            raise RuntimeError(
                "expected a learned structure for the BRAINet head, got none: add the callback "
                "brainet_pl.callbacks.StructureLearning() to the Trainer, call model.set_structure(ggt), or give a "
                "checkpoint (ckpt_path=...)"
            )
        return self.head

    # -- steps --------------------------------------------------------------------------------------------------------

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy; with logits (M, B, C), the mean over members."""
        if logits.dim() == 3:
            target = target.repeat(len(logits))
            logits = logits.flatten(0, 1)
        return F.cross_entropy(logits, target, label_smoothing=self._label_smoothing)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of the head, and of the backbone where it is not frozen."""
        x, y = self._unpack(batch)
        head = self._require_head()
        loss = self.loss(head(self.extract(x)), y)
        if isinstance(head, BayesHead):
            loss = loss + head.penalty() / self._train_size()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Metrics of the averaged prediction."""
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Metrics of the averaged prediction on the first loader; scores of every sample on all, for callbacks."""
        x = batch[0]
        probs, weights, logits = self.predictions(x)
        if dataloader_idx == 0:
            _, y = self._unpack(batch)
            self._update(self.test_metrics, uncertainty.predictive(probs, weights), y)
        return predictive_scores(probs, logits.float(), weights)

    def _evaluate(self, batch: Any) -> None:
        x, y = self._unpack(batch)
        self._update(self.val_metrics, self(x), y)

    def _update(self, metrics: MetricCollection, probs: Tensor, target: Tensor) -> None:
        metrics.update(probs, target)
        self.log_dict(metrics, on_step=False, on_epoch=True, add_dataloader_idx=False)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Class, probabilities and every measure of uncertainty, from one set of passes."""
        x = batch[0] if isinstance(batch, list | tuple) else batch
        probs, weights, _ = self.predictions(x)
        mean = uncertainty.predictive(probs, weights)
        return {
            "class": mean.argmax(dim=-1),
            "probabilities": mean,
            "max_softmax": uncertainty.max_softmax(probs, weights),
            "entropy": uncertainty.predictive_entropy(probs, weights),
            "expected_entropy": uncertainty.expected_entropy(probs, weights),
            "mutual_information": uncertainty.mutual_information(probs, weights),
        }

    def _unpack(self, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise ValueError(
                f"expected batches (inputs, labels), got {type(batch).__name__}: return both from the dataset"
            )
        x, y = batch[0], batch[1].long()
        if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < self.num_classes:
            raise ValueError(
                f"expected labels from 0 to {self.num_classes - 1}, got {int(y.min())} to {int(y.max())}: set "
                "num_classes to the number of classes, or renumber the labels"
            )
        return x, y

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
