"""FSDP2 by Lightning's `ModelParallelStrategy`: a model whose head is known before it is sharded.

Lightning shards a model after `setup` and loads checkpoints after that. So the head of a checkpoint is built, and its
weights are loaded, in `setup`, and then each process keeps its share.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from brainet_pl._utils.framework import pl
from brainet_pl.checkpoints.sharded import STATES, WEIGHTS, numbered, read_whole
from brainet_pl.model.predictor import Predictor

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


def broadcast_buffers(*parts: nn.Module | None) -> None:
    """Give all processes the buffers of the first, as DDP does: FSDP2 leaves statistics of batch norm apart."""
    for part in parts:
        for buffer in part.buffers() if part is not None else ():
            torch.distributed.broadcast(buffer.data, src=0)


def broadcast_trained_buffers(predictor: Predictor) -> None:
    """Give all processes the buffers of the first that training changes."""
    broadcast_buffers(predictor.head, predictor.task, None if predictor.backbone.frozen else predictor.backbone)


def load_whole_checkpoints(trainer: pl.Trainer) -> None:
    """Have the strategy load checkpoints by `load_shares`.

    Lightning's way takes the numbers of an optimizer's states for places among all parameters of the module, where a
    file of any other strategy counts within the optimizer's groups; and it unpickles what a file says.
    """
    if is_model_parallel(trainer):
        trainer.strategy.load_checkpoint = partial(load_shares, trainer.strategy)  # type: ignore[method-assign]


def load_shares(strategy: Any, path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Give a sharded module and its optimizers their shares of a checkpoint, a file or a folder; gives its content."""
    content = read_whole(strategy.broadcast(path))
    module, own = strategy.model, strategy.model.state_dict()
    weights = {key: share(value, own.get(key)) for key, value in content[WEIGHTS].items()}
    module.load_state_dict(weights, strict=strategy.lightning_module.strict_loading)
    for optimizer, state in zip(strategy.optimizers, content.get(STATES, ()), strict=False):
        state, parameters = numbered(state), [p for group in optimizer.param_groups for p in group["params"]]
        shares = {n: {k: share(v, parameters[n]) for k, v in values.items()} for n, values in state["state"].items()}
        optimizer.load_state_dict({**state, "state": shares})
    return content


def share(value: Any, like: Tensor | None) -> Any:
    """This process's share of a whole tensor, where another of its shape is shared; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
