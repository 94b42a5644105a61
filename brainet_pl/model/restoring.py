"""How a model is written into a checkpoint and built from one: its structure and settings as data, never as code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from brainet_pl._utils import digest
from brainet_pl._utils.framework import pl
from brainet_pl._utils.parts import arguments, make_part, primitive
from brainet_pl.backbones.batches import Sample
from brainet_pl.backbones.loading import Preset, check_stored_backbone
from brainet_pl.backbones.removal import HeadLayer
from brainet_pl.scores import Score
from brainet_pl.structure import GGT
from brainet_pl.tasks.classification import check_class_names, same_classes

if TYPE_CHECKING:
    from brainet_pl.model.predictor import Predictor
    from brainet_pl.network import HeadSettings

STORED = "brainet"  # the checkpoint's entry with everything that rebuilds the head
CONFIG = "brainet_config"  # its entry with the settings of the command line
HPARAMS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
STATES = ("state_dict", STORED, "optimizer_states")
SETTINGS = (HPARAMS, CONFIG)  # checked as the file is read: Lightning changes them before it loads a model
FORMAT = 5  # of that entry


class RestorableModule(pl.LightningModule):
    """A LightningModule whose checkpoints carry the learned structure of its predictor, and no code."""

    predictor: Predictor
    head_settings: HeadSettings
    class_names: tuple[str, ...] | None
    preset: Preset | None

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = None, hparams_file: Any = None, strict: bool | None = None,
        weights_only: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """The model of a checkpoint file, its structure included; tensors and primitives alone are read from the file.

        Args:
            checkpoint_path: a file; a URL is refused.
            map_location: as in `torch.load`.
            hparams_file: as in Lightning.
            strict: whether all weights must be there.
            weights_only: False would run whatever code a pickle holds, so it is refused.
            **kwargs: arguments of `BRAINet` to use instead of the stored ones.
        """
        content = read_checkpoint(checkpoint_path)  # a file of another version is told before its settings are tried
        if "backbone" not in kwargs:
            check_stored_backbone(content.get(HPARAMS, {}).get("backbone"))
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
        load = super().load_from_checkpoint
        try:
            return load(checkpoint_path, map_location, hparams_file, strict, weights_only=True, **kwargs)
        except RuntimeError as error:
            if "state_dict" not in str(error):
                raise
            raise ValueError(
                f"expected weights that fit the settings in {checkpoint_path}, got others ({error}): the file was "
                "changed, or the arguments given are not those it was trained with"
            ) from error

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what rebuilds the head, as JSON-able primitives only."""
        predictor, backbone = self.predictor, self.predictor.backbone
        takes = backbone.input_signature  # what `brainet export` makes an example of
        stored = {
            "format": FORMAT,
            "in_features": predictor.in_features,
            "ggt": None if predictor.ggt is None else predictor.ggt.to_dict(),
            "backbone": None if backbone.raw else type(backbone.model).__name__,
            "removed": None if backbone.removed is None else backbone.removed._asdict(),
            "class_names": self.class_names,
            "own": predictor.has_base_logits,
            "takes": None if takes is None else {name: sample._asdict() for name, sample in takes.items()},
            "preset": None if self.preset is None else self.preset.to_dict(),
        }
        checkpoint[STORED] = primitive(stored)
        # Lightning calls this last: all parts are there.
        checkpoint[STORED][digest.ENTRY] = digest.digests(checkpoint, STATES + SETTINGS)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the head from the checkpoint before its weights are loaded; the checkpoint's own tree wins."""
        stored = check_stored(checkpoint)
        digest.check_digests(checkpoint, stored.get(digest.ENTRY), STATES)
        if self._trainer is not None:
            check_callback_states(checkpoint.get("callbacks"), self.trainer)
        _check_stored_head(stored)
        predictor, backbone = self.predictor, self.predictor.backbone
        if stored["backbone"] is not None and backbone.raw:
            raise ValueError(
                f"expected a backbone of the class {stored['backbone']}, got none: it was given as a module, which a "
                "checkpoint can't rebuild; give it again, BRAINet.load_from_checkpoint(path, backbone=module)"
            )
        if backbone.needs_sample and stored.get("removed") is not None:
            backbone.remove(HeadLayer(**stored["removed"]))
        if stored.get("takes") is not None:
            backbone.input_signature = {k: Sample(tuple(v["shape"]), v["dtype"]) for k, v in stored["takes"].items()}
        self._rebuild_head(stored)
        named = check_class_names(stored.get("class_names"), predictor.task)  # older files have none
        if self._trainer is not None and self.class_names and named:  # a fit that resumes has met its data
            same_classes(named, self.class_names)
        self.class_names = named or self.class_names
        self.preset = Preset.from_dict(stored.get("preset")) or self.preset  # names of weights are not in the file
        for score in checkpoint.get("hyper_parameters", {}).get("scores") or ():
            if not isinstance(score, Mapping):  # given to load_from_checkpoint, and so among ours
                continue
            made = make_part(Score, score, "scores")
            if made.key not in predictor.scores:  # fitted there, so it can be used here
                predictor.scores.add(made.to(self.device))
        predictor.tap_scores()

    def _rebuild_head(self, stored: Mapping[str, Any]) -> None:
        predictor = self.predictor
        ggt = None if stored["ggt"] is None else GGT.from_dict(stored["ggt"])
        shape = (predictor.in_features, predictor.has_base_logits)
        same = predictor.head is not None and shape == (stored["in_features"], stored["own"])
        if ggt is not None and (predictor.ggt is None or predictor.ggt.fingerprint != ggt.fingerprint):
            same = False
        if stored["in_features"] is not None and not same:
            predictor.build_head(self.head_settings, int(stored["in_features"]), ggt, stored["own"])


def read_checkpoint(path: Any) -> dict[str, Any]:
    """The content of a checkpoint file of BRAINet: tensors and primitives, never code."""
    if "://" in str(path):
        raise ValueError(f"expected a file, got the address {path}: download it first, then give the file")
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a checkpoint at {path}, found no such file: check the path")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file, any error may come
        raise ValueError(
            f"expected a checkpoint with tensors and primitives in {path}, got {type(error).__name__} when reading it: "
            "the file is damaged or no checkpoint of BRAINet; take another copy"
        ) from error
    stored = check_stored(content)
    digest.check_digests(content, stored.get(digest.ENTRY), SETTINGS)
    return content


def check_stored(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint holds to rebuild a head, or an error that says whose checkpoint it is."""
    stored = checkpoint.get(STORED) if isinstance(checkpoint, Mapping) else None
    if not isinstance(stored, Mapping):
        raise ValueError("expected a checkpoint of BRAINet, got one without its structure: load it with its own class")
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"expected a checkpoint of format {FORMAT}, got format {stored.get('format', 1)}, written by another "
            "version of brainet_pl: train the model again, or load it with the version that wrote it"
        )
    settings = checkpoint.get(HPARAMS) or {}
    if not isinstance(settings, Mapping) or "_instantiator" in settings:  # Lightning would import and call it
        raise ValueError(
            "expected the settings of a BRAINet in the checkpoint, got a function that makes the model: a checkpoint "
            "is data and runs no code; take a file that BRAINet wrote"
        )
    return stored


def _check_stored_head(stored: Mapping[str, Any]) -> None:
    """Refuse an entry that no head and no backbone can be rebuilt from."""
    kinds: dict[str, Any] = {"in_features": int | None, "ggt": dict | None, "backbone": str | None, "own": bool}
    removed = stored.get("removed")
    wrong = [key for key, kind in kinds.items() if key not in stored or not isinstance(stored[key], kind)]
    if removed is not None and (
        not isinstance(removed, Mapping) or {k: type(v) for k, v in removed.items()} != {"name": str, "leave": bool}
    ):
        wrong.append("removed")
    if not _is_signature(stored.get("takes")):
        wrong.append("takes")
    if wrong:
        raise ValueError(
            f"expected {', '.join(kinds)}, removed and takes in the checkpoint's entry {STORED!r}, as BRAINet writes "
            f"them, got no such {', '.join(wrong)}: the file was changed; take another copy"
        )


def _is_signature(takes: Any) -> bool:
    """Whether this is what inputs look like, as `on_save_checkpoint` writes it; files from before have none."""
    if takes is None:
        return True
    kinds = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
    return isinstance(takes, Mapping) and all(
        isinstance(name, str)
        and isinstance(sample, Mapping)
        and set(sample) == {"shape", "dtype"}
        and isinstance(sample["shape"], list)
        and all(type(n) is int and 0 <= n < 2**31 for n in sample["shape"])
        and sample["dtype"] in kinds
        for name, sample in takes.items()
    )


def check_callback_states(states: Any, trainer: pl.Trainer) -> None:
    """Refuse states of callbacks that name files elsewhere: Lightning deletes older checkpoints by the names it reads.

    It deletes what lies below its folder by the letter of the path, `folder/../../x` included, and anything that has an
    address.
    """
    folders = tuple(f"{getattr(c, 'dirpath', None)}/" for c in trainer.checkpoint_callbacks)
    for state in states.values() if isinstance(states, Mapping) else ():
        best = state.get("best_k_models") if isinstance(state, Mapping) else None
        names = list(best) if isinstance(best, Mapping) else []
        names += [v for k, v in state.items() if str(k).endswith("path")] if isinstance(state, Mapping) else []
        for name in (name for name in names if isinstance(name, str)):
            address = "://" in name or "::" in name
            if ".." in Path(name).parts or (address and not name.startswith(folders)):
                raise ValueError(
                    f"expected checkpoints in the folder of the run in the states of callbacks, got {name!r}: the file "
                    "is not what Lightning writes; take another copy"
                )
