"""`BRAINetHead`: a tree of structures as one module.

training       sub-networks drawn for each sample so that all branches take part, or one for each batch (the paper)
simultaneous   one pass; each node averages its branches with their probabilities
stochastic     T sub-networks drawn from the posterior; equal draws are computed once
enumerated     every sub-network, with its exact posterior weight

The branches of the root are whole networks, each with an output layer of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PARAMS, MOST_PASSES, NLL, HeadInputs, Norm, Outputs, ResidualHead
from brainet_pl.network.executor import Executor
from brainet_pl.network.finalization import NETWORKS, best_value, choose_temperature
from brainet_pl.network.output import SKIPS, BranchOutput, Skip, SkipKind
from brainet_pl.network.plan import build_plan
from brainet_pl.network.widths import READS, Size, choose_size, fields_of, root_branches
from brainet_pl.structure.brai import NEIGHBOURS
from brainet_pl.structure.ggt import GGT, SubNetwork

Sampling = Literal["batch", "sample"]
Inference = Literal["auto", "stochastic", "simultaneous", "enumerated"]
# Of the initial weights under a norm, to which their size means nothing, but smaller ones turn faster. Layers of a tree
# read few rows, so the weights of `nn.Linear` are large; a fifth of them trained better on all kinds of features.
GAIN = 0.2
ALL_ONE = 1.001  # perplexity up to which sub-networks are one: the others have a thousandth of the posterior together
MOST_OUTPUTS = 2 * 10**7  # numbers that are held at once while something is chosen


class Draws(NamedTuple):
    """Logits (T, B, C) and the sub-network behind each of the T."""

    logits: Tensor
    subnetworks: list[SubNetwork]


class Enumerated(NamedTuple):
    """Logits (M, B, C) of all M sub-networks, and their posterior probabilities (M,)."""

    logits: Tensor
    weights: Tensor


class BRAINetHead(ResidualHead):
    """A head for `ggt.num_variables` features and `out_features` outputs.

    >>> from brainet_pl.structure import learn_structure
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 6).cumsum(1)
    >>> head = BRAINetHead(learn_structure(x, progress=False), out_features=3, num_params=2000).eval()
    >>> head(x[:4]).shape, head.passes(x[:4], 15).values.shape  # their mean in one pass; each of four structures
    (torch.Size([4, 3]), torch.Size([4, 4, 3]))

    All arguments that are not listed here are settings of `Tree`, which describes them; None stands for null.

    Args:
        ggt: The learned tree.
        out_features: The number of classes, or of numbers to regress.
        num_params: A budget; the widths of all layers are scaled to meet it within 2 %. None is "auto" in `Tree`.
        width: The width factor itself, in place of a budget: a node over X emits round(width·|X|) neurons.
        temperature: The temperature of the posterior over sub-networks in all modes but training. "auto" is what
            `finalize` finds best, and until then `GGT.auto_temperature`. It can be changed at any time.
        inference: What `passes` does, as in `Tree`. It can be changed at any time.
        momentum: The momentum of the running statistics of the norm.
        eps: The number that the norm adds to variances.
    """

    ggt: GGT
    finalizes: ClassVar[bool] = True

    def __init__(
        self,
        ggt: GGT,
        out_features: int,
        *,
        num_params: int | None = None,
        width: float | None = None,
        min_width: int | None = None,
        activation: str = "relu",
        norm: Norm = "batch",
        dropout: float = 0.0,
        temperature: float | Literal["auto"] = "auto",
        sampling: Sampling = "sample",
        draws: int | None = None,
        inference: Inference = "auto",
        fields: int | Literal["auto"] | None = "auto",
        skip: SkipKind | None = "auto",
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        base.check_norm(norm)
        checks.one_of("sampling", sampling, get_args(Sampling))
        if num_params is not None and width is not None:
            raise ValueError("expected num_params or width, got both: leave one out")
        self.in_features, self.out_features = base.check_sizes(ggt.num_variables, out_features)
        self.dropout, self.sampling = checks.share("dropout", dropout), sampling
        checks.one_of("skip", skip, SKIPS)
        least = checks.whole_or_none("min_width", min_width, 1, "None is what the budget allows", 10**6)
        num_params = checks.whole_or_none("num_params", num_params, 1, "None is what the tree needs", MOST_PARAMS)
        width = checks.number_or_none("width", width, 0, "it is the number of neurons for each variable of a node")
        direct = None if skip in ("auto", "base_logits_or_linear") else skip == "linear"
        reads = fields_of(ggt, READS if fields == "auto" else check_fields(fields))
        if width is None:
            size = choose_size(
                ggt,
                num_params,
                out_features,
                min_width=least,
                per_neuron=2 if norm else 1,
                skip=direct,
                fields=reads,
                wanted=fields == "auto",
            )
        else:
            size = Size(ggt, width, least or 1, direct is not False, reads)
        self.ggt = size.ggt
        self._num_subnetworks = self.ggt.num_subnetworks  # a compiled graph can't enter the lock of a cached property
        self.plan = build_plan(size.ggt, size.factor, size.min_width, fields=size.fields)
        gain = GAIN if norm else 1.0
        self.layers = Executor(self.plan, activation=activation, norm=norm, momentum=momentum, eps=eps, gain=gain)
        self.output = BranchOutput(root_branches(self.ggt), len(self.plan.root_rows), out_features)
        self.skip = Skip(self.in_features, out_features, norm, momentum, eps) if size.skip else None
        self.adds_base_logits = skip == "base_logits"
        self.draws = count_draws(draws, self.layers)
        self.prediction_dropout = self.dropout  # of stochastic passes: that of training, or 0
        self._statistics_at: float | None = None  # the temperature that the statistics of the simultaneous mode are for
        self.reset_parameters()
        self.temperature = temperature
        self.inference = inference
        self.held: list[SubNetwork] | None = None

    def reset_parameters(self) -> None:
        """Draw all weights anew, each layer as `nn.Linear` would.

        The output layer starts at zero where something goes past the tree: the head then begins as a linear layer, or
        as the network's own, and its structures add what that leaves. Without, features that a linear layer can hardly
        be beaten on were fitted too closely before that layer had learned.
        """
        self._statistics_at = None
        self.layers.reset_parameters()
        self.output.reset_parameters()
        if self.skip is not None:
            self.skip.reset_parameters()
        if self.skip is not None or self.adds_base_logits:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    @property
    def temperature(self) -> float:
        """γ of the posterior over sub-networks."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Literal["auto"]) -> None:
        hint = "0 is the best structure alone, 'auto' the tempered default"
        self._fixed = value != "auto"
        self._take(self.ggt.auto_temperature if value == "auto" else checks.at_least("temperature", value, 0, hint))

    def _take(self, temperature: float) -> None:
        self._temperature = temperature
        self._all_one = self.ggt.perplexity(temperature) < ALL_ONE
        self.layers.set_mixture(self.ggt.branch_probabilities(temperature))
        self.layers.use_mixed(self._statistics_at == temperature)

    def get_extra_state(self) -> Tensor:
        """What `finalize` chose, in 64 bits whatever the weights are in: it travels in the state dict."""
        chosen = self._temperature, self._fixed, self.prediction_dropout, self._statistics_at
        return torch.tensor([-1.0 if value is None else float(value) for value in chosen], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take what `finalize` chose; a temperature that this head was given stays."""
        temperature, fixed, dropout, at = state.tolist()
        self._statistics_at = None if at < 0 else at
        self.prediction_dropout = dropout
        self._fixed = self._fixed or bool(fixed)
        self._take(self._temperature if self._fixed and not fixed else temperature)

    @property
    def inference(self) -> Inference:
        """What `passes` does: "stochastic", "simultaneous" or "enumerated"."""
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
        """Temperature, perplexity, inference, and the dropout of predictions where there is one."""
        facts = {"temperature": self.temperature, "perplexity": self.perplexity, "inference": self.inference}
        return facts | _chosen(self)

    # -- what needs no training -------------------------------------------------------------------------------------

    @property
    def needs_validation_data(self) -> bool:
        """True unless a temperature was given, or there is a single sub-network."""
        return not self._fixed and self.ggt.num_subnetworks > 1

    @torch.no_grad()
    def finalize(self, seen: HeadInputs, held: HeadInputs | None, nll: NLL, passes: int = 15) -> dict[str, float]:
        """The temperature and the dropout that predict `held` best; statistics of the simultaneous mode from `seen`.

        A temperature that was given stays. What is usual stays too where nothing else is better by a standard error:
        `GGT.auto_temperature`, and the dropout of training.
        """
        training = self.training
        self.eval()
        try:
            if held is not None and self.needs_validation_data:
                self._take(_best_temperature(self, held, nll))
            if held is not None and self.dropout:
                self.prediction_dropout = _best_dropout(self, held, nll, passes)
            self.layers.set_mixed_statistics(seen.x)
            self._statistics_at = self._temperature
        finally:
            self.train(training)
        return _chosen(self)

    def extra_repr(self) -> str:
        """Says what `print(head)` shows of it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_params={self.num_params:,}, "
            f"sub-networks={self.ggt.num_subnetworks:,}, depth={self.ggt.depth}, temperature={self.temperature:.4g}"
        )

    # -- passes -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        generator: torch.Generator | None = None,
        *,
        base_logits: Tensor | None = None,
        draws: int | None = None,
    ) -> Tensor:
        """Maps features (B, d) to (B, C) by the simultaneous pass; while training to (M, B, C) of M drawn sub-networks.

        M is `draws`, or the head's own number.
        """
        if not self.training:
            return self.simultaneous(x, base_logits=base_logits)
        count = self.draws if draws is None else count_draws(draws, self.layers)
        choices = self.layers.draw(count, len(x) if self.sampling == "sample" else 1, generator)
        return self.train_on(x, choices, base_logits=base_logits)

    def train_on(self, x: Tensor, choices: Sequence[Tensor], *, base_logits: Tensor | None = None) -> Tensor:
        """`forward` while training with random `choices` made before, as `layers.draw` makes them."""
        root = self.layers.run_train(x, choices, self.dropout).squeeze(0)  # (t, R, V·B/t)
        versions = root.shape[0] * root.shape[2] // max(1, len(x))
        branch = self.layers.root_choice(choices)
        if branch is None:  # all branches, one after the other
            outputs = self.output(root).flatten(0, 1)
        else:
            outputs = self.output.each(root[0], branch.expand(versions, len(x)).flatten())
        outputs = outputs.view(versions, len(x), -1)
        return self._add_skip(outputs if versions > 1 else outputs[0], x, base_logits)

    def passes(self, x: Tensor, count: int, *, base_logits: Tensor | None = None) -> Outputs:
        """Maps features (B, d) to (T, B, C) as `inference` says, with the exact weights of enumerated sub-networks."""
        if self.inference == "simultaneous":
            return Outputs(self.simultaneous(x, base_logits=base_logits).unsqueeze(0))
        if self.inference == "enumerated":
            return Outputs(*self.enumerate(x, base_logits=base_logits))
        if self.held is not None:
            return Outputs(self.at(x, self.held, base_logits=base_logits))
        if torch.compiler.is_compiling():
            return self._compiled_passes(x, count, base_logits)
        if self.inference == "auto" and self.averages_one:
            return Outputs(self.at(x, [self.ggt.map()], base_logits=base_logits))
        if self.averages_all(count):
            return Outputs(*self.enumerate(x, base_logits=base_logits))
        return Outputs(self.stochastic(x, count, base_logits=base_logits).logits)

    def _compiled_passes(self, x: Tensor, count: int, base_logits: Tensor | None) -> Outputs:
        """`passes` in one graph that serves all draws: choices and weights are tensors."""
        if self.averages_all(count) and self.layers.only_root_branches:
            weights = self.layers.ordered[-1].mix[:, 0, 0]
            return Outputs(self._add_skip(self.output(self.layers.run_root_branches(x)), x, base_logits), weights)
        choices = self.layers.draw_posterior(checks.whole("passes", count, 1, MOST_PASSES))
        return Outputs(self.on_choices(x, choices, base_logits=base_logits))

    @property
    def averages_one(self) -> bool:
        """Whether one sub-network has all of the posterior, and predictions have no dropout."""
        return self._all_one and not self.prediction_dropout

    def averages_all(self, count: int) -> bool:
        """Whether so many passes are the exact average over all sub-networks."""
        return self.inference == "auto" and not self.prediction_dropout and self._num_subnetworks <= count

    @contextmanager
    def fixed_draws(self, count: int, seed: int) -> Iterator[None]:
        """Within it, passes are the exact average where they would be without, else those held, else drawn once."""
        inference, held = self.inference, self.held
        try:
            if held is None and inference == "auto" and self.averages_one:
                self.hold([self.ggt.map()])
            elif held is None and self.averages_all(count):
                self.inference = "enumerated"
            elif held is None:
                self.hold(self.ggt.sample(count, self.temperature, seed))
            yield
        finally:
            self.inference = inference
            self.hold(held)

    def simultaneous(self, x: Tensor, *, base_logits: Tensor | None = None) -> Tensor:
        """Maps features (B, d) to (B, C): a node passes on the mean of its branches, weighted by their probability."""
        return self._add_skip(self.output.mixed(self.layers.run_evaluate_branches(x)), x, base_logits)

    def stochastic(
        self,
        x: Tensor,
        passes: int = 15,
        *,
        base_logits: Tensor | None = None,
        temperature: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Draws:
        """Maps features (B, d) to (T, B, C) of T sub-networks drawn exactly from their posterior.

        `temperature` None is the head's own. The same generator state gives the same draws.
        """
        passes = checks.whole("passes", passes, 1, MOST_PASSES)
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device if generator else None))
        drawn = self.ggt.sample(passes, self.temperature if temperature is None else temperature, seed)
        return Draws(self.at(x, drawn, generator, base_logits=base_logits), drawn)

    def at(
        self,
        x: Tensor,
        subnetworks: Sequence[SubNetwork],
        generator: torch.Generator | None = None,
        *,
        base_logits: Tensor | None = None,
    ) -> Tensor:
        """Maps features (B, d) to the outputs (T, B, C) of given sub-networks.

        Equal ones are computed once, except for dropout.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.on_choices(x, self.layers.choices(subnetworks), base_logits=base_logits)
        if self.prediction_dropout:
            return self.run_subnetworks(x, list(subnetworks), base_logits, self.prediction_dropout, generator)
        order = {subnetwork: i for i, subnetwork in enumerate(dict.fromkeys(subnetworks))}
        logits = self.run_subnetworks(x, list(order), base_logits)
        return logits if len(order) == len(subnetworks) else logits[[order[drawn] for drawn in subnetworks]]

    def on_choices(self, x: Tensor, choices: Sequence[Tensor], *, base_logits: Tensor | None = None) -> Tensor:
        """Maps features (B, d) to (T, B, C) of sub-networks as tensors of choices.

        They come from `layers.draw_posterior`, or `layers.choices`. One graph serves all of them, so this is what a
        compiler sees: draws can be made before and given to it.
        """
        root = self.layers.run_chosen(x, choices, self.prediction_dropout)
        branch = choices[-1][0, :, 0] if len(choices) else torch.zeros(len(root), dtype=torch.int64, device=x.device)
        return self._add_skip(self.output.of(root, branch), x, base_logits)

    def hold(self, subnetworks: Sequence[SubNetwork] | None) -> None:
        """Have `passes` take these sub-networks each time instead of drawing; None draws again.

        Predictions of the same input are then the same, which an exported graph needs. `ggt.sample` draws some.
        """
        self.held = None if subnetworks is None else list(subnetworks)

    def enumerate(
        self, x: Tensor, limit: int = 1024, *, base_logits: Tensor | None = None, temperature: float | None = None
    ) -> Enumerated:
        """Maps features (B, d) to every sub-network's logits with its posterior; more than `limit` are refused."""
        if self.ggt.num_subnetworks > limit:
            raise ValueError(
                f"expected at most {limit:,} sub-networks to enumerate, got {self.ggt.num_subnetworks:,}: use "
                "stochastic, simultaneous, or a larger limit"
            )
        temperature = self.temperature if temperature is None else temperature
        everything, weights = _posterior(self.ggt, temperature, limit)
        parts = [everything[i : i + 64] for i in range(0, len(everything), 64)]
        logits = torch.cat([self.run_subnetworks(x, part, base_logits) for part in parts])
        return Enumerated(logits, torch.tensor(weights, device=x.device))

    def run_subnetworks(
        self,
        x: Tensor,
        subnetworks: list[SubNetwork],
        base_logits: Tensor | None,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Maps features (B, d) to the outputs (U, B, C) of U sub-networks, equal ones again and again."""
        taken = [dict(self.ggt.path(subnetwork)).get(0, 0) for subnetwork in subnetworks]
        branch = torch.tensor(taken, device=x.device)
        if self.layers.only_root_branches and not dropout:
            every = self.output(self.layers.run_root_branches(x))
            return self._add_skip(every if taken == list(range(len(every))) else every[branch], x, base_logits)
        root = self.layers.run_draws(x, subnetworks, dropout, generator)
        return self._add_skip(self.output.of(root, branch), x, base_logits)

    def _add_skip(self, outputs: Tensor, x: Tensor, base_logits: Tensor | None) -> Tensor:
        """Outputs (B, C) or (U, B, C) of the tree, and what goes past it."""
        if self.skip is not None:
            outputs = outputs + self.skip(x)
        if self.adds_base_logits != (base_logits is not None):
            raise ValueError(
                f"expected {'the outputs of the network' if self.adds_base_logits else 'features alone'}, got "
                f"{'none' if base_logits is None else 'its outputs too'}: this head "
                f"{'was' if self.adds_base_logits else 'was not'} "
                "built to add to them (skip='base_logits')"
            )
        if base_logits is None:
            return outputs
        if base_logits.shape != (x.shape[0], self.out_features):
            raise ValueError(
                f"expected base logits of shape {(x.shape[0], self.out_features)}, got {tuple(base_logits.shape)}: "
                "give those of the same samples and for the same classes, or use skip='linear'"
            )
        return outputs + base_logits.to(outputs.dtype)


@lru_cache(maxsize=64)
def _posterior(ggt: GGT, temperature: float, limit: int) -> tuple[list[SubNetwork], list[float]]:
    """All sub-networks and their probabilities; for few samples finding these took longer than the passes."""
    everything = list(ggt.enumerate(limit))
    return everything, [math.exp(ggt.log_prob(subnetwork, temperature)) for subnetwork in everything]


def check_fields(fields: int | Literal["auto"] | None) -> int | None:
    """A number of neighbours, or none; "auto" is for the tree to say."""
    if fields is None or fields == "auto":
        return None
    hint = '"auto" is what works, None is no layer of fields; a tree knows no more neighbours of a feature'
    if isinstance(fields, str):
        checks.one_of("fields", fields, ("auto", None), f"or a number of neighbours up to {NEIGHBOURS}")
    return checks.whole("fields", fields, 1, NEIGHBOURS, hint=hint)


def count_draws(draws: int | None, layers: Executor) -> int:
    """A number of draws that a tree can give; None is one for each branch of its root."""
    branches: list[int] = [level.num_branches for level in layers.ordered]
    if draws is None:
        return branches[-1] if branches else 1
    return min(math.prod(branches), checks.whole("draws", draws, 1, MOST_PASSES))


def _chosen(head: BRAINetHead) -> dict[str, float]:
    """What `finalize` can choose, by name."""
    chosen = {"temperature": head.temperature, "perplexity": head.perplexity}
    return chosen | ({"dropout": head.prediction_dropout} if head.dropout else {})


def _best_temperature(head: BRAINetHead, held: HeadInputs, nll: NLL) -> float:
    held = held.first(MOST_OUTPUTS // (NETWORKS * head.out_features))

    def outputs(subnetworks: list[SubNetwork]) -> Tensor:
        parts = [subnetworks[i : i + 16] for i in range(0, len(subnetworks), 16)]
        return torch.cat([head.run_subnetworks(held.x, part, held.base_logits) for part in parts])

    return choose_temperature(head.ggt, outputs, lambda values, weights: nll(values, weights, held.target)).value


def _best_dropout(head: BRAINetHead, held: HeadInputs, nll: NLL, passes: int) -> float:
    held = held.first(MOST_OUTPUTS // (passes * head.out_features))
    before, losses = head.prediction_dropout, {}
    for rate in (head.dropout, 0.0):
        head.prediction_dropout = rate
        generator = torch.Generator(held.x.device).manual_seed(0)
        drawn = head.stochastic(held.x, passes, base_logits=held.base_logits, generator=generator)
        losses[rate] = nll(drawn.logits, None, held.target)
    head.prediction_dropout = before
    return best_value(losses, head.dropout).value
