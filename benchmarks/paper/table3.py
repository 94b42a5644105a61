"""Table 3 in the form two cores allow: calibration error of CIFAR-10 heads on a frozen ResNet-20, beside peers.

    pip install '.[benchmarks]'
    python benchmarks/paper/table3.py --data DIR      # docs/results/table3.json, about 10 minutes

SWA and SWAG come from torch-uncertainty, Laplace from laplace-torch (KFAC on the last layer, as in the paper).
Temperatures are fitted on the 2,000 validation images, the precision of Laplace's prior by the marginal likelihood. SGD
is the public network as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `common` is

import torch
from common.command import arguments, parse
from common.data import Data, cifar_features, last_layer
from common.measures import quality_of
from common.store import Cell, Store
from common.tables import spread, table
from common.training import outputs_of, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import uncertainty
from brainet_pl.calibration.temperature import fit_temperature, scale
from brainet_pl.network import BRAINetHead, LinearHead, MLPHead
from brainet_pl.structure import learn_structure

BUDGET, PASSES = 16_000, 15
THRESHOLD, DROPOUT, RATE, UNIFORM = 0.12, 0.35, 0.5, float("inf")  # as chosen on validation data by table1.py
PAPER = {"SGD": 0.0255, "SWA": 0.0203, "SWAG": 0.0053, "KFAC-Laplace": 0.0092, "SWA-Dropout": 0.0162}
PAPER |= {"SWA-Temp": 0.0172, "BRAINet": 0.0036}  # CIFAR-10, PreResNet-164
Predict = Callable[[Tensor], Tensor]


def averaged(data: Data, start: nn.Linear, epochs: int, seed: int) -> dict[str, Predict]:
    """SWA and SWAG of the last layer: SGD with a high constant rate from the trained weights, one snapshot an epoch."""
    from torch_uncertainty.methods import SWA, SWAG

    torch.manual_seed(seed)
    core = nn.Linear(64, 10)
    core.load_state_dict(start.state_dict())
    swa, swag = SWA(core, 0, 1), SWAG(core, 0, 1, num_estimators=PASSES)
    optimizer = torch.optim.SGD(core.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    x, y = data.train
    draw = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for rows in torch.randperm(len(x), generator=draw).split(256):
            optimizer.zero_grad()
            F.cross_entropy(core(x[rows]), y[rows]).backward()
            optimizer.step()
        swa.update_wrapper(epoch)
        swag.update_wrapper(epoch)

    def by_swag(v: Tensor) -> Tensor:
        return swag.eval().eval_forward(v).view(PASSES, len(v), -1).softmax(-1).mean(0)

    return {"SWA": lambda v: swa.eval().eval_forward(v).softmax(-1), "SWAG": by_swag}


def laplace(data: Data, start: nn.Linear) -> Predict:
    """Laplace's approximation around the network's own last layer."""
    from laplace import Laplace

    fitted = Laplace(start, "classification", subset_of_weights="all", hessian_structure="kron")
    fitted.fit(DataLoader(TensorDataset(*data.plain), batch_size=1000))
    fitted.optimize_prior_precision(method="marglik")
    return lambda x: torch.cat([fitted(part, pred_type="glm", link_approx="probit").detach() for part in x.split(1000)])


def main(argv: Sequence[str] | None = None) -> None:
    """Fit everything, print ECE, NLL and error."""
    args = parse(arguments(__doc__, epochs=6, seeds=3), argv)
    settings = {"budget": BUDGET, "epochs": args.epochs, "threshold": THRESHOLD, "dropout": DROPOUT, "rate": RATE}
    store = Store(args.out / "table3.json", settings)
    data = cifar_features(args.data, args.cache)
    layer = last_layer(args.data)
    tree = learn_structure(
        data.plain[0], bootstrap="paper", test="gaussian", threshold=THRESHOLD, s=2, max_order=1, progress=False
    )
    heads: dict[str, Callable[[], nn.Module]] = {
        "linear, trained again": lambda: LinearHead(64, 10),
        "MC-dropout": lambda: MLPHead(64, 10, BUDGET, 2, RATE),
        "BRAINet": lambda: BRAINetHead(tree, 10, num_params=BUDGET, temperature=UNIFORM),
        "BRAINet + dropout": lambda: BRAINetHead(tree, 10, num_params=BUDGET, dropout=DROPOUT, temperature=UNIFORM),
    }

    def judged(predict: Predict) -> dict[str, Cell]:
        """Test quality as predicted, and at a temperature fitted on validation data."""
        with torch.no_grad():
            val, test = predict(data.val[0]), predict(data.test[0])
        tau = fit_temperature(val, data.val[1])
        return {"": quality_of(test, data.test[1]), " + temperature": quality_of(scale(test, tau), data.test[1])}

    def trained(make: Callable[[], nn.Module], seed: int, name: str) -> dict[str, Cell]:
        torch.manual_seed(seed)
        head = train(make(), *data.train, epochs=args.epochs, seed=seed, name=f"{name} {seed}")
        return judged(lambda x: uncertainty.predictive(outputs_of(head, x, PASSES, seed=seed).softmax(-1)))

    cells: dict[str, list[Cell]] = {}
    fixed: dict[str, Callable[[], Predict]] = {"SGD": lambda: lambda x: layer(x).softmax(-1)}
    fixed["Laplace, last layer"] = lambda: laplace(data, layer)
    for name, make in fixed.items():
        for suffix, cell in store.cell(name, lambda m=make: judged(m())).items():
            cells.setdefault(name + suffix, []).append(cell)
    for seed in range(args.seeds):
        if f"SWAG/{seed}" not in store.content["cells"]:
            for name, predict in averaged(data, layer, 10, seed).items():
                store.cell(f"{name}/{seed}", lambda p=predict: judged(p))
        for name in ("SWA", "SWAG"):
            for suffix, cell in store.content["cells"][f"{name}/{seed}"].items():
                cells.setdefault(name + suffix, []).append(cell)
        for name, head in heads.items():
            found = store.cell(f"{name}/{seed}", lambda h=head, s=seed, n=name: trained(h, s, n))
            for suffix, cell in found.items():
                cells.setdefault(name + suffix, []).append(cell)
    rows = [
        [
            name,
            *(spread([c[k] for c in found], digits=d) for k, d in (("ece", 4), ("nll", 4), ("brier", 4), ("err", 2))),
        ]
        for name, found in cells.items()
    ]
    table(["method", "ECE", "NLL", "Brier", "error %"], rows)
    print("\nThe paper's ECE, CIFAR-10 with PreResNet-164: " + ", ".join(f"{k} {v:.4f}" for k, v in PAPER.items()))


if __name__ == "__main__":
    main()
