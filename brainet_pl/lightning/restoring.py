"""How a model is written into a checkpoint and built from one: its structure and settings as data, never as code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import to_builtins

from brainet_pl._utils.framework import pl, rank_zero_warn
from brainet_pl._utils.lightning_private import set_hparams, trainer_of
from brainet_pl._utils.parts import arguments, make_part
from brainet_pl._utils.stored import FORMAT, readable_errors
from brainet_pl.backbones.loading import Preset, check_stored_backbone
from brainet_pl.calibration import DensityScaling, TemperatureScaling
from brainet_pl.distributed.collectives import all_gather
from brainet_pl.features.extraction import is_sharded
from brainet_pl.lightning.sharding import is_model_parallel, load_shares_of_checkpoints, shard_network
from brainet_pl.prediction.defaults import default_calibrator
from brainet_pl.prediction.finite import first_bad_weight
from brainet_pl.scores import Score
from brainet_pl.storage.container import StoredBackbone, StoredModel, named_layers
from brainet_pl.storage.format import KIND, STORED, Checkpoint, add_digests, check_callback_states, unpack
from brainet_pl.storage.sharded import is_sharded_folder, read_parts, read_whole
from brainet_pl.structure import GGT
from brainet_pl.tasks.classification import check_class_names, same_classes

if TYPE_CHECKING:
    from brainet_pl.backbones import FeatureExtractor
    from brainet_pl.calibration import Calibrator, Conformal, RiskControl
    from brainet_pl.network import Head, HeadSettings
    from brainet_pl.prediction.predictor import Predictor
    from brainet_pl.scores import ScoreSet, Verdict
    from brainet_pl.tasks import Task

PARTS = ("backbone", "head", "task", "scores", "calibration", "conformal", "verdict", "risk", "ggt")


class RestorableModule(pl.LightningModule):
    """A LightningModule whose checkpoints carry the learned structure of its predictor, and no code."""

    predictor: Predictor
    head_settings: HeadSettings
    class_names: tuple[str, ...] | None
    preset: Preset | None
    # Parts of the predictor, under their own names:
    backbone: FeatureExtractor
    head: Head | None
    task: Task
    scores: ScoreSet
    calibration: Calibrator | None
    conformal: Conformal | None
    verdict: Verdict
    risk: RiskControl
    ggt: GGT | None

    def __getattr__(self, name: str) -> Any:
        """Give the parts of the predictor under their own names."""
        return getattr(self.predictor, name) if name in PARTS else super().__getattr__(name)

    @property
    def passes(self) -> int:
        """How many sub-networks a prediction averages."""
        return self.predictor.num_passes

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = None, hparams_file: Any = None, strict: bool | None = None,
        weights_only: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The model of a checkpoint file, its structure included; tensors and primitives alone are read from the file.

        Args:
            checkpoint_path: a file, or the folder of a sharded fit; a URL is refused.
            map_location: as in `torch.load`.
            hparams_file: as in Lightning.
            strict: whether all weights must be there.
            weights_only: False would run whatever code a pickle holds, so it is refused.
            **kwargs: arguments of `BRAINet` to use instead of the stored ones.
        """
        checkpoint = Checkpoint.read(checkpoint_path)  # refuses another format before its settings are tried
        if "backbone" not in kwargs:
            check_stored_backbone(checkpoint.hparams.get("backbone"))
            if checkpoint.hparams.get("backbone") is None:
                refuse_missing(checkpoint.backbone)  # before parts are made that read its layers
        if not weights_only:
            raise ValueError(
                "expected weights_only=True, got False: a checkpoint of BRAINet holds no code, and runs none"
            )
        unknown = sorted(set(kwargs) - {argument.name for argument in arguments(cls)})
        if unknown:  # Lightning would drop them without a word
            raise ValueError(
                f"expected arguments of BRAINet, got {', '.join(unknown)}: settings of a part are changed on the part, "
                "such as model.head.inference, or by giving the part"
            )
        load, source = super().load_from_checkpoint, checkpoint_path
        if is_sharded_folder(checkpoint_path):
            source = io.BytesIO()
            torch.save(read_whole(checkpoint_path), source)
            source.seek(0)
        advice = "the file was changed, or the arguments given are not those it was trained with"
        with readable_errors(f"weights and settings that fit each other in {checkpoint_path}", advice):
            return load(source, map_location, hparams_file, strict, weights_only=True, **kwargs)

    def shard_early(self) -> None:
        """Under FSDP2: build the head of a checkpoint, and shard the backbone before features are extracted."""
        trainer = trainer_of(self)
        if trainer is None or not is_model_parallel(trainer) or is_sharded(self):
            return
        load_shares_of_checkpoints(trainer)
        if trainer.ckpt_path is not None:
            self.on_load_checkpoint(read_parts(trainer.ckpt_path))
        self.trace_backbone()
        shard_network(self.predictor.backbone, trainer.strategy.device_mesh["data_parallel"])  # type: ignore[attr-defined]

    def trace_backbone(self) -> None:
        """Let the backbone find its layers while it is whole; a module that has data does it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what rebuilds the head, as JSON-able primitives only."""
        predictor = self.predictor
        weight = next(filter(None, all_gather(first_bad_weight(predictor))), None)  # each process may hold a share
        if weight is not None:
            raise ValueError(
                f"expected finite weights, got NaN or infinity in {weight}: no checkpoint was written, and earlier "
                "ones are as they were; go on from one of these with a lower lr or Trainer(gradient_clip_val=1.0)"
            )
        stored = StoredModel(
            kind=KIND,
            format=FORMAT,
            in_features=predictor.in_features,
            ggt=None if predictor.ggt is None else predictor.ggt.to_dict(),
            base_logits=predictor.has_base_logits,
            backbone=StoredBackbone.of(predictor.backbone),
            class_names=None if self.class_names is None else list(self.class_names),
            preset=None if self.preset is None else self.preset.to_dict(),
        )
        checkpoint[STORED] = to_builtins(stored)
        add_digests(checkpoint)  # Lightning calls this last: all parts are there

    calibrates_by_default = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the head from the checkpoint before its weights are loaded; the checkpoint's own tree wins."""
        trainer = trainer_of(self)
        stored = unpack(checkpoint)
        if trainer is not None:
            check_callback_states(checkpoint.get("callbacks"), trainer)
        predictor, backbone = self.predictor, self.predictor.backbone
        if backbone.raw:
            refuse_missing(stored.backbone)
        if backbone.needs_sample:
            stored.backbone.restore_removal(backbone)
        self.restore_layers(stored.backbone)
        stored.backbone.restore_inputs(backbone)
        self._rebuild_head(stored, checkpoint.get("state_dict"))
        named = check_class_names(stored.class_names, predictor.task)
        if trainer is not None and self.class_names and named:  # a fit that resumes has met its data
            same_classes(named, self.class_names)
        self.class_names = named or self.class_names
        self.preset = Preset.from_dict(stored.preset) or self.preset  # names of weights are not in the file
        for score in checkpoint.get("hyper_parameters", {}).get("scores") or ():
            if not isinstance(score, Mapping):  # given to load_from_checkpoint, and so among ours
                continue
            made = make_part(Score, score, "scores")
            if made.key not in predictor.scores:  # fitted there, so it can be used here
                predictor.scores.add(made.to(self.device))
        predictor.tap_scores()
        self._match_calibrator(checkpoint.get("state_dict", {}))
        self._warn_of_nan(checkpoint.get("state_dict", {}))

    def _match_calibrator(self, state: Mapping[str, Any]) -> None:
        """Where nobody named a calibrator, take the one of a checkpoint: the default depends on the scores there."""
        predictor, fades = self.predictor, "predictor.calibration.kappa" in state
        current = predictor.calibration
        if not self.calibrates_by_default or current is None or isinstance(current, DensityScaling) == fades:
            return
        made = default_calibrator(predictor.task, predictor.scores) if fades else TemperatureScaling()
        predictor.calibration = None if made is None else made.to(self.device)

    def restore_layers(self, stored: StoredBackbone) -> None:
        """Read the layers of a checkpoint, where they are to be chosen by training data, or a fit has just done so."""
        backbone = self.backbone
        if backbone.search is None and not backbone.evidence:
            return
        if backbone.search is not None or stored.taps != backbone.taps:
            backbone.choose(stored.taps, stored.evidence)
            self.save_layers()

    def save_layers(self) -> None:
        """Write the layers that were chosen into the hyper-parameters, so that the same model is made again."""
        backbone = self.hparams.get("backbone")
        if isinstance(backbone, Mapping):  # None stands for a module
            pool = backbone.get("pool") if isinstance(backbone.get("pool"), str) else None
            chosen: Any = named_layers(self.backbone.taps)
            if self.backbone.taps is None:
                chosen["pool"] = pool
            set_hparams(self, {**self.hparams, "backbone": {**backbone, **chosen}})

    def _warn_of_nan(self, state: Mapping[str, Any]) -> None:
        prefix = "predictor."
        values = {
            name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix) and not v.is_meta
        }
        weight = first_bad_weight(self.predictor, values)
        if weight is not None:
            rank_zero_warn(
                f"expected finite weights in the checkpoint, got NaN or infinity in the weight {weight}: predictions "
                "are NaN, with the class -1 and no input known; use an earlier checkpoint"
            )

    def _rebuild_head(self, stored: StoredModel, weights: Any) -> None:
        predictor = self.predictor
        ggt = None if stored.ggt is None else GGT.from_dict(stored.ggt)
        shape = (predictor.in_features, predictor.has_base_logits)
        before = predictor.head
        same = predictor.head is not None and shape == (stored.in_features, stored.base_logits)
        if ggt is not None and (predictor.ggt is None or predictor.ggt.fingerprint != ggt.fingerprint):
            same = False
        if stored.in_features is not None and not same:
            if before is not None and is_sharded(before):
                raise RuntimeError(
                    "expected a checkpoint with the head that was sharded, got another, because Lightning tells of it "
                    "too late: say it before, trainer.ckpt_path = path, and call fit or test without ckpt_path"
                )
            settings, features = self.head_settings, stored.in_features
            head, outputs = settings.resolve_skip(stored.base_logits), predictor.task.out_features
            tree = stored.checked_tree(lambda tree: head.build(features, outputs, tree), settings.settings(), weights)
            predictor.build_head(settings, features, tree, stored.base_logits)


def refuse_missing(stored: StoredBackbone) -> None:
    """Refuse a checkpoint whose backbone is not in the file, and was not given."""
    if stored.network is not None:
        raise ValueError(
            f"expected a backbone of the class {stored.network}, got none: it was given as a module, "
            "which a checkpoint can't rebuild; give it again, BRAINet.load_from_checkpoint(path, backbone=module)"
        )
