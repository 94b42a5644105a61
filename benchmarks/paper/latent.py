"""Mutual information over the 2-d latent space of a VAE on MNIST (Appendix C, Figure 2).

    python benchmarks/paper/latent.py --data DIR          # docs/results/latent.{json,png}, about 10 minutes

A VAE with two latent variables is trained on MNIST; a BRAINet (s = 2) classifies the pixels. Every point of the latent
space is decoded, and the picture shows how much the sub-networks disagree about it, with the training data's own codes
on top: between and beyond the classes the disagreement should be high.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import torch
from common.command import arguments, parse
from common.data import mnist_pixels
from common.measures import quality
from common.store import Store
from common.training import outputs_of, train
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from brainet_pl import uncertainty
from brainet_pl.metrics.curves import separation
from brainet_pl.network import BRAINetHead
from brainet_pl.structure import learn_structure

SIDE, GRID = 10.0, 100  # the paper's: 100 values in [-10, 10]


class VAE(nn.Module):
    """Pixels → 400 → 2 latent variables → 400 → 400 → pixels (Kingma & Welling 2014)."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 400), nn.ReLU(), nn.Linear(400, 4))
        layers = nn.Linear(2, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, pixels)
        self.decoder = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """(B, pixels) → (B, pixels + 4): logits of the pixels, means and log variances of the code."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.cat([self.decoder(z), mean, log_variance], dim=1)


def bound(outputs: Tensor, x: Tensor) -> Tensor:
    """Minus the evidence lower bound, in nats an image."""
    pixels, mean, log_variance = outputs.split([x.shape[1], 2, 2], dim=1)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(dim=1)
    return (F.binary_cross_entropy_with_logits(pixels, x, reduction="none").sum(dim=1) + divergence).mean()


def main(argv: Sequence[str] | None = None) -> None:
    """Train both, draw the map."""
    args = parse(arguments(__doc__), argv)
    store = Store(args.out / "latent.json", {"epochs": args.epochs, "grid": GRID, "side": SIDE})
    (x, y), (x_test, y_test) = mnist_pixels(args.data)
    torch.manual_seed(0)
    vae = VAE(x.shape[1])
    train(vae, x, x, epochs=args.epochs, loss=bound, name="VAE")
    ggt = learn_structure(x, bootstrap="paper", test="gaussian", threshold=0.1, s=2, max_rows=20_000)
    head = BRAINetHead(ggt, 10, num_params=480_000)
    train(head, x, y, epochs=args.epochs, decay=True, name="BRAINet")
    side = torch.linspace(-SIDE, SIDE, GRID)
    z = torch.cartesian_prod(side, side)
    with torch.no_grad():
        images = vae.decoder(z).sigmoid()
        codes = vae.encoder(x[:6000])[:, :2]
        known = outputs_of(head, x_test)
        information = uncertainty.mutual_information(outputs_of(head, images).softmax(-1))
        inside = uncertainty.mutual_information(known.softmax(-1))
    nearest = torch.cdist(z, codes).amin(dim=1)
    far, near = information[nearest > 1.0], information[nearest <= 0.25]
    facts = quality(known, y_test) | {
        "mean MI of test images": inside.mean().item(),
        "mean MI near the data": near.mean().item(),
        "mean MI far from the data": far.mean().item(),
        "AUROC far against near": separation(near, far)["AUROC"],
        "sub-networks": float(ggt.num_subnetworks),
        "log perplexity": math.log(ggt.perplexity()),
    }
    store.content["cells"] = facts
    store.save()
    for name, value in facts.items():
        print(f"{name:<28}{value:.4g}")
    draw(codes, y[:6000], images, z, information).savefig(args.out / "latent.png", dpi=130)


def draw(codes: Tensor, labels: Tensor, images: Tensor, z: Tensor, information: Tensor) -> Figure:
    """The map, with six decoded images of high and six of low disagreement around it."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.add_gridspec(6, 9)
    axes = figure.add_subplot(grid[:, :6])
    plane = information.view(GRID, GRID).t()
    bounds = (-SIDE, SIDE, -SIDE, SIDE)
    scale = PowerNorm(0.35, vmin=0.0)  # the ridges between classes are low beside those far out
    shown = axes.imshow(plane, origin="lower", extent=bounds, cmap="magma", aspect="auto", norm=scale)
    axes.scatter(*codes.t(), c=labels, cmap="tab10", s=2, alpha=0.6, vmin=0, vmax=9)
    axes.set(xlabel="latent variable 1", ylabel="latent variable 2", xlim=(-SIDE, SIDE), ylim=(-SIDE, SIDE))
    figure.colorbar(shown, ax=axes, label="mutual information (nats)", shrink=0.8)
    within = torch.cdist(z, codes).amin(dim=1) < 2.0
    candidates = torch.nonzero(within).squeeze(1)
    order = candidates[information[candidates].argsort()]
    high, low = order[-len(order) // 20 :: max(1, len(order) // 120)], order[:: max(1, len(order) // 60)]
    picks = torch.cat([high[:6], low[:6]])
    for k, i in enumerate(picks.tolist()):
        small = figure.add_subplot(grid[k % 6, 7 + k // 6])
        small.imshow(images[i].view(math.isqrt(images.shape[1]), -1), cmap="gray_r")
        small.set(xticks=[], yticks=[])
        letter = "ABCDEFGHIJKL"[k]
        small.set_title(f"{letter}  MI {information[i]:.3f}", fontsize=7)
        axes.text(*z[i].tolist(), letter, color="white", fontsize=9, fontweight="bold", ha="center", va="center")
    return figure


if __name__ == "__main__":
    main()
