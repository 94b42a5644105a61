"""FSDP2 by Lightning's `ModelParallelStrategy`: a model whose head is learned while its backbone is sharded already.

Lightning shards a model after `setup` and loads checkpoints after that. A head must be known before. So in `setup` the
backbone is sharded first, and all processes extract features with it together; the head of a checkpoint is built from
what the checkpoint says of it, and its weights come later, to each process its share.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from brainet_pl._utils.framework import pl
from brainet_pl.prediction.predictor import Predictor
from brainet_pl.storage.sharded import STATES, WEIGHTS, Place, numbered, read_parts, room

# What computes with weights beside `forward`. Inner calls need none of it: the head stays whole after a pass.
METHODS = (
    "passes", "penalty", "finalize", "simultaneous", "stochastic", "enumerate", "at", "on_choices",
    "train_on",
)  # fmt: skip


LISTS = nn.Sequential, nn.ModuleList, nn.ModuleDict
LEAST_BLOCK = 0.02  # of the weights of a network: smaller parts of it are no message of their own


def is_model_parallel(trainer: pl.Trainer) -> bool:
    """Whether the strategy is the one that shards by `configure_model`."""
    return _is_of_lightning(trainer.strategy, "ModelParallelStrategy")


def _is_of_lightning(strategy: Any, *names: str) -> bool:
    """Whether a strategy is one of Lightning's of these names, in either of its packages, or derived from one."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in names and kind.__module__.partition(".")[0] in ("pytorch_lightning", "lightning"):
            return True
    return False


def refuse_sharding(trainer: pl.Trainer) -> None:
    """Refuse strategies that wrap a model on their own, and ways to split single layers."""
    name = type(trainer.strategy).__name__
    if _is_of_lightning(trainer.strategy, "FSDPStrategy", "DeepSpeedStrategy"):
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
    shard_network(predictor.backbone, mesh)
    head = predictor.require_head()
    if _waits(head):
        # Whole after a pass: it is run by several methods, one inside another.
        fully_shard(head, mesh=mesh, reshard_after_forward=False, shard_placement_fn=_longest)
        for name in METHODS:
            if hasattr(head, name):
                register_fsdp_forward_method(head, name)


def shard_network(network: nn.Module, mesh: Any) -> None:
    """Spread the weights of a network over the processes of a mesh, once; a pass gathers a block at a time."""
    if _waits(network):
        for part in (*blocks(network), network):
            fully_shard(part, mesh=mesh, reshard_after_forward=True, shard_placement_fn=_longest)


def _waits(part: nn.Module) -> bool:
    return not isinstance(part, FSDPModule) and next(part.parameters(), None) is not None


def blocks(network: nn.Module) -> list[nn.Module]:
    """The parts of a network that are gathered one after another: what its lists of layers hold.

    Parts whose weights are used elsewhere too, and small ones, are left to the whole.

    >>> blocks(nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(9, 9), nn.ReLU()), nn.PReLU()))
    [Linear(in_features=9, out_features=9, bias=True), Linear(in_features=9, out_features=9, bias=True)]
    """
    least = LEAST_BLOCK * sum(p.numel() for p in network.parameters())
    uses = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for part in module.children():
            inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
            listed = isinstance(module, LISTS) and not isinstance(part, LISTS)
            alone = all(uses[key] == count for key, count in inside.items())
            if listed and alone and sum(p.numel() for p in part.parameters()) >= max(least, 1):
                found.append(part)
            else:
                look(part)

    look(network)
    return found


def _longest(parameter: nn.Parameter) -> Shard | None:
    """The dimension that is split: the weights of a tree are one row, of which one process would get all."""
    sizes = list(parameter.shape)
    return Shard(sizes.index(max(sizes))) if sizes else None


def configure_early(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Let a module of the user's build and shard itself, as Lightning does later on, and fill what it left empty."""
    with trainer.strategy.tensor_init_context(), trainer.strategy.model_sharded_context():
        module.configure_model()
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to_empty(device=trainer.strategy.root_device)
        for part in module.modules():
            reset: Any = getattr(part, "reset_parameters", lambda: None)
            reset()


def broadcast_buffers(*parts: nn.Module | None) -> None:
    """Give all processes the buffers of the first, as DDP does: FSDP2 leaves statistics of batch norm apart."""
    for part in parts:
        for buffer in part.buffers() if part is not None else ():
            torch.distributed.broadcast(buffer.data, src=0)


def broadcast_trained_buffers(predictor: Predictor) -> None:
    """Give all processes the buffers of the first that training changes."""
    broadcast_buffers(predictor.head, predictor.task, None if predictor.backbone.frozen else predictor.backbone)


def load_shares_of_checkpoints(trainer: pl.Trainer) -> None:
    """Have the strategy load checkpoints by `load_shares`.

    Lightning's way takes the numbers of an optimizer's states for places among all parameters of the module, where a
    file of any other strategy counts within the optimizer's groups; and it unpickles what a file says.
    """
    if is_model_parallel(trainer):
        trainer.strategy.load_checkpoint = partial(load_shares, trainer.strategy)  # type: ignore[method-assign]


def load_shares(strategy: Any, path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Give a sharded module and its optimizers their shares of a checkpoint, a file or a folder; gives its content."""
    module, own = strategy.model, strategy.model.state_dict()

    def mine(place: Place, entry: Any) -> Tensor:
        like = own.get(place[1] if place[0] == WEIGHTS else place[2])
        if not isinstance(like, DTensor) or like.shape != entry.size:
            return room(place, entry)
        return torch.empty_like(like, dtype=entry.properties.dtype)

    content = read_parts(strategy.broadcast(path), mine)
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
    if isinstance(value, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # each has read it
