"""FSDP2 by Lightning's `ModelParallelStrategy`: a model whose head is known before it is sharded.

Lightning shards a model after `setup` and loads checkpoints after that. So the head of a checkpoint is built, and its
weights are loaded, in `setup`, and then each process keeps its share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from brainet_pl._utils.framework import pl
from brainet_pl._utils.tensor_file import read_tensors
from brainet_pl.checkpoints.format import META
from brainet_pl.model.predictor import Predictor

WEIGHTS = "state_dict"
# What computes with weights beside `forward`. Inner calls need none of it: the head stays whole after a pass.
METHODS = (
    "passes", "output_variance", "penalty", "finalize", "simultaneous", "stochastic", "enumerate", "at", "on_choices",
    "train_on",
)  # fmt: skip


def is_model_parallel(trainer: pl.Trainer) -> bool:
    """Whether the strategy is the one that shards by `configure_model`."""
    return type(trainer.strategy).__name__ == "ModelParallelStrategy"


def refuse_sharding(trainer: pl.Trainer) -> None:
    """Refuse strategies that wrap a model on their own, and ways to split single layers."""
    name = type(trainer.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy"):
        raise RuntimeError(
            f"expected the strategies auto, ddp or ModelParallelStrategy (FSDP2), got {name}: it wraps the model "
            "before a checkpoint says which head it has; give "
            "Trainer(strategy=ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)), which shards "
            "backbone and head as well"
        )
    mesh = getattr(trainer.strategy, "_device_mesh", None)
    if is_model_parallel(trainer) and mesh is not None and mesh["tensor_parallel"].size() > 1:
        raise RuntimeError(
            f"expected tensor_parallel_size=1, got {mesh['tensor_parallel'].size()}: a head is not split by layers; "
            "give all processes to data_parallel_size"
        )


def shard(predictor: Predictor, mesh: Any) -> None:
    """Spread the weights of backbone and head over the processes of a mesh, once."""
    for part in (predictor.backbone, predictor.require_head()):
        if isinstance(part, FSDPModule) or next(part.parameters(), None) is None:
            continue
        whole = part is predictor.head  # it is run by several methods, one inside another
        fully_shard(part, mesh=mesh, reshard_after_forward=not whole, shard_placement_fn=_longest)
        for name in METHODS if whole else ():
            if hasattr(part, name):
                register_fsdp_forward_method(part, name)


def _longest(parameter: nn.Parameter) -> Shard | None:
    """The dimension that is split: the weights of a tree are one row, of which one process would get all."""
    sizes = list(parameter.shape)
    return Shard(sizes.index(max(sizes))) if sizes else None


def broadcast_buffers(predictor: Predictor) -> None:
    """Give all processes the buffers of the first, as DDP does: FSDP2 leaves statistics of batch norm apart."""
    parts = [predictor.head, predictor.task, None if predictor.backbone.frozen else predictor.backbone]
    for part in parts:
        for buffer in part.buffers() if part is not None else ():
            torch.distributed.broadcast(buffer.data, src=0)


def read_whole(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint, a file or a sharded folder, with whole weights; optimizers are left in a folder."""
    path = Path(path)
    if path.is_file():
        content: dict[str, Any] = read_tensors(path)
        return content
    content = read_tensors(path / META)
    reader = FileSystemReader(path)
    found = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(f"{WEIGHTS}.") and isinstance(entry, TensorStorageMetadata):
            found[key.removeprefix(f"{WEIGHTS}.")] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load({WEIGHTS: found}, storage_reader=reader, no_dist=True)
    return {**content, WEIGHTS: found}
