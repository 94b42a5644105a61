"""A model as others share models: `model.safetensors`, `config.json` and a card, without code and without pickle."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from brainet_pl._utils.atomic import atomic_folder
from brainet_pl._utils.parts import primitive
from brainet_pl.evaluation.report.read import read_record
from brainet_pl.evaluation.schema import Record
from brainet_pl.lightning.module import BRAINet
from brainet_pl.network.base import Head
from brainet_pl.storage.format import HPARAMS, STORED

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
REPOSITORY = r"[\w.-]+/[\w.-]+"  # owner/name
VERSION = "pytorch-lightning_version"  # Lightning looks for it in a checkpoint


def save_pretrained(model: BRAINet, folder: str | Path, run: str | Path | None = None) -> Path:
    """Write a fitted model to a folder of tensors and plain values, as hubs of models take it.

    Args:
        model: with its head.
        folder: where `model.safetensors`, `config.json` and `README.md` are written; it holds nothing else.
        run: the folder of a run that was tested, whose numbers the card then has.
    """
    from safetensors.torch import save_file

    model.predictor.require_head()
    place = Path(folder)
    state = sorted(model.state_dict().items())  # the file has no order of its own, and the digest has
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state}
    content: dict[str, Any] = {"state_dict": weights, HPARAMS: primitive(dict(model.hparams))}
    model.on_save_checkpoint(content)
    config = {"library": "brainet_pl", VERSION: "2.6.0", HPARAMS: content[HPARAMS], STORED: content[STORED]}
    card = model_card(model, None if run is None else read_record(Path(run)))
    with atomic_folder(place, (WEIGHTS, CONFIG, CARD)) as made:
        save_file(weights, str(made / WEIGHTS))
        (made / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (made / CARD).write_text(card, encoding="utf-8")
    return place


def push_to_hub(
    model: BRAINet, repo_id: str, run: str | Path | None = None, *, private: bool = True, **api: Any
) -> str:
    """Upload what `save_pretrained` writes to a hub of models; the address of the commit.

    Others read it by `from_pretrained(repo_id)`.

    Args:
        model: with its head.
        repo_id: `owner/name`; it is made where it is not there.
        run: the folder of a run that was tested, whose numbers the card then has.
        private: whether a new one is for its owner alone.
        **api: arguments of `huggingface_hub.HfApi`, such as `token` and `endpoint`.
    """
    hub = _huggingface_hub().HfApi(**api)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_pretrained(model, scratch, run)
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=folder).commit_url)


def from_pretrained(source: str | Path, hub: Mapping[str, Any] | None = None, **given: Any) -> BRAINet:
    """The model that `save_pretrained` wrote, ready to predict; digests of weights and settings are checked.

    Args:
        source: a folder on this machine or, where there is none of that name, `owner/name` on a hub of models, of which
            only the tensors, the settings and the card are downloaded.
        hub: arguments of `huggingface_hub.snapshot_download`, such as `revision`, `token` and `endpoint`.
        **given: arguments of `BRAINet` to use instead of the stored ones, such as a backbone of your own.
    """
    from safetensors.torch import load_file

    place = Path(source)
    if not place.is_dir() and re.fullmatch(REPOSITORY, str(source)):
        place = _download(str(source), hub or {})
    for name in (WEIGHTS, CONFIG):
        if not (place / name).is_file():
            raise FileNotFoundError(f"expected {name} in {place}, found none: give what save_pretrained wrote")
    try:
        config = json.loads((place / CONFIG).read_text(encoding="utf-8"))
        tensors = sorted(load_file(str(place / WEIGHTS)).items())
        weights = {name: tensor.clone() for name, tensor in tensors}  # views of one buffer can't be saved below
        content = {"state_dict": weights, "epoch": 0, "global_step": 0}
        content |= {name: config[name] for name in (VERSION, HPARAMS, STORED)}
    except Exception as error:  # of a damaged or foreign file, any error may come
        raise ValueError(
            f"expected what save_pretrained writes in {place}, got something else ({error!r}): take another copy"
        ) from error
    with tempfile.TemporaryDirectory() as scratch:  # the one road that checks a model's file
        path = Path(scratch) / "model.ckpt"
        torch.save(content, path)
        model: BRAINet = BRAINet.load_from_checkpoint(path, map_location="cpu", **given)
    return model.eval()


def _huggingface_hub() -> Any:
    """The package `huggingface_hub`, or an error that says how to install it."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("a hub needs the package huggingface_hub: pip install 'brainet_pl[hub]'") from error
    return huggingface_hub


def _download(repo_id: str, arguments: Mapping[str, Any]) -> Path:
    """Files of a model on a hub, in the cache of huggingface_hub; nothing else of the repository is fetched."""
    try:
        folder = _huggingface_hub().snapshot_download(repo_id, allow_patterns=[WEIGHTS, CONFIG, CARD], **arguments)
    except OSError as error:
        raise FileNotFoundError(
            f"expected a folder or a model of a hub, got {repo_id!r}: there is no such folder here, and the hub said: "
            f"{error}"
        ) from error
    return Path(folder)


def model_card(model: BRAINet, record: Record | None = None) -> str:
    """A page in Markdown about a model: what it does, what was measured, and what it was not made for."""
    predictor = model.predictor
    head: Head = predictor.require_head()
    names = model.class_names
    about = {
        "task": type(predictor.task).__name__.lower(),
        "classes": None if names is None else ", ".join(names),
        "head": f"{type(head).__name__}, {head.num_params:,} parameters",
        "backbone": "none, it reads its inputs" if predictor.backbone.raw else type(predictor.backbone.model).__name__,
        "passes": predictor.num_passes,
        "calibration": None if predictor.calibration is None else type(predictor.calibration).__name__,
        "unknown inputs": None if predictor.expected is None else str(predictor.expected),
    }
    lines = ["---", "library_name: brainet_pl", "tags: [uncertainty, calibration, out-of-distribution]", "---", ""]
    lines += ["# A BRAINet", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in about.items() if value is not None]
    if record is not None:
        known = ", ".join(f"{one.samples:,} of {one.name} ({one.role})" for one in record.sets)
        lines += ["", "## Measured", "", f"On {_cell(known)}.", "", "| | measure | value |", "|---|---|---|"]
        found = [one for one in record.metrics if one.value is not None]
        lines += [f"| `{_cell(one.key)}` | {_cell(one.title)} | {one.value:.4g} |" for one in found]
    lines += [
        "",
        "## Limits",
        "",
        "Probabilities are calibrated on data like the validation data of the fit; on others they may be too sure.",
        "`known_p` is a p-value: of inputs like the validation data at most a share α has a value of at most α. That",
        "an input counts as known does not say that its prediction is right.",
        "",
        "## Use",
        "",
        "    from brainet_pl.lightning.pretrained import from_pretrained",
        '    model = from_pretrained("owner/name")  # of this page, or a folder with its files',
        "",
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """A value in a cell of a table: names come from data, and must not end the cell or begin another thing."""
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())
