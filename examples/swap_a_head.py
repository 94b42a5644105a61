"""Train a small convolutional network on digits, swap its last layer, and compare both on digits it has never seen.

python examples/swap_a_head.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

from brainet_pl import swap_head

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
known = labels < 8
order = torch.randperm(int(known.sum()))
x, y = images[known][order], labels[known][order]
train_x, train_y, test_x, test_y = x[:1000], y[:1000], x[1000:], y[1000:]
unknown = images[~known]  # eights and nines

network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 8),
)  # fmt: skip


def train(parameters, loss_of, epochs):
    """Adam, batches of 64."""
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(train_x)).split(64):
            optimizer.zero_grad()
            loss_of(train_x[rows], train_y[rows]).backward()
            optimizer.step()


train(network.parameters(), lambda a, b: F.cross_entropy(network(a), b), epochs=15)
network.eval()

brainet = swap_head(network, train_x, num_classes=8, progress=False)
train(brainet.head.parameters(), brainet.train().loss, epochs=15)
brainet.eval()
print(brainet.head)


def tell(name, predict):
    """Negative log-likelihood on known digits, and how well confidence tells unknown ones."""
    with torch.no_grad():
        known_p, unknown_p = predict(test_x), predict(unknown)
    nll = F.nll_loss(known_p.log(), test_y)
    doubt = torch.cat([1 - known_p.amax(1), 1 - unknown_p.amax(1)])
    auroc = roc_auc_score([0] * len(known_p) + [1] * len(unknown_p), doubt)
    print(f"{name:8s} NLL {nll:.3f}, AUROC of unknown digits {100 * auroc:.1f}")


tell("network", lambda a: network(a).softmax(1))
tell("BRAINet", lambda a: brainet.predict(a)["probabilities"])
