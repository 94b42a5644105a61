"""The density of features under the Bayesian networks of a learned tree.

    -log p(x | c, GGT) = -log Σ_G P(G) Π_i p(x_i | parents_G(x_i), c)

The sum over all sub-networks G is exact: the tree is walked once, from the leaves up, adding logarithms of families
within a branch and mixing branches with their posterior probabilities. The parameters of a family are found by counting
(discrete) or from means and covariances (Gaussian), one set for each class c: no gradient, one pass over training data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from brainet_pl._utils import checks
from brainet_pl._utils.data_sized import DataSizedBuffers
from brainet_pl._utils.search import places
from brainet_pl.distributed.collectives import processes, rank, run_or_fail_together, total
from brainet_pl.structure.ggt import GGT, Leaf

Kind = Literal["gaussian", "discrete"]
Family = tuple[int, tuple[int, ...]]
_ROOM = 2**25  # numbers held at a time while scoring, so that memory does not grow with the batch
_WIDTHS = (2, 4, 8, 16, 32)  # numbers of parents up to which families are computed together
_CELLS = 2**20  # of a discrete family's table; data would fill next to none of a larger one
# A column that hardly varies, such as a pixel at the border, would make any noise an event of many deviations. Its
# kurtosis tells it from others (3 for a normal one), and half of its size where it does vary is its least deviation.
RARE_KURTOSIS, RARE_FLOOR = 10.0, 0.5
_TIED = 2**28  # numbers in all classes' covariances above which one covariance serves all classes
PRIOR_PER_VARIABLE = 16.0  # with fewer rows than this for each variable, a class's own covariances are mostly noise


def families_of(ggt: GGT) -> list[Family]:
    """Every (variable, parents) of every leaf, once, in a fixed order."""
    leaves = (node for node in ggt.nodes if isinstance(node, Leaf))
    return sorted({family for leaf in leaves for family in zip(leaf.variables, leaf.parents, strict=True)})


class TreeDensity(DataSizedBuffers):
    """Log-densities (B, C) of features under a tree's networks, and the scores made of them.

    Its tensors are buffers whose shapes follow from the arguments, so its weights load into what `from_dict` builds.

    Args:
        ggt: The learned tree.
        num_classes: Number of classes C; 1 for a density without classes.
        kind: "gaussian", linear regressions on the parents, or "discrete", tables of quantile codes with BDeu's counts.
        normalize: Divide each sample's features by their Euclidean length first.
        prior: Weight, in rows, of what all classes have in common when a class's own parameters are estimated. None is
            16 for each variable (gaussian) or 5 (discrete).
        max_parents: Parents that a feature may have. None keeps the 64 most correlated ones (gaussian) or the 2 best by
            score (discrete).
        bins: Levels of a feature, for "discrete".
        temperature: Temperature of the posterior over sub-networks; "auto" is `GGT.auto_temperature`.
    """

    _dtype: Tensor

    def __init__(
        self,
        ggt: GGT,
        num_classes: int,
        *,
        kind: Kind = "gaussian",
        normalize: bool = True,
        prior: float | None = None,
        bins: int = 8,
        max_parents: int | None = None,
        temperature: float | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        prior, bins, max_parents = check_density(kind, prior, bins, max_parents)
        self.ggt, self.num_classes = ggt, checks.whole("num_classes", num_classes, 1)
        self.normalize = normalize = checks.flag("normalize", normalize)
        num_classes = self.num_classes
        if temperature != "auto":
            temperature = checks.at_least("temperature", temperature, 0, "or 'auto', the tempered default")
        self._settings: dict[str, Any] = {"kind": kind, "normalize": normalize, "prior": prior, "bins": bins}
        self._settings |= {"max_parents": max_parents, "temperature": temperature}
        families = families_of(ggt)
        self.families: GaussianFamilies | DiscreteFamilies
        if kind == "gaussian":
            weight = PRIOR_PER_VARIABLE * ggt.num_variables if prior is None else prior
            most = 64 if max_parents is None else max_parents
            self.families = GaussianFamilies(families, ggt.num_variables, num_classes, weight, most)
        else:
            weight = 5.0 if prior is None else prior
            most = 2 if max_parents is None else max_parents
            self.families = DiscreteFamilies(families, ggt.num_variables, num_classes, weight, bins, most)
        gamma = ggt.auto_temperature if temperature == "auto" else float(temperature)
        self.average = TreeAverage(ggt, families, gamma)
        self.register_buffer("_dtype", torch.empty(0), persistent=False)  # follows `module.double()`

    def to_dict(self) -> dict[str, Any]:
        """JSON-able primitives that `from_dict` rebuilds an empty score from."""
        return {"ggt": self.ggt.to_dict(), "num_classes": self.num_classes, "settings": dict(self._settings)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TreeDensity:
        """A score of the same shape, for its tensors to be loaded into."""
        return cls(GGT.from_dict(data["ggt"]), int(data["num_classes"]), **data["settings"])

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor, shared: bool = False) -> TreeDensity:
        """Estimate all parameters from finite training features (N, d) and labels (N,) from 0 to C - 1.

        With `shared`, for "gaussian" only, all processes fit together, each to its share of the samples or to none.
        """

        def check() -> None:
            self._check(features)
            if len(features) or not shared:
                check_training(features, labels, self.num_classes)

        if shared:
            run_or_fail_together(check)
        else:
            check()
        self.families.fit(self.prepare(features), labels.long(), shared)
        return self

    def forward(self, features: Tensor) -> Tensor:
        """Maps features (B, d) to log p(x | c), (B, C), averaged over sub-networks; differentiable."""
        self._check(features)
        room = _ROOM // 4 if features.device.type == "cpu" else _ROOM  # of which a processor's cache holds more
        rows = max(1, room // self.families.numbers)
        with torch.autocast(features.device.type, enabled=False):  # never in 16 bits, as in `_apply`
            return in_parts(lambda part: self.average(self.families(self.prepare(part))), features, rows)

    def scores(self, features: Tensor, probs: Tensor | None = None) -> dict[str, Tensor]:
        """Features (B, d) and predicted probabilities (B, C) → scores (B,), higher for the unknown.

        `generative` is -max_c log p(x | c), `generative_weighted` is -Σ_c p̄_c·log p(x | c).
        """
        density = self(features)
        found = {"generative": -density.amax(dim=1)}
        if probs is not None:
            found["generative_weighted"] = -(probs * density).sum(dim=1)
        return found

    def without_classes(self, features: Tensor, hidden: Tensor) -> Tensor:
        """Features (B, d) → (K, B) `generative` by the densities of the classes that are not in each group (K, C)."""
        return -lacking(self(features), hidden).amax(dim=2)

    def prepare(self, features: Tensor) -> Tensor:
        """Features (B, d) as families read them."""
        x = features.to(self._dtype.dtype)
        return F.normalize(x, dim=1) if self.normalize else x

    def _check(self, features: Tensor) -> None:
        if features.dim() != 2 or features.shape[1] != self.ggt.num_variables:
            raise ValueError(
                f"expected features of shape (batch, {self.ggt.num_variables}), got {tuple(features.shape)}: the "
                f"tree of this score was learned from {self.ggt.num_variables} features"
            )


def lacking(by_class: Tensor, hidden: Tensor) -> Tensor:
    """Numbers (B, C) and groups of classes (K, C) → (K, B, C), minus infinity where a group has the class."""
    width = by_class.shape[1] - hidden.shape[1]
    return by_class.masked_fill(F.pad(hidden, (0, width))[:, None, :], -torch.inf)


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """`function` of x, so many rows at a time, which bounds its memory; all at once in a graph, which has no number."""
    if torch.compiler.is_compiling() or len(x) <= rows:
        return function(x)
    return torch.cat([function(part) for part in x.split(rows)])  # type: ignore[no-untyped-call]


def check_density(
    kind: str, prior: float | None, bins: int, max_parents: int | None
) -> tuple[float | None, int, int | None]:
    """`prior`, `bins` and `max_parents` as plain numbers; refuses settings of a density that mean nothing."""
    checks.one_of("kind", kind, ("gaussian", "discrete"))
    prior = None if prior is None else checks.above_zero("prior", prior)
    bins = checks.whole("bins", bins, 2)
    most = checks.whole_or_none("max_parents", max_parents, 0, "None takes the default of the kind")
    cells = bins ** ((2 if most is None else most) + 1)
    if kind == "discrete" and cells > _CELLS:
        raise ValueError(
            f"expected tables of at most {_CELLS:,} cells for a family, bins^(max_parents + 1), got {cells:,}: lower "
            "bins or max_parents"
        )
    return prior, bins, most


def check_training(features: Tensor, labels: Tensor, num_classes: int | None = None) -> None:
    """Refuse training data that a score can't be fitted to.

    Args:
        features: (N, d), finite.
        labels: (N,), whole numbers from 0 on, below `num_classes` where that is given.
        num_classes: C.
    """
    if features.dim() != 2 or not features.numel() or features.is_complex() or labels.shape != features.shape[:1]:
        raise ValueError(
            f"expected features (N, d) and as many labels (N,), got {tuple(features.shape)} of {features.dtype} and "
            f"{tuple(labels.shape)}: give one row and one label for each training sample"
        )
    bad = int((~features.isfinite()).any(dim=1).sum())
    if bad:
        raise ValueError(
            f"expected finite features to fit a score to, got {bad} of {len(features)} rows with NaN or infinite "
            "values: fix the inputs or the backbone"
        )
    if len(features) > 1 and bool((features == features[0]).all()):
        raise ValueError(
            f"expected features that vary to fit a score to, got the same {features.shape[1]} numbers for all "
            f"{len(features)} samples: check the inputs, and the layers that are read"
        )
    low, high = labels.min().item(), labels.max().item()
    fractions = labels.is_floating_point() and bool((labels != labels.round()).any())  # 2.0 is a label, 0.7 is none
    if fractions or low < 0 or (num_classes is not None and high >= num_classes):
        most = "on" if num_classes is None else f"to {num_classes - 1}"
        raise ValueError(
            f"expected whole numbers from 0 {most} as labels, got {low} to {high} of {labels.dtype}: renumber the "
            "classes"
        )


def density_threshold(threshold: float, rows: int) -> float:
    """The least mutual information in nats that makes an edge in the tree of a density, learned from so many rows.

    It is at least 6/N: of N rows, independent pairs have about 1/(2N) nats, and one in two thousand exceeds 6/N.

    >>> density_threshold(0.02, 1000), density_threshold(0.02, 60)
    (0.02, 0.1)
    """
    return max(threshold, 6.0 / rows)


def reducer(shared: bool) -> Callable[[Tensor], Tensor]:
    """What turns a sum over this process's rows into one over all samples: where they are shared, a collective."""
    return total if shared else lambda tensor: tensor


class _Step(nn.Module):
    """Nodes of one height: which earlier values add up to which branch, and the branches' log probabilities (n, s)."""

    child: Tensor
    slot: Tensor
    log_prior: Tensor

    def __init__(self, child: list[int], slot: list[int], log_prior: Any) -> None:
        super().__init__()
        self.register_buffer("child", torch.tensor(child), persistent=False)
        self.register_buffer("slot", torch.tensor(slot), persistent=False)
        self.register_buffer("log_prior", torch.tensor(log_prior, dtype=torch.float32), persistent=False)

    def forward(self, state: Tensor) -> Tensor:
        """Values of all nodes so far (rows, B, C) → those of this height (n, B, C)."""
        return torch.logsumexp(self.branches(state), dim=1)

    def branches(self, state: Tensor) -> Tensor:
        """Values of all nodes so far (rows, B, C) → log P(t) + f(branch t) of those of this height, (n, s, B, C)."""
        nodes, most = self.log_prior.shape
        branches = state.new_zeros(nodes * most, *state.shape[1:]).index_add(0, self.slot, state[self.child])
        return branches.view(nodes, most, *state.shape[1:]) + self.log_prior[:, :, None, None]


class TreeAverage(nn.Module):
    """Log-densities of families (F, B, C) → (B, C) of the mixture of all sub-networks of a tree.

    f(leaf) = Σ families, f(branch) = Σ f(children), f(node) = log Σ_t P(t)·exp f(branch t), from the leaves up.
    """

    _family: Tensor
    _leaf: Tensor

    def __init__(self, ggt: GGT, families: list[Family], temperature: float) -> None:
        super().__init__()
        place = {family: i for i, family in enumerate(families)}
        number = {id(node): i for i, node in enumerate(ggt.nodes)}
        leaves = [i for i, node in enumerate(ggt.nodes) if isinstance(node, Leaf)]
        row = {node: k for k, node in enumerate(leaves)}  # node number → row of the state
        pairs = [(place[family], row[i]) for i in leaves for family in _members(ggt.nodes[i])]
        self.register_buffer("_family", torch.tensor([f for f, _ in pairs]), persistent=False)
        self.register_buffer("_leaf", torch.tensor([leaf for _, leaf in pairs]), persistent=False)
        self.num_leaves = len(leaves)
        probs = ggt.branch_probabilities(temperature)
        self.steps = nn.ModuleList()
        for height in range(1, max(ggt.heights) + 1):
            nodes = [i for i, h in enumerate(ggt.heights) if h == height]
            most = max(len(probs[i]) for i in nodes)
            prior = np.full((len(nodes), most), -np.inf)
            child, slot = [], []
            for k, i in enumerate(nodes):
                with np.errstate(divide="ignore"):
                    prior[k, : len(probs[i])] = np.log(probs[i])
                for t, branch in enumerate(ggt.nodes[i].branches):  # type: ignore[union-attr]
                    child += [row[number[id(c)]] for c in branch.children]
                    slot += [k * most + t] * len(branch.children)
            row |= {i: len(row) + k for k, i in enumerate(nodes)}
            self.steps.append(_Step(child, slot, prior))
        self.root = row[0]

    def forward(self, families: Tensor) -> Tensor:
        """Averages log-densities of families (F, B, C) over all sub-networks of the tree, (B, C)."""
        return self._states(families)[self.root]

    def _states(self, families: Tensor) -> Tensor:
        """Log-densities of families (F, B, C) → f of all nodes, leaves first, (nodes, B, C)."""
        found = families.index_select(0, self._family)
        state = families.new_zeros(self.num_leaves, *families.shape[1:]).index_add(0, self._leaf, found)
        for step in self.steps:
            state = torch.cat([state, step(state)])
        return state

    def shares(self, families: Tensor) -> Tensor:
        """Log-densities of families (F, B, C) → the posterior weight of the networks that have each, (F, B, C).

        It is the gradient of `forward`, from the root down, and needs no autograd, which inference mode has none of.
        """
        state = self._states(families)
        weight = torch.zeros_like(state)
        weight[self.root] = 1
        end = len(state)
        steps: list[_Step] = list(self.steps)  # type: ignore[arg-type]
        for step in reversed(steps):
            start = end - len(step.log_prior)
            of_branch = step.branches(state[:start]).softmax(dim=1) * weight[start:end, None]
            weight[:start].index_add_(0, step.child, of_branch.flatten(0, 1)[step.slot])
            end = start
        found = weight[self._leaf]
        return torch.zeros_like(families).index_add(0, self._family, found)


def _members(node: Any) -> Iterator[Family]:
    return zip(node.variables, node.parents, strict=True)


def typical_scale(variances: Tensor) -> Tensor:
    """The variance () of a typical column, from those of all (d,): their mean, unless a few columns make up most of it.

    A single column in large units would otherwise make all others look constant.

    >>> typical_scale(torch.tensor([1.0, 3.0])), typical_scale(torch.tensor([1.0, 1.0, 1e12]))
    (tensor(2.), tensor(100.))
    """
    varies = variances[variances > 0]
    usual = variances.mean() if not len(varies) else torch.minimum(variances.mean(), 100 * varies.median())
    return usual.clamp_min(1e-12)


def _class_products(x: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Rows (N, d) and labels (N,) → the sum (C, d, d) of xᵀx over the rows of each class."""
    found = x.new_empty(classes, x.shape[1], x.shape[1])
    counts = torch.bincount(labels, minlength=classes).tolist()
    for c, part in enumerate(x[labels.argsort(stable=True)].split(counts)):  # type: ignore[no-untyped-call]
        torch.mm(part.t(), part, out=found[c])
    return found


class _Covariance(NamedTuple):
    """Elements (C, …) of the covariances (ν·S + n_c·S_c)/(ν + n_c) of all classes, which are never held as a whole.

    Attributes:
        common: S, (d, d).
        own: n_c·S_c, (C, d, d); None where S alone serves all classes, C is 1 then.
        prior: ν.
        rows: n_c, (C,).
    """

    common: Tensor
    own: Tensor | None
    prior: float
    rows: Tensor

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        common = self.common[i, j].unsqueeze(0)
        if self.own is None:
            return common
        own = self.own[:, i, j]
        weight = (self.prior + self.rows).view(-1, *[1] * (own.dim() - 1))
        return (self.prior * common + own) / weight


class GaussianFamilies(nn.Module):
    """x_i | parents, c ~ N(intercept_c + slopes_c · parents, variance_c).

    A class's covariance is (ν·S + n_c·S_c)/(ν + n_c): S is the covariance within classes, S_c the class's own, n_c its
    number of rows and ν the weight of the prior; slopes and variances of a family follow from it. Where the covariances
    of all classes would not fit into memory (a thousand classes of thousands of features), S alone serves them all.
    """

    parents: Tensor
    variable: Tensor
    slopes: Tensor
    intercept: Tensor
    log_variance: Tensor
    _by_size: Tensor
    _place: Tensor

    def __init__(self, families: list[Family], d: int, num_classes: int, prior: float, max_parents: int) -> None:
        super().__init__()
        self.prior, self._families, self._classes = prior, families, num_classes
        self.tied = num_classes * d * d > _TIED
        most = max(1, min(max_parents, max((len(parents) for _, parents in families), default=1)))
        self.numbers = len(families) * max(most, num_classes)
        self.register_buffer("parents", torch.full((len(families), most), d))  # column d is zero
        self.register_buffer("variable", torch.tensor([v for v, _ in families]), persistent=False)
        self.register_buffer("slopes", torch.zeros(len(families), most, 1 if self.tied else num_classes))
        self.register_buffer("intercept", torch.zeros(len(families), 1, num_classes))
        self.register_buffer("log_variance", torch.zeros(len(families), 1, num_classes))
        # A few families have many parents. So that not all are computed as wide, those of like size are computed
        # together: width → how many have no more parents than that, and more than the width before.
        sizes = torch.tensor([min(len(parents), most) for _, parents in families], dtype=torch.long)
        widths = torch.tensor([width for width in _WIDTHS if width < most] + [most])
        counts = torch.bincount(torch.bucketize(sizes, widths), minlength=len(widths)).tolist()
        self._widths = {width: n for width, n in zip(widths.tolist(), counts, strict=True) if n}
        by_size = sizes.argsort(stable=True)
        self.register_buffer("_by_size", by_size, persistent=False)
        self.register_buffer("_place", by_size.argsort(), persistent=False)

    def fit(self, x: Tensor, labels: Tensor, shared: bool = False) -> None:
        """From features (N, d) and labels (N,); classes without a row get the common covariance around the mean.

        With `shared`, these are a share of the samples: sums go over all processes, and each solves a part of the
        families.
        """
        classes, over_all = self._classes, reducer(shared)
        x, count = x.double(), over_all(torch.bincount(labels, minlength=classes).double())
        onehot = F.one_hot(labels, classes).double()
        n, sums = count.sum(), over_all(onehot.t() @ x)
        mean = torch.where(count[:, None] > 0, sums / count.clamp_min(1)[:, None], sums.sum(dim=0) / n)
        residual = x - mean[labels]
        own = None if self.tied else over_all(_class_products(residual, labels, classes))  # Σ of each class (C, d, d)
        common = (over_all(residual.t() @ residual) if own is None else own.sum(dim=0)) / n
        own_scale = common.diagonal()
        fourth = over_all(residual.pow(4).sum(dim=0)) / n
        magnitude = fourth / own_scale.clamp_min(1e-30)  # squared, of a column that is mostly one value: when it is not
        rare = fourth > RARE_KURTOSIS * own_scale.square()
        typical = typical_scale(
            own_scale if bool(rare.all()) else own_scale[~rare]
        )  # few values make that of a rare one
        floor = 1e-3 * own_scale + 1e-6 * typical
        floor = torch.where(rare, floor.maximum(RARE_FLOOR**2 * magnitude), floor)
        floor = torch.where(own_scale <= 1e-9 * typical, typical, floor)  # nobody knows the scale of a constant
        covariance = _Covariance(common, own, self.prior, count)
        step, first = (processes(), rank()) if shared else (1, 0)
        for rows, variables, parents in self._blocks(common, range(first, len(self._families), step)):
            among, with_v = (
                covariance(parents[:, :, None], parents[:, None, :]),
                covariance(parents, variables[:, None]),
            )
            slopes = torch.linalg.solve(among + 1e-3 * torch.diag_embed(floor[parents]), with_v)  # (C, B, p)
            variance = covariance(variables, variables) - 2 * (slopes * with_v).sum(dim=2)
            variance = variance + ((among @ slopes.unsqueeze(3)).squeeze(3) * slopes).sum(dim=2)
            self.parents[rows, : parents.shape[1]] = parents
            self.slopes[rows, : parents.shape[1]] = slopes.permute(1, 2, 0).to(self.slopes)
            expected = mean[:, variables] - (slopes * mean[:, parents]).sum(dim=2)
            self.intercept[rows, 0] = expected.t().to(self.intercept)
            self.log_variance[rows, 0] = variance.maximum(floor[variables]).log().t().to(self.log_variance)
        if shared:
            mine = torch.arange(len(self._families), device=x.device) % step == first
            for buffer in (self.parents, self.slopes, self.intercept, self.log_variance):
                buffer[~mine.to(buffer.device)] = 0
                buffer.copy_(total(buffer))

    def _blocks(self, common: Tensor, rows: Iterable[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Families of one number of parents p at a time: their rows (B,), variables (B,) and parents (B, p).

        Of more parents than `max_parents` those most correlated with the variable are kept.
        """
        deviation, most = common.diagonal().clamp_min(1e-30).sqrt(), self.parents.shape[1]
        groups: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
        for row in rows:
            v, parents = self._families[row]
            kept: Sequence[int] = parents
            if len(parents) > most:
                p = torch.tensor(parents, device=common.device)
                strength = (common[v, p] / deviation[p]).abs()
                kept = p[strength.topk(most).indices.sort().values].tolist()
            groups.setdefault(len(kept), []).append((row, v, kept))
        for p_count, group in sorted(groups.items()):
            size = max(1, _ROOM // (self._classes * max(1, p_count) ** 2))
            for start in range(0, len(group), size):
                numbers, variables, parents = zip(*group[start : start + size], strict=True)
                found = [torch.tensor(part, dtype=torch.long, device=common.device) for part in (numbers, variables)]
                yield found[0], found[1], torch.tensor(parents, dtype=torch.long, device=common.device)

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to the log-density of each family in each class, (F, B, C)."""
        columns = F.pad(x, (0, 1)).t()
        if len(self._widths) == 1:
            expected = torch.bmm(columns[self.parents].transpose(1, 2), self.slopes)
        else:
            parts = [self._expected(columns, rows, width) for rows, width in self._of_like_size()]
            expected = torch.cat(parts).index_select(0, self._place)
        error = columns[self.variable].unsqueeze(2) - self.intercept - expected
        constant = -0.5 * (self.log_variance + math.log(2 * math.pi))
        return torch.addcmul(constant, error**2, -0.5 * (-self.log_variance).exp())

    def _of_like_size(self) -> Iterator[tuple[Tensor, int]]:
        """The rows of families in the order of their sizes, those up to a width at a time."""
        return zip(self._by_size.split(list(self._widths.values())), self._widths, strict=True)  # type: ignore[no-untyped-call]

    def _expected(self, columns: Tensor, rows: Tensor, width: int) -> Tensor:
        """Σ slopes · parents of some families that have no more than `width` parents, (n, B, C)."""
        parents, slopes = self.parents[:, :width].index_select(0, rows), self.slopes[:, :width].index_select(0, rows)
        return torch.bmm(columns[parents].transpose(1, 2), slopes)


class DiscreteFamilies(nn.Module):
    """p(x_i = k | parents = j, c) = (n_cjk + ν·m_jk)/(n_cj + ν) for quantile codes.

    n are counts; m_jk, the prior's mean, is the same estimate over all classes with BDeu's α = 1/(q·r). Of a family's
    parents those few are kept that raise the marginal likelihood of the counts most: a table over all of them would be
    nearly empty.
    """

    variable: Tensor
    edges: Tensor
    chosen: Tensor
    tables: Tensor

    def __init__(
        self, families: list[Family], d: int, num_classes: int, prior: float, bins: int, max_parents: int
    ) -> None:
        super().__init__()
        self.prior, self.bins, self._families = prior, bins, families
        self.numbers = len(families) * num_classes
        self.register_buffer("variable", torch.tensor([v for v, _ in families]), persistent=False)
        self.register_buffer("edges", torch.zeros(d, bins - 1))
        self.register_buffer("chosen", torch.full((len(families), max_parents), d))  # column d is code 0
        self.register_buffer("tables", torch.zeros(len(families), bins**max_parents * bins, num_classes))

    def fit(self, x: Tensor, labels: Tensor, shared: bool = False) -> None:
        """Counts levels of features (N, d) by family and by label (N,), in one process: quantiles are no sums."""
        assert not shared
        inner = torch.linspace(0, 1, self.bins + 1, dtype=x.dtype, device=x.device)[1:-1]
        self.edges.copy_(torch.stack([torch.quantile(column, inner) for column in x.t()]))
        codes = self._codes(x)
        for i, (v, parents) in enumerate(tqdm(self._families, desc="counting", delay=2, leave=False, disable=None)):
            kept = self._select(codes, labels, v, parents)
            self.chosen[i, : len(kept)] = torch.tensor(kept, dtype=torch.long, device=self.chosen.device)
            table = self._predictive(self._counts(codes, labels, v, kept)).log().permute(1, 2, 0).flatten(0, 1)
            # Parents that are not there have code 0, so that only the first rows are read.
            repeat = self.tables.shape[1] // len(table)
            self.tables[i] = F.pad(table, (0, 0, 0, len(table) * (repeat - 1)))

    def _codes(self, x: Tensor) -> Tensor:
        """(N, d) → (d + 1, N) level of each value; the last row is 0."""
        codes = places(self.edges.to(x.device), x.t())
        return F.pad(codes, (0, 0, 0, 1))

    def _counts(self, codes: Tensor, labels: Tensor, v: int, parents: tuple[int, ...]) -> Tensor:
        """(C, q, r) how often each level of v occurs with each configuration of the parents in each class."""
        classes, r = self.tables.shape[2], self.bins
        row = torch.zeros_like(labels)
        for p in reversed(parents):  # the first parent varies fastest, so that missing ones are leading zeros
            row = row * r + codes[p]
        q = r ** len(parents)
        flat = torch.bincount((labels * q + row) * r + codes[v], minlength=classes * q * r)
        return flat.view(classes, q, r).double()

    def _prior(self, counts: Tensor) -> Tensor:
        """(q, r) the mean of the prior, times its weight."""
        common = counts.sum(dim=0)
        alpha = 1.0 / common.numel()
        return self.prior * (common + alpha) / (common.sum(dim=1, keepdim=True) + alpha * common.shape[1])

    def _predictive(self, counts: Tensor) -> Tensor:
        """(C, q, r) the posterior mean of each probability."""
        return (counts + self._prior(counts)) / (counts.sum(dim=2, keepdim=True) + self.prior)

    def _likelihood(self, counts: Tensor) -> float:
        """Marginal likelihood of the counts under the Dirichlet prior of `_prior`."""
        prior = self._prior(counts)
        levels = torch.lgamma(counts + prior) - torch.lgamma(prior)
        rows = torch.lgamma(counts.sum(dim=2) + self.prior) - math.lgamma(self.prior)
        return float(levels.sum() - rows.sum())

    def _select(self, codes: Tensor, labels: Tensor, v: int, parents: tuple[int, ...]) -> tuple[int, ...]:
        """Greedily, while the marginal likelihood rises."""
        kept: tuple[int, ...] = ()
        best = self._likelihood(self._counts(codes, labels, v, kept))
        while len(kept) < self.chosen.shape[1]:
            tried = [
                (self._likelihood(self._counts(codes, labels, v, (*kept, p))), p) for p in parents if p not in kept
            ]
            if not tried or max(tried)[0] <= best:
                break
            best, p = max(tried)
            kept = (*kept, p)
        return kept

    def forward(self, x: Tensor) -> Tensor:
        """Maps features (B, d) to the log-probability of each family in each class, (F, B, C)."""
        codes = self._codes(x)
        row = torch.zeros_like(codes[self.variable])
        for k in range(self.chosen.shape[1] - 1, -1, -1):
            row = row * self.bins + codes[self.chosen[:, k]]
        row = row * self.bins + codes[self.variable]  # (F, B)
        return self.tables.gather(1, row.unsqueeze(2).expand(-1, -1, self.tables.shape[2]))
