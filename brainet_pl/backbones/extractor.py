"""Any module, or none, as a feature extractor: inputs (B, …) → features (B, d)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from brainet_pl._utils.texts import Texts
from brainet_pl.backbones import batches, removal
from brainet_pl.backbones.output import BackboneOutput
from brainet_pl.backbones.removal import FeaturesReached, HeadLayer
from brainet_pl.backbones.stages import LayerUse, channels_of, output_parts, trace_layers
from brainet_pl.backbones.taps import (
    LAST,
    Catcher,
    Hook,
    LayerSearch,
    Tap,
    Taps,
    View,
    check_fits,
    check_size,
    pooled,
    width_of,
)
from brainet_pl.backbones.texts import TextEncoder
from brainet_pl.distributed.collectives import all_gather

CHUNK = 64  # texts of about one length that run at a time


class FeatureExtractor(nn.Module):
    """Any module, or none, as inputs (B, …) → features (B, d) of its last layer, or of any layers that are tapped.

    The classification layer is found and removed with the first inputs, because only a pass tells which layer is used
    last; it is kept for the model's own logits. A frozen extractor stays in evaluation mode, so that its batch-norm
    statistics do not drift, and needs no gradient.

    Args:
        model: a module, which is changed where it has a layer to remove, or None for raw features.
        frozen: do not train it.
        head_layer: the classification layer to remove; None finds it, "" removes nothing.
        taps: the layers that features come from; None is what the classification layer was given.
        pool: how maps or tokens of the last layer become features; None averages maps and flattens the rest.
        search: what layers may be chosen from, where training data is to choose them; until then the last is read.

    Attributes:
        removed: the name of the layer that was removed; None before the first inputs.
        base_layer: the removed layer itself.
        evidence: how the layers were chosen, in one line; "" where nobody chose.
        views: the tapped layers that the head and the scores read, the head's first.
        input_signature: name → shape and type of a sample of the first inputs; "" is the name of a single tensor.
    """

    supports_more = True  # `forward` takes `more=True`
    views: list[View]

    def __init__(
        self,
        model: nn.Module | None,
        *,
        frozen: bool = True,
        head_layer: str | None = "",
        taps: Taps | None = None,
        pool: str | None = None,
        search: LayerSearch | None = None,
    ) -> None:
        super().__init__()
        if model is not None and head_layer:
            removal.check_layer(model, head_layer)
        if model is None and (taps is not None or pool is not None):
            raise ValueError(
                "expected a backbone to read layers of, got none: give the model, or leave layers and pool out"
            )
        self.model = nn.Identity() if model is None else model
        self.raw, self.frozen, self.head_layer, self.pool = model is None, frozen, head_layer, pool
        self.removed: HeadLayer | None = None
        self.base_layer: nn.Module | None = None
        self.taps = taps
        self.search = None if model is None else search
        self.evidence = ""
        self.views = nn.ModuleList([] if taps is None else [View(taps)])  # type: ignore[assignment]
        self._catcher = Catcher()
        self._ran = model is None
        self.input_signature: dict[str, batches.Sample] | None = None
        self._headless = False  # no layer to remove was found, and none is needed
        if frozen:
            self.requires_grad_(False)
            self.eval()

    @property
    def takes_texts(self) -> bool:
        """Whether texts can be its inputs, as they are."""
        return isinstance(self.model, TextEncoder)

    def _given(self, x: Any) -> Any:
        """Inputs as the model takes them: tokens of texts, numbers in the type of its weights."""
        if not isinstance(x, Texts):
            return batches.cast_for(self, _checked(x))
        if not isinstance(self.model, TextEncoder):
            raise ValueError(
                f"expected tensors, got texts, which {type(self.model).__name__} does not read: give a network with "
                "its tokenizer, TextEncoder(network, tokenizer)"
            )
        return self.model.tokens(x)

    def add_view(self, taps: Taps) -> None:
        """Read these layers as well, for a score."""
        if self.raw:
            raise ValueError(f"expected a backbone to read {taps} of, got none: give the model, or leave layers out")
        if taps not in [view.taps for view in self.views[self.taps is not None :]]:
            self.views.append(View(taps))

    def choose(self, taps: Taps | None, evidence: str = "") -> None:
        """Read these layers from now on, where they were to be chosen; None is the last layer."""
        if self.taps is not None:
            del self.views[0]
        self.search, self.evidence, self.taps = None, evidence, taps
        if taps is not None:
            weight = next(self.parameters(), torch.empty(0))
            self.views.insert(0, View(taps).to(weight.device))

    def layer_uses(self, x: Any) -> dict[str, LayerUse]:
        """How each layer is used in a pass over two of some inputs."""
        few = _two_samples(self._given(x))
        with self._explained(few), removal.eval_without_grad(self.model):
            return trace_layers(self.model, lambda: self._call(few), 2)

    def read(self, x: Any, taps: Sequence[Tap]) -> tuple[Tensor, list[Tensor]]:
        """Inputs → features (B, d) of the last layer, and of each of some taps that nobody else reads."""
        hooks = [self.model.get_submodule(t.layer).register_forward_hook(Hook(self._catcher, t)) for t in taps]
        try:
            x = self._given(x)
            self._prepare(x)
            last, caught = self._run(x)
        finally:
            for hook in hooks:
                hook.remove()
        return self._last_features(last, batches.size(x), _mask_of(x)), [caught[tap] for tap in taps]

    def widths(self, taps: Taps | None) -> tuple[int, ...]:
        """The number of features of each layer of a view, known after the first inputs; () for the last layer."""
        found = [view for view in self.views if view.taps == taps]
        return tuple(width_of(tap) for view in found[:1] for tap in view.resolved)

    def is_scaled(self, taps: Taps | None) -> bool:
        """Whether the features of a view (None is the head's) are tapped, and so standardised."""
        return (self.taps if taps is None else taps) is not None

    def moments(self, taps: Taps | None) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation by which the features of a view (None is the head's) are standardised, (d,) each."""
        found = [view for view in self.views if view.taps == (self.taps if taps is None else taps) and view.has_scale]
        return (found[0].centre, found[0].scale) if found else None

    @property
    def last_layer(self) -> tuple[Tensor, Tensor] | None:
        """Weight (C, d) and bias (C,) of the classification layer that was removed, if it is linear and still fits."""
        layer = self.base_layer
        if not self.frozen or not isinstance(layer, nn.Linear | nn.Conv2d):
            return None
        weight = _whole(layer.weight).flatten(1)
        return weight, weight.new_zeros(len(weight)) if layer.bias is None else _whole(layer.bias)

    @property
    def needs_sample(self) -> bool:
        """Whether inputs are needed to find the layer to remove."""
        return not self.raw and self.head_layer != "" and self.removed is None and not self._headless

    @property
    def needs_scale(self) -> bool:
        """Whether training data is needed to standardise tapped features."""
        return any(not view.has_scale for view in self.views)

    @property
    def names(self) -> list[str] | None:
        """The names of the head's features, known after the first inputs; None where features have none."""
        return None if self.taps is None or not self.views[0].resolved else self.views[0].names

    def remove(self, head: HeadLayer) -> None:
        """Remove a layer whose name is known, from a checkpoint or from a pass, and keep it as `base_layer`."""
        removal.check_layer(self.model, head.name)
        parent, _, name = head.name.rpartition(".")
        self.base_layer = layer = self.model.get_submodule(head.name).requires_grad_(False)
        setattr(self.model.get_submodule(parent), name, removal.Leave(layer) if head.leave else nn.Identity())
        self.removed = head

    def trace(self, x: Any) -> None:
        """Find the tapped layers and the layer to remove by a pass over some inputs, unless they are known."""
        self._prepare(self._given(x))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer may change: all but those of the layer that was removed."""
        removed = set() if self.base_layer is None else set(self.base_layer.parameters())
        return [p for p in self.parameters() if p not in removed]

    def set_scale(self, outputs: list[BackboneOutput], shared: bool = False) -> list[BackboneOutput]:
        """Learn mean and deviation of tapped features from outputs for the training data; gives these standardised.

        With `shared`, the other processes hold more outputs, and this is a collective.
        """
        waiting = self.without_scale()
        sums = [_sums([part.view(taps) for part in outputs]) for taps in waiting]
        shares = [share for share in all_gather(sums) if share[0] is not None] if shared else [sums]
        for i, view in enumerate(waiting.values()):
            count, first, second = (sum(column) for column in zip(*(share[i] for share in shares), strict=True))
            mean = first / count
            view.set_scale(mean, (second / count - mean.square()).clamp_min(0).sqrt())
        return [scaled(part, waiting) for part in outputs]

    def without_scale(self) -> dict[Taps | None, View]:
        """The views whose scale is not known yet, by their taps; None is the head's."""
        views = ((None if i == 0 and self.taps is not None else view.taps, view) for i, view in enumerate(self.views))
        return {taps: view for taps, view in views if not view.has_scale}

    def train(self, mode: bool = True) -> FeatureExtractor:
        """Switches the mode as any module does, except that a frozen backbone stays in evaluation mode."""
        super().train(mode and not self.frozen)
        if self.base_layer is not None:
            self.base_layer.eval()
        return self

    def forward(self, x: Any, more: bool = False) -> Any:
        """Inputs, a tensor (B, …), a dictionary of tensors or texts, → features (B, d).

        With `more`, a `BackboneOutput`: features, those of every other view, and the logits of the removed layer.
        """
        given = self._given(x)
        if isinstance(x, Texts) and len(x) > CHUNK:
            output = self._by_length(given)
            return output if more else output.features
        x = given
        self._prepare(x)
        if self.input_signature is None:
            self.input_signature = batches.signature(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            last, caught = self._run(x)
            for tap in [tap for view in self.views for tap in view.resolved if tap.layer == LAST]:
                if tap not in caught:
                    caught[tap] = self._last_features(last, batches.size(x), _mask_of(x))
            views = [(view.taps, view(caught)) for view in self.views]
            if self.taps is not None:
                features = views.pop(0)[1]
            else:
                features = self._last_features(last, batches.size(x), _mask_of(x))
            return BackboneOutput(features, dict(views), self._base_logits(last)) if more else features

    def _by_length(self, tokens: Mapping[str, Tensor]) -> BackboneOutput:
        """Tokens of many texts: those of about one length run together, so that little of what runs is padding."""
        lengths = tokens["attention_mask"].sum(dim=1)
        order = lengths.argsort(stable=True)
        parts = []
        for rows in order.split(CHUNK):  # type: ignore[no-untyped-call]
            longest = int(lengths[rows].max())
            parts.append(self.forward({name: part[rows, :longest] for name, part in tokens.items()}, more=True))
        return BackboneOutput.concat(parts)[order.argsort()]

    def _base_logits(self, last: Any) -> Tensor | None:
        """The logits of the removed layer, (B, C); None without one, or where it does not give one row a sample."""
        last = removal.logits_of(last)
        if self.base_layer is None or not isinstance(last, Tensor) or last.dim() != 2:
            return None
        logits: Tensor = self.base_layer(last[:, :, None, None] if isinstance(self.base_layer, nn.Conv2d) else last)
        return logits.flatten(1)

    def _last_features(self, features: Any, samples: int, mask: Tensor | None) -> Tensor:
        """The features of the last layer (B, d)."""
        if not isinstance(features, Tensor):
            features = _chosen_output(features)
        if features.dim() < 2 or features.shape[0] != samples:
            raise ValueError(
                f"expected the backbone to return features of shape (batch, d), got {tuple(features.shape)} for a "
                f"batch of {samples}: wrap it in a module that keeps the batch first"
            )
        shape = tuple(features.shape[1:])
        if self.pool is not None and not self.raw:
            use = LayerUse(shape, channels_of(shape), 1, 0)
            check_fits("the last layer", use, self.pool)
            check_size([Tap("the last layer", self.pool, shape, use.channels)])
            return pooled(features, self.pool, use.channels, mask)
        if mask is not None and mask.shape == features.shape[:2] and features.dim() == 3:
            return pooled(features, "mean", -1, mask)  # texts differ in length
        return self._flat(features)

    def _flat(self, features: Tensor) -> Tensor:
        """The features of the last layer without a pool: the mean of maps, tokens side by side."""
        if not self.raw:
            if features.dim() == 4:
                return torch.as_tensor(features.mean(dim=(2, 3)))
            shape = tuple(features.shape[1:])
            if len(shape) > 1:
                check_size([Tap("the last layer", "flatten", shape, channels_of(shape))])
        flat = features.flatten(1)
        return torch.as_tensor(flat if flat.is_floating_point() else flat.float())

    def _prepare(self, x: Any) -> None:
        """With the first inputs: find the tapped layers, and the layer to remove."""
        waiting = [view for view in self.views if not view.resolved]
        uses = self.layer_uses(x) if waiting else {}
        if self.needs_sample:
            with self._explained(x):
                try:
                    self.remove(removal.find_head(self.model, _two_samples(x), self.head_layer))
                except ValueError:
                    if self.taps is None or self.head_layer is not None:
                        raise
                    self._headless = True  # features come from other layers: nothing needs to be removed
            self._catcher.caught = {}
        if any(LAST in view.taps.layers for view in waiting):
            few = _two_samples(x)
            with removal.eval_without_grad(self.model):
                width = self._last_features(self._call(few), 2, _mask_of(few)).shape[1]
            uses.setdefault(LAST, LayerUse((width,), 1, 1, len(uses)))
        for view in waiting:
            view.attach(self.model, uses, self._catcher)
            self._check_kept(view)

    def _check_kept(self, view: View) -> None:
        for tap in view.resolved:
            if self.removed is not None and f"{tap.layer}.".startswith(f"{self.removed.name}."):
                raise ValueError(
                    f"expected layers that stay, got {tap.layer!r}, the classification layer, which is removed: leave "
                    "it out of layers, or keep it, head_layer=''"
                )

    def _call(self, x: Any) -> Any:
        try:
            output = batches.call(self.model, x)
        except FeaturesReached as reached:
            return reached.features
        if self.removed is not None and self.removed.leave:  # no exception was raised: the model is being exported
            place: Any = self.model.get_submodule(self.removed.name)
            output, place.features = place.features, None
        return output

    def _run(self, x: Any) -> tuple[Any, dict[Tap, Tensor]]:
        """The output of the model's last layer, and the outputs of its taps."""
        self._catcher.caught, self._catcher.mask = {}, _mask_of(x)
        with self._explained(x):
            last = self._call(x)
        caught, self._catcher.caught, self._catcher.mask = self._catcher.caught, {}, None
        self._ran = True
        return last, caught

    @contextlib.contextmanager
    def _explained(self, x: Any) -> Iterator[None]:
        """An error of the model's own says what it was given, unless inputs of this shape went through before."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            if self._ran and self.input_signature in (None, batches.signature(x)):
                raise
            raise ValueError(
                f"expected inputs that {type(self.model).__name__} takes, got a batch of {_described(x)}, at which it "
                f"stops ({error}): give inputs of one shape, as in training{self._usual_shape()}"
            ) from error

    def _usual_shape(self) -> str:
        """The shape of the first inputs, where they were tensors that went through."""
        if not self._ran or self.input_signature is None or "" not in self.input_signature:
            return ""
        return f", (N{''.join(f', {side}' for side in self.input_signature[''].shape)})"


def _described(x: Any) -> str:
    """The shapes of inputs, for an error."""
    if isinstance(x, Mapping):
        return str({name: tuple(values.shape) for name, values in x.items()})
    return f"shape {tuple(x.shape)} and {x.dtype}"


def _whole(weight: Tensor) -> Tensor:
    """A weight, all of it where processes share it; a collective then."""
    found = weight.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _checked(x: Any) -> Any:
    for tensor in x.values() if isinstance(x, Mapping) else (x,):
        if not isinstance(tensor, Tensor) or not tensor.dim() or tensor.is_complex():
            got = f"{tuple(tensor.shape)} of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"expected inputs of shape (batch, …) in real numbers, got {got}: give a batch")
    return x


def _two_samples(x: Any) -> Any:
    """Two samples of inputs, or one of them twice: one alone does not tell which axis is that of the batch."""
    which = [0, 1] if batches.size(x) > 1 else [0, 0]
    return batches.rows(x, which)


def scaled(output: BackboneOutput, views: Mapping[Taps | None, View]) -> BackboneOutput:
    """An output that was made before these views had a scale, standardised by the one they have now."""
    features = views[None].scaled(output.features) if None in views else output.features
    more = {taps: views[taps].scaled(x) if taps in views else x for taps, x in output.more.items()}
    return BackboneOutput(features, more, output.base_logits)


def _sums(tables: list[Tensor]) -> tuple[int, Tensor, Tensor] | None:
    """Batches (n_i, d) → number of samples, their sum and the sum of their squares, each (d,); None without batches.

    Samples with NaN or infinity do not count, as long as there are others: one of them would blind the scale.
    """
    if not tables:
        return None
    double = [part.double() for part in tables]
    finite = [x[x.isfinite().all(dim=1)] for x in double]
    if any(map(len, finite)):
        double = finite
    stacked = torch.stack([torch.stack([x.sum(dim=0), x.square().sum(dim=0)]) for x in double]).sum(dim=0)
    return sum(map(len, double)), stacked[0], stacked[1]


def _mask_of(inputs: Any) -> Tensor | None:
    """The attention mask (B, T) of tokenised texts; None where the inputs have none."""
    found = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return found if isinstance(found, Tensor) and found.dim() == 2 else None


_OUTPUTS = ("logits", "pooler_output", "features", "last_hidden_state", "out", "x")  # features in outputs by name


def _chosen_output(output: Any) -> Tensor:
    """The features in an output with several parts, where it is clear which they are."""
    tensors = {name: part for name, part in output_parts(output).items() if isinstance(part, Tensor)}
    named = next((name for name in _OUTPUTS if name in tensors), None)
    if named is not None or len(tensors) == 1:
        return tensors[named if named is not None else next(iter(tensors))]
    listed = ", ".join(f"{name} {tuple(part.shape)}" for name, part in tensors.items()) or type(output).__name__
    raise ValueError(
        f"expected the backbone to return one tensor, got {listed}: name the layer that gives the features, layers=…, "
        "or wrap it in a module that returns them"
    )
