"""Train a small convolutional network on digits, swap its last layer, and compare both on digits it has never seen.

The swapped network has had 15 epochs as a network and 15 for its new head; so the fair baseline is the same network
after 30 epochs. Three seeds: split, weights and batches. Three are few: see the spread before you believe a mean.

python examples/swap_a_head.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from brainet_pl import swap_head

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
known, unknown = labels < 8, images[labels >= 8]  # eights and nines are never trained on
told = {}  # name → (NLL, AUROC) of each seed


def train(parameters, loss_of, x, y, epochs):
    """Adam, batches of 64."""
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss_of(x[rows], y[rows]).backward()
            optimizer.step()


def tell(name, predict, test_x, test_y):
    """Negative log-likelihood on known digits, and how well confidence tells unknown ones."""
    with torch.no_grad():
        known_p, unknown_p = predict(test_x), predict(unknown)
    nll = F.nll_loss(known_p.log(), test_y)
    doubt = torch.cat([1 - known_p.amax(1), 1 - unknown_p.amax(1)])
    auroc = roc_auc_score([0] * len(known_p) + [1] * len(unknown_p), doubt)
    told.setdefault(name, []).append((float(nll), 100 * auroc))
    print(f"  {name:24s} NLL {nll:.3f}, AUROC of unknown digits {100 * auroc:.1f}")


for seed in range(3):
    torch.manual_seed(seed)
    order = torch.randperm(int(known.sum()))
    x, y = images[known][order], labels[known][order]
    train_x, train_y, test = x[:1000], y[:1000], (x[1000:], y[1000:])
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8),
    )  # fmt: skip
    train(network.parameters(), lambda a, b, f=network: F.cross_entropy(f(a), b), train_x, train_y, epochs=15)
    longer = copy.deepcopy(network)
    train(longer.parameters(), lambda a, b, f=longer: F.cross_entropy(f(a), b), train_x, train_y, epochs=15)
    brainet = swap_head(network.eval(), train_x, num_classes=8, progress=False)
    train(brainet.head.parameters(), brainet.train().loss, train_x, train_y, epochs=15)
    brainet.eval()
    longer.eval()

    print(f"seed {seed}")
    tell("network, 15 epochs", lambda a, f=network: f(a).softmax(1), *test)
    tell("network, 30 epochs", lambda a, f=longer: f(a).softmax(1), *test)
    tell("swapped, 15 + 15 epochs", lambda a, f=brainet: f.predict(a)["probabilities"], *test)

print("mean of three seeds, and how often it is better than the network after 30 epochs")
fair = told["network, 30 epochs"]
for name, found in told.items():
    nll, auroc = (sum(values) / len(found) for values in zip(*found, strict=True))
    lower, higher = (sum(s * (a[k] - b[k]) > 0 for a, b in zip(found, fair, strict=True)) for k, s in ((0, -1), (1, 1)))
    often = "" if name == "network, 30 epochs" else f"; better in {lower} and {higher} of {len(found)}"
    print(f"  {name:24s} NLL {nll:.3f}, AUROC {auroc:.1f}{often}")
