"""The folder of an exported model in registries, Weights & Biases and MLflow: no code is stored, nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brainet_pl.serving.folder import ExportedModel, read_about


def register_wandb(folder: str | Path, run: Any, name: str, registry: str | None = "model") -> Any:
    """Log an exported folder as an artifact of a W&B run, and link it to a registry.

    An offline run keeps the artifact for `wandb sync`; it can't be linked from there, and that is an error after the
    artifact was logged: give None, and link it once it is synced.

    Args:
        folder: what `export_folder` wrote.
        run: what `wandb.init` gave.
        name: of the artifact, and of the collection in the registry.
        registry: the name of the registry; None logs the artifact alone.
    """
    import wandb

    about = read_about(Path(folder))
    facts = {key: about[key] for key in ("brainet_pl", "sha256", "task", "class_names", "verdict")}
    artifact = wandb.Artifact(name, type="model", metadata=facts)
    artifact.add_dir(str(folder))
    run.log_artifact(artifact)
    if registry is not None:
        try:
            run.link_artifact(artifact, f"wandb-registry-{registry}/{name}")
        except NotImplementedError as error:
            raise ValueError(
                f"expected an online run to link {name} to the registry {registry}, got an offline one: sync it, and "
                "link the artifact then, or give registry=None"
            ) from error
    return artifact


def save_mlflow(folder: str | Path, path: str | Path) -> Path:
    """Write an exported folder as a model of MLflow, `mlflow.pyfunc.load_model(path)`, that needs no torch.

    Its `predict` takes a table of pandas, an array (B, …) or arrays by name, and gives a list of answers.

    Args:
        folder: what `export_folder` wrote.
        path: a folder that is not there yet.
    """
    try:
        from mlflow import pyfunc
    except ImportError as error:
        raise ImportError(
            f"MLflow models need more packages ({error.name}): pip install 'brainet_pl[mlflow]'"
        ) from error
    about = read_about(Path(folder))
    needed = [f"brainet_pl=={about['brainet_pl']}", "onnxruntime"]
    pyfunc.save_model(str(path), loader_module=__name__, data_path=str(folder), pip_requirements=needed)
    return Path(path)


def _load_pyfunc(path: str) -> MlflowModel:
    """What MLflow calls with the folder that `save_mlflow` was given."""
    return MlflowModel(ExportedModel(path))


class MlflowModel:
    """An exported model as MLflow wants it."""

    def __init__(self, model: ExportedModel) -> None:
        self.model = model

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Rows of a table, or inputs, → the answers that `brainet serve` gives."""
        model = self.model
        if hasattr(data, "to_dict") and model.features is not None:
            return model.as_answers(model.predict_rows(data.to_dict("records")))
        inputs = data if isinstance(data, Mapping) else np.asarray(data)
        return model.as_answers(model.predict(inputs))
