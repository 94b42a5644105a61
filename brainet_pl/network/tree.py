"""`BRAINetHead`: a tree of structures as one module, and its settings, `Tree`.

training       sub-networks drawn for each sample so that all branches take part, or one for each batch (the paper)
simultaneous   one pass; each node averages its branches with their probabilities
stochastic     T sub-networks drawn from the posterior; equal draws are computed once
enumerated     every sub-network, with its exact posterior weight
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from brainet_pl import checks
from brainet_pl.network.base import MOST_PARAMS, MOST_PASSES, Head, HeadSettings, Norm, Outputs, check_sizes, need_tree
from brainet_pl.network.executor import ACTIVATIONS, Executor
from brainet_pl.network.plan import build_plan
from brainet_pl.network.widths import count_parameters, solve_width
from brainet_pl.structure.ggt import GGT, SubNetwork

Sampling = Literal["batch", "sample"]
Inference = Literal["stochastic", "simultaneous", "enumerated"]


class Draws(NamedTuple):
    """Logits (T, B, C) and the sub-network behind each of the T."""

    logits: Tensor
    subnetworks: list[SubNetwork]


class Enumerated(NamedTuple):
    """Logits (M, B, C) of all M sub-networks, and their posterior probabilities (M,)."""

    logits: Tensor
    weights: Tensor


class BRAINetHead(Head):
    """A head for `ggt.num_variables` features and `out_features` outputs.

    Args:
        ggt: the learned tree.
        out_features: classes, or numbers to regress.
        num_params: a budget; the widths of all layers are scaled to meet it within 2 %.
        width: or the width factor itself: a node over X emits round(width·|X|) neurons. 1 if neither is given.
        min_width: neurons that every layer has at the least.
        activation: one of relu, gelu, silu, tanh, elu.
        norm: "batch", or None for a bias instead.
        dropout: of the outputs of nodes; with it, `stochastic` also draws dropout masks (BRAINet + MC-dropout).
        temperature: of the posterior over sub-networks in the simultaneous, stochastic and enumerated modes; "auto" is
            `GGT.auto_temperature`. It can be changed at any time; training does not depend on it.
        sampling: while training, draw sub-networks for each batch (the paper) or for each sample.
        draws: sub-networks that a training step draws for each batch or sample; 1 is the paper, None as many as it
            takes for each branch of the root to be in one. Each branch of a node is in equally many of its draws.
        inference: what `passes` does: "stochastic", "simultaneous" or "enumerated". It can be changed at any time.
        momentum: of the running statistics of the norm.
        eps: added to variances by the norm.
    """

    ggt: GGT

    def __init__(
        self,
        ggt: GGT,
        out_features: int,
        *,
        num_params: int | None = None,
        width: float | None = None,
        min_width: int = 1,
        activation: str = "relu",
        norm: Norm = "batch",
        dropout: float = 0.0,
        temperature: float | Literal["auto"] = "auto",
        sampling: Sampling = "sample",
        draws: int | None = None,
        inference: Inference = "stochastic",
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        checks.one_of("norm", norm, ("batch", None))
        checks.one_of("sampling", sampling, get_args(Sampling))
        if num_params is not None and width is not None:
            raise ValueError("expected num_params or width, got both: leave one out")
        self.ggt = ggt
        self.in_features, self.out_features = check_sizes(ggt.num_variables, out_features)
        self.dropout, self.sampling = checks.share("dropout", dropout), sampling
        min_width = checks.whole("min_width", min_width, 1, 10**6)
        width = checks.number_or_none("width", width, 0, "it is the number of neurons for each variable of a node")
        if num_params is not None:
            num_params = checks.whole("num_params", num_params, 1, MOST_PARAMS)
            width = solve_width(ggt, num_params, out_features, min_width, 2 if norm else 1)
        self.plan = build_plan(ggt, 1.0 if width is None else width, min_width)
        self.layers = Executor(self.plan, activation=activation, norm=norm, momentum=momentum, eps=eps)
        self.output = nn.Linear(len(self.plan.root_rows), out_features)
        self.draws = self._count_draws(draws)
        self.reset_parameters()
        self.temperature = temperature
        self.inference = inference

    def reset_parameters(self) -> None:
        """Draw all weights anew, each layer as `nn.Linear` would."""
        self.layers.reset_parameters()
        self.output.reset_parameters()

    def _count_draws(self, draws: int | None) -> int:
        """A number of draws that the tree can give."""
        branches: list[int] = [level.num_branches for level in self.layers.ordered]
        most = math.prod(branches)
        if draws is None:
            return branches[-1] if branches else 1
        return min(most, checks.whole("draws", draws, 1, MOST_PASSES))

    @property
    def temperature(self) -> float:
        """γ of the posterior over sub-networks."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Literal["auto"]) -> None:
        hint = "0 is the best structure alone, 'auto' the tempered default"
        given = self.ggt.auto_temperature if value == "auto" else checks.at_least("temperature", value, 0, hint)
        self._temperature = given
        self.layers.set_mixture(self.ggt.branch_probabilities(self._temperature))

    @property
    def inference(self) -> Inference:
        """What `passes` does."""
        return self._inference

    @inference.setter
    def inference(self, value: Inference) -> None:
        checks.one_of("inference", value, get_args(Inference))
        self._inference = value

    @property
    def perplexity(self) -> float:
        """Effective number of sub-networks at the current temperature; 1 means that the posterior has collapsed."""
        return self.ggt.perplexity(self.temperature)

    def facts(self) -> dict[str, Any]:
        """Temperature, perplexity and inference."""
        return {"temperature": self.temperature, "perplexity": self.perplexity, "inference": self.inference}

    def extra_repr(self) -> str:
        """For `print(head)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_params={self.num_params:,}, "
            f"sub-networks={self.ggt.num_subnetworks:,}, depth={self.ggt.depth}, temperature={self.temperature:.4g}"
        )

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """(B, d) → (B, C), the simultaneous pass; while training (M, B, C) of M drawn sub-networks, (B, C) for M = 1.

        M is `draws`, or the head's own number.
        """
        if not self.training:
            return self.simultaneous(x)
        count = self.draws if draws is None else self._count_draws(draws)
        return self.train_on(x, self.layers.draw(count, len(x) if self.sampling == "sample" else 1, generator))

    def train_on(self, x: Tensor, choices: Sequence[Tensor]) -> Tensor:
        """`forward` while training with random `choices` made before, as `layers.draw` makes them."""
        outputs = self._emit(self.layers.run_train(x, choices, self.dropout).squeeze(0))
        return outputs if len(outputs) == len(x) else outputs.view(-1, len(x), self.out_features)

    def passes(self, x: Tensor, count: int) -> Outputs:
        """(B, d) → (T, B, C) as `inference` says, and the exact weights of enumerated sub-networks."""
        if self.inference == "stochastic":
            return Outputs(self.stochastic(x, count).logits)
        if self.inference == "enumerated":
            return Outputs(*self.enumerate(x))
        return Outputs(self.simultaneous(x).unsqueeze(0))

    def simultaneous(self, x: Tensor) -> Tensor:
        """(B, d) → (B, C): every node passes on the mean of its branches, weighted by their probabilities."""
        return self._emit(self.layers.run_evaluate(x).squeeze(0))

    def stochastic(
        self,
        x: Tensor,
        passes: int = 15,
        *,
        temperature: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Draws:
        """(B, d) → (T, B, C): sub-networks drawn exactly from their posterior.

        `temperature` None is the head's own. The same generator state gives the same draws.
        """
        passes = checks.whole("passes", passes, 1, MOST_PASSES)
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else None))
        drawn = self.ggt.sample(passes, self.temperature if temperature is None else temperature, seed)
        if self.dropout:
            return Draws(self._emit(self.layers.run_draws(x, drawn, self.dropout, generator)), drawn)
        order = {subnetwork: i for i, subnetwork in enumerate(dict.fromkeys(drawn))}
        logits = self._emit(self.layers.run_draws(x, list(order), 0.0, generator))
        if len(order) == len(drawn):
            return Draws(logits, drawn)
        return Draws(logits[[order[subnetwork] for subnetwork in drawn]], drawn)

    def enumerate(self, x: Tensor, limit: int = 1024, *, temperature: float | None = None) -> Enumerated:
        """(B, d) → every sub-network's logits and its exact posterior probability; refuses more than `limit`."""
        if self.ggt.num_subnetworks > limit:
            raise ValueError(
                f"expected at most {limit:,} sub-networks to enumerate, got {self.ggt.num_subnetworks:,}: use "
                "stochastic, simultaneous, or a larger limit"
            )
        temperature = self.temperature if temperature is None else temperature
        everything = list(self.ggt.enumerate(limit))
        weights = [math.exp(self.ggt.log_prob(subnetwork, temperature)) for subnetwork in everything]
        parts = [everything[i : i + 64] for i in range(0, len(everything), 64)]
        logits = torch.cat([self._emit(self.layers.run_draws(x, part, 0.0, None)) for part in parts])
        return Enumerated(logits, torch.tensor(weights, device=x.device))

    def _emit(self, root: Tensor) -> Tensor:
        """The root's rows (R, B) or (U, R, B) → outputs (B, C) or (U, B, C)."""
        return torch.as_tensor(self.output(root.transpose(-1, -2)))


class Tree(HeadSettings):
    """A BRAINet: the whole learned tree as one network whose sub-networks are sampled by their posterior.

    Args:
        num_params: budget of parameters that the widths of all layers are scaled to.
        min_width: neurons that every layer has at the least.
        activation: relu, gelu, silu, tanh or elu, after every layer.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
        dropout: of the outputs of nodes; above 0 each stochastic pass also draws a dropout mask.
        sampling: while training, draw sub-networks for each "batch" (the paper) or for each "sample".
        draws: sub-networks that a training step draws for each batch or sample, in balance; 1 is the paper, null as
            many as it takes for each branch of the root to be in one.
        temperature: of the posterior over sub-networks; null is a tempered default that does not collapse.
        inference: "stochastic" draws sub-networks, "simultaneous" averages in one pass, "enumerated" is the exact mean.
    """

    needs_tree: ClassVar[bool] = True

    def __init__(
        self,
        num_params: int = 16_000,
        min_width: int = 1,
        activation: Literal["relu", "gelu", "silu", "tanh", "elu"] = "relu",
        norm: Norm = "batch",
        dropout: float = 0.0,
        sampling: Sampling = "sample",
        draws: int | None = None,
        temperature: float | None = None,
        inference: Inference = "stochastic",
    ) -> None:
        checks.one_of("activation", activation, ACTIVATIONS)
        checks.one_of("norm", norm, ("batch", None))
        checks.one_of("sampling", sampling, get_args(Sampling))
        checks.one_of("inference", inference, get_args(Inference))
        self.num_params = checks.whole("num_params", num_params, 1, MOST_PARAMS)
        self.min_width = checks.whole("min_width", min_width, 1, 10**6)
        self.activation, self.norm, self.sampling, self.inference = activation, norm, sampling, inference
        self.dropout = checks.share("dropout", dropout)
        self.draws = None if draws is None else checks.whole("draws", draws, 1, MOST_PASSES)
        hint = "0 is the best structure alone, null the tempered default"
        self.temperature = None if temperature is None else checks.at_least("temperature", temperature, 0, hint)

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> BRAINetHead:
        """The head of a tree."""
        settings = self.settings() | {"temperature": "auto" if self.temperature is None else self.temperature}
        return BRAINetHead(need_tree(ggt, self), out_features, **settings)


def smallest_budget(ggt: GGT, out_features: int, *, min_width: int = 1, norm: Norm = "batch") -> int:
    """The fewest parameters that a head for this tree can have."""
    return count_parameters(ggt, 0.0, out_features, min_width, 2 if norm else 1)
