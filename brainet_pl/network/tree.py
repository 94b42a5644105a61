"""`Tree`: the settings of a head that is wired by a learned tree of structures."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from brainet_pl._utils import checks
from brainet_pl.network import base
from brainet_pl.network.base import MOST_PASSES, Budget, HeadSettings, Norm
from brainet_pl.network.output import SKIPS, SkipKind
from brainet_pl.network.tree_head import BRAINetHead, Inference, Sampling, check_fields
from brainet_pl.network.weights import ACTIVATIONS
from brainet_pl.network.widths import count_parameters
from brainet_pl.structure.ggt import GGT


class Tree(HeadSettings):
    """A BRAINet: the whole learned tree as one network whose sub-networks are sampled by their posterior.

    Args:
        num_params: Budget of parameters that the widths of all layers are scaled to; "auto" is 16,000, or 250 for each
            feature where that is more; each output beyond 16 adds twice what a linear layer has for it. Where a layer
            for each of many small sets of features would take more than half of that, such sets share a layer.
        min_width: Smallest number of neurons of a layer; null is 2, or the most that `num_params` allows.
        activation: Activation after every layer: relu, gelu, silu, tanh or elu.
        norm: "batch" for batch norm in every layer, or null for a bias instead.
        dropout: Dropout rate of the outputs of nodes; above 0 each stochastic pass also draws a dropout mask, unless
            validation data are predicted better without.
        sampling: While training, draw sub-networks for each "batch" (the paper) or for each "sample".
        draws: Number of sub-networks that a training step draws for each batch or sample, in balance; 1 is the paper,
            null as many as it takes for each branch of the root to be in one.
        temperature: Temperature of the posterior over sub-networks; null is what predicts the validation data of a fit
            best, and without such data a tempered default that does not collapse.
        inference: "stochastic" draws sub-networks, "simultaneous" averages in one pass, "enumerated" is the exact mean
            of all sub-networks, and "auto" is "enumerated" where there are no more of them than passes, else
            "stochastic".
        fields: Number of neighbours that the neurons of the lowest layer read: each belongs to one feature, and reads
            it and those that it depends on most. "auto" is 16, where the tree knows neighbours and they take no more
            than half of the budget; null is no such layer, as in the paper.
        skip: What is added to the outputs of every sub-network. "linear" is a dense layer from the features;
            "base_logits" the logits of the classifier that was removed; null nothing. "auto" is "linear" where that
            takes no more than half of the budget; "base_logits_or_linear" is "base_logits" where there are such logits
            for the task, else "linear" likewise. Base logits start a head at the answers of the classifier, but one
            that has fitted its training data leaves the head little to learn from: on the last layer of a ResNet-20
            "linear" predicted better.
    """

    needs_tree: ClassVar[bool] = True

    def __init__(
        self,
        num_params: Budget = "auto",
        min_width: int | None = None,
        activation: Literal["relu", "gelu", "silu", "tanh", "elu"] = "relu",
        norm: Norm = "batch",
        dropout: float = 0.0,
        sampling: Sampling = "sample",
        draws: int | None = None,
        temperature: float | None = None,
        inference: Inference = "auto",
        fields: int | Literal["auto"] | None = "auto",
        skip: SkipKind | None = "auto",
    ) -> None:
        check_fields(fields)
        checks.one_of("activation", activation, ACTIVATIONS)
        checks.one_of("skip", skip, SKIPS)
        checks.one_of("sampling", sampling, get_args(Sampling))
        checks.one_of("inference", inference, get_args(Inference))
        self.num_params, self.norm = base.check_budget(num_params), base.check_norm(norm)
        self.min_width = None if min_width is None else checks.whole("min_width", min_width, 1, 10**6)
        self.activation, self.norm, self.sampling, self.inference = (
            activation,
            base.check_norm(norm),
            sampling,
            inference,
        )
        self.skip, self.fields = skip, fields
        self.dropout = checks.share("dropout", dropout)
        self.draws = None if draws is None else checks.whole("draws", draws, 1, MOST_PASSES)
        hint = "0 is the best structure alone, null the tempered default"
        self.temperature = None if temperature is None else checks.at_least("temperature", temperature, 0, hint)

    @property
    def asks_base_logits(self) -> bool:
        """Whether `resolve_skip` has something to decide: with "base_logits_or_linear"."""
        return self.skip == "base_logits_or_linear"

    def resolve_skip(self, base_logits: bool) -> Tree:
        """These settings with "base_logits" in place of "base_logits_or_linear" where there are base logits."""
        if not self.asks_base_logits or not base_logits:
            return self
        return Tree(**self.settings() | {"skip": "base_logits"})

    def build(self, in_features: int, out_features: int, ggt: GGT | None = None) -> BRAINetHead:
        """Builds the head of a tree for so many outputs."""
        settings = self.settings() | {
            "num_params": None if self.num_params == "auto" else self.num_params,
            "temperature": "auto" if self.temperature is None else self.temperature,
        }
        return BRAINetHead(base.need_tree(ggt, self), out_features, **settings)


def smallest_budget(ggt: GGT, out_features: int, *, min_width: int = 1, norm: Norm = "batch") -> int:
    """The fewest parameters that a head for this tree can have."""
    return count_parameters(ggt, 0.0, out_features, min_width, 2 if norm else 1)
