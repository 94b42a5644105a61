"""The network behind the estimators of scikit-learn: a plain loop, and all that was learned as one module."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from brainet_pl import uncertainty
from brainet_pl.calibration import TemperatureScaling
from brainet_pl.network import BRAINetHead, HeadSettings
from brainet_pl.network.tree import Tree, smallest_budget
from brainet_pl.scores.density import TreeDensity, density_threshold
from brainet_pl.structure import GGT, learn_structure
from brainet_pl.tasks import Classification, Task

DRAW_SEED = 0  # of the sub-networks of a prediction: the same rows always give the same numbers
DENSITY_THRESHOLD = 0.02  # nats: a density wants more edges than a network of dense layers
BATCH = 4096  # rows predicted at a time


class Fitted(nn.Module):
    """Scale of the columns, head, calibration, density, and what they gave for the rows held back.

    Args:
        task: a classification or a regression.
        head: built for the tree.
        density: of the columns, fitted or about to be loaded.
        shapes: (d, H, O): columns, rows held back, and columns of a prediction.
    """

    mean: Tensor
    scale: Tensor
    held_predicted: Tensor
    held_target: Tensor
    held_scores: Tensor

    def __init__(self, task: Task, head: BRAINetHead, density: TreeDensity, shapes: tuple[int, int, int]) -> None:
        super().__init__()
        columns, held, outputs = shapes
        self.task, self.head, self.density = task, head, density
        self.calibration = TemperatureScaling() if isinstance(task, Classification) else None
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("scale", torch.ones(columns))
        self.register_buffer("held_predicted", torch.zeros(held, outputs))
        kind = torch.long if isinstance(task, Classification) else torch.float64
        self.register_buffer("held_target", torch.zeros(held, dtype=kind))
        self.register_buffer("held_scores", torch.zeros(held))

    def scaled(self, rows: Tensor) -> Tensor:
        """Brings rows (N, d) to deviations from the mean of the training rows."""
        return (rows - self.mean) / self.scale

    def _averaged(self, rows: Tensor, passes: int) -> Tensor:
        """Rows (N, d) → the averaged prediction, before calibration."""
        found = []
        for part in rows.split(BATCH):  # type: ignore[no-untyped-call]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(DRAW_SEED)
                found.append(self._predictive(*self.head.passes(self.scaled(part), passes)))
        return torch.cat(found)

    def _predictive(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        if isinstance(self.task, Classification):  # in 64 bits, where the task itself is content with 32
            return uncertainty.predictive(outputs.softmax(dim=-1), weights)
        return self.task.predictive(outputs, weights)

    @torch.no_grad()
    def predict(self, rows: Tensor, passes: int) -> Tensor:
        """Rows (N, d) → (N, C) calibrated probabilities, or (N, 2) means and variances."""
        self.eval()
        averaged = self._averaged(rows, passes)
        return averaged if self.calibration is None else torch.as_tensor(self.calibration(averaged, {}))

    @torch.no_grad()
    def strangeness(self, rows: Tensor) -> Tensor:
        """Minus the log-density (N,) of each row under the networks of the tree; NaN becomes infinity."""
        found = self.density.scores(self.scaled(rows))["generative"]
        return found.nan_to_num(nan=math.inf, posinf=math.inf)

    def known_p(self, rows: Tensor) -> Tensor:
        """The conformal p-value (N,): (1 + #{held back at least as strange}) / (H + 1)."""
        self._need_held("known_p")
        ordered = self.held_scores.sort().values
        below = torch.searchsorted(ordered, self.strangeness(rows))  # held-back rows that are less strange
        return (1.0 + len(ordered) - below) / (len(ordered) + 1.0)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Predictions and targets of the rows held back."""
        self._need_held("predict_set and predict_interval")
        return self.held_predicted, self.held_target

    def _need_held(self, who: str) -> None:
        if not len(self.held_scores):
            raise ValueError(
                f"expected rows held back in fit for {who}, got none: fit with at least 40 rows and a "
                "validation_fraction above 0"
            )

    def finalize(self, rows: Tensor, target: Tensor, passes: int) -> None:
        """Calibrate on the rows held back (H, d), and remember what was said of them."""
        self.eval()
        if not len(rows):
            return
        with torch.no_grad():
            if self.calibration is not None:
                self.calibration.observe(self._averaged(rows, passes), target, {})
                self.calibration.finalize()
            self.held_predicted.copy_(self.predict(rows, passes))
            self.held_target.copy_(target)
            self.held_scores.copy_(self.strangeness(rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` builds the same modules from, for their tensors to be loaded into."""
        return {
            "ggt": self.head.ggt.to_dict(),
            "density": self.density.to_dict(),
            "shapes": [len(self.mean), len(self.held_scores), int(self.held_predicted.shape[1])],
        }

    @classmethod
    def from_dict(cls, task: Task, settings: HeadSettings, data: Mapping[str, Any]) -> Fitted:
        """Modules of the same shapes."""
        ggt = GGT.from_dict(data["ggt"])
        head = build_head(settings, task, ggt)
        columns, held, outputs = data["shapes"]
        return cls(task, head, TreeDensity.from_dict(data["density"]), (columns, held, outputs)).double()


def build_head(settings: HeadSettings, task: Task, ggt: GGT) -> BRAINetHead:
    """The head of a tree, with more parameters than asked for where the tree needs more."""
    if isinstance(settings, Tree) and settings.num_params != "auto":
        least = smallest_budget(ggt, task.out_features, min_width=settings.min_width or 1, norm=settings.norm)
        if settings.num_params < least:
            settings = copy.copy(settings)
            settings.num_params = least
    head = settings.build(ggt.num_variables, task.out_features, ggt)
    assert isinstance(head, BRAINetHead)
    return head


def fit_network(
    task: Task,
    rows: Tensor,
    target: Tensor,
    train: Tensor,
    held: Tensor,
    *,
    head: HeadSettings,
    learn: Mapping[str, Any],
    names: Sequence[str] | None,
    max_epochs: int,
    patience: int,
    batch_size: int | None,
    learning_rate: float,
    passes: int,
    verbose: bool,
) -> tuple[Fitted, int]:
    """Structure, weights and calibration from rows (N, d) and targets (N,); the network and the epochs it took.

    `train` and `held` are the numbers of the rows to learn from and of those to stop and calibrate by. Without the
    latter, training takes a quarter of `max_epochs`.
    """
    own = rows[train]
    mean, scale = own.mean(dim=0), own.std(dim=0, correction=0)
    scale = torch.where(scale > 1e-12 * (1 + own.abs().amax(dim=0)), scale, torch.ones_like(scale))
    features = (own - mean) / scale
    settings = {name: value for name, value in learn.items() if value is not None}
    ggt = learn_structure(features.numpy(), progress=verbose, **settings).named(list(names) if names else None)
    labels = target[train]
    if task.needs_targets:
        task.prepare(labels)
    classes = task.num_classes if isinstance(task, Classification) else 1
    threshold = density_threshold(DENSITY_THRESHOLD, len(own))
    tree = learn_structure(features.numpy(), test="gaussian", threshold=threshold, progress=verbose, seed=learn["seed"])
    density = TreeDensity(tree, classes, normalize=False)
    density.fit(features, labels if classes > 1 else torch.zeros(len(own), dtype=torch.long))
    outputs = classes if classes > 1 else 2
    network = Fitted(task, build_head(head, task, ggt), density, (rows.shape[1], len(held), outputs))
    network.mean.copy_(mean)
    network.scale.copy_(scale)
    size = choose_batch_size(len(own)) if batch_size is None else batch_size
    pace = {"max_epochs": max_epochs, "patience": patience, "batch_size": size, "learning_rate": learning_rate}
    epochs = _optimise(network, features, labels, rows[held], target[held], verbose=verbose, **pace)  # type: ignore[arg-type]
    network.double().finalize(rows[held].double(), target[held], passes)
    return network, epochs


def choose_batch_size(rows: int) -> int:
    """A power of two near a sixteenth of the rows, from 16 to 256.

    >>> [choose_batch_size(n) for n in (30, 1000, 100_000)]
    [16, 64, 256]
    """
    return int(min(256, max(16, 2 ** round(math.log2(max(1, rows / 16))))))


def _optimise(
    network: Fitted,
    features: Tensor,
    target: Tensor,
    held_rows: Tensor,
    held_target: Tensor,
    *,
    max_epochs: int,
    patience: int,
    batch_size: int,
    learning_rate: float,
    verbose: bool,
) -> int:
    """Train the head; at the end it has the weights of the epoch with the best likelihood of the rows held back."""
    head, task = network.head, network.task
    optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
    limit = max_epochs if len(held_rows) else max(1, max_epochs // 4)
    best, best_loss, waited, epochs = copy.deepcopy(head.state_dict()), math.inf, 0, 0
    held = network.scaled(held_rows)
    for _ in tqdm(range(limit), desc="fitting", disable=None if verbose else True, delay=1, leave=False):
        epochs += 1
        head.train()
        for batch in torch.randperm(len(features)).split(batch_size):  # type: ignore[no-untyped-call]
            if len(batch) < 2:
                continue  # batch norm has nothing to compare a single row with
            loss = task.loss(head(features[batch]), target[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if not len(held):
            continue
        head.eval()
        with torch.no_grad():
            found = float(task.loss(head.passes(held, 8).values, held_target))
        waited += 1
        if found < best_loss:
            best, best_loss, waited = copy.deepcopy(head.state_dict()), found, 0
        elif waited >= patience:
            break
    if len(held) and math.isfinite(best_loss):
        head.load_state_dict(best)
    return epochs
