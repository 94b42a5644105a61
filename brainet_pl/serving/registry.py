"""The folder of an exported model in the registry of Weights & Biases: no code is stored, nothing is pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brainet_pl.serving.folder import read_about


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
