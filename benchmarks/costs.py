"""What fits cost in processor time, beside what has to be paid anyway or what a peer takes.

    python benchmarks/costs.py --data DIR                  # docs/results/costs.json, some 20 minutes on one core
    python benchmarks/costs.py --data DIR --only swap      # rows whose name holds a word
    python benchmarks/costs.py --smoke

Rows: `swap_head(…).fit()` on photographs of clothes (EfficientNet-Lite0 at 128 pixels, beside one pass of the network
over the training images), on embeddings of intents (15,000 of 384 numbers and 150 classes) and on made ones of 1,000
classes (beside a linear layer); the classifier on tables (beside gradient boosting, or logistic regression where there
are more columns than rows); the structure of features (beside their correlations); `rai` of categories (beside BOSS of
causal-learn, where it is installed); `brainet test` (beside the imports that it needs). One thread, and a process for
each row. Seconds of the processor, so that other programs do not count; on a machine that has much to do they still
grow by a half, and the peer's with them. Memory is what the process grew by at its peak. Finished rows are kept: delete
the file, or give another `--out`, to measure other code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.command import arguments, parse
from common.store import Cell, Store
from common.tables import table
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torchvision import transforms

from brainet_pl import swap_head
from brainet_pl.graphs import rai
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.structure import learn_structure
from brainet_pl.tasks.linear import fit_softmax

Pair = tuple[Tensor, Tensor]
SIZE = 128  # pixels
IMAGES = 1300  # that are trained on; as many as a small shop has


class PassClock:
    """Counts the seconds and rows of the passes of a network."""

    def __init__(self, network: nn.Module) -> None:
        self.seconds, self.rows, self._start = 0.0, 0, 0.0
        network.register_forward_pre_hook(self._begin)
        network.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._start = time.process_time()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.seconds += time.process_time() - self._start
        self.rows += len(inputs[0])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor that a call takes, and what it gives."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def peak() -> float:
    """The most memory that this process had at once, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process_of_its_own(make: Callable[[], Cell]) -> Cell:
    """What `make` gives in a copy of this process, so that no row has the memory of another."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(make)


def swapped(network: nn.Module, train: Pair, held: Pair, test: Pair) -> Cell:
    """`swap_head(…).fit()`: its seconds, those of the network in it and of one pass over the training samples."""
    model = swap_head(network.eval(), train, held=held, progress=False)
    clock = PassClock(model.backbone.model)
    before = peak()
    seconds, _ = timed(lambda: model.fit(progress=False))
    memory = peak() - before
    one_pass = clock.seconds / clock.rows * len(train[1])
    rest = seconds - clock.seconds
    with torch.no_grad():
        parts = [model.predict(rows)["probabilities"] for rows in test[0].split(256)]  # type: ignore[no-untyped-call]
    nll = nn.functional.nll_loss(torch.cat(parts).clamp_min(1e-30).log(), test[1])
    cell = {"seconds": seconds, "peer": one_pass, "rest": rest, "ratio": rest / one_pass, "NLL": float(nll)}
    return cell | {"memory": memory}


def photographs(data: Path, smoke: bool) -> Cell:
    """Photographs of clothes; the peer is one pass of the network over the training images."""
    if smoke:
        body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        y = torch.arange(300) % 2
        x = torch.randn(300, 3, 8, 8) + y[:, None, None, None]
        return swapped(body, (x[:150], y[:150]), (x[150:250], y[150:250]), (x[250:], y[250:]))
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(data / "efficientnet_lite0.pth", weights_only=True))
    files = sorted((data / "clothing").glob("*/*/*.jpg"))
    names = sorted({path.parent.name for path in files})
    order = np.random.default_rng(0).permutation(len(files))
    prepare = transforms.Compose(
        [
            transforms.Resize(SIZE),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )

    def read(rows: Sequence[int]) -> Pair:
        chosen = [files[row] for row in rows]
        x = torch.stack([prepare(Image.open(path).convert("RGB")) for path in chosen])
        return x, torch.tensor([names.index(path.parent.name) for path in chosen])

    held = IMAGES + 230
    return swapped(network, read(order[:IMAGES]), read(order[IMAGES:held]), read(order[held : held + 800]))


def embeddings(data: Path, smoke: bool) -> Cell:
    """Sentences of 150 intents as 384 numbers; the peer is a linear layer with a penalty that is chosen."""
    if smoke:
        y = torch.arange(400) % 4
        x = torch.randn(400, 8) + 2 * nn.functional.one_hot(y, 8)
        parts = [(x[part], y[part]) for part in (slice(200), slice(200, 300), slice(300, 400))]
    else:
        parts = intents(data)
    return beside_linear(parts)


def many_classes(smoke: bool) -> Cell:
    """Normal features of 1,000 classes whose means lie close together; the peer is a linear layer."""
    rows, width, classes = (300, 8, 12) if smoke else (50_000, 384, 1000)
    generator = torch.Generator().manual_seed(0)
    means = 0.35 * torch.randn(classes, width, generator=generator)

    def draw(count: int) -> Pair:
        y = torch.arange(count) % classes
        return means[y] + torch.randn(count, width, generator=generator), y

    return beside_linear([draw(rows), draw(max(rows // 10, 60)), draw(max(rows // 20, 60))])


def beside_linear(parts: Sequence[Pair]) -> Cell:
    """`swap_head(…).fit()` of features; the peer is a linear layer with a penalty that is chosen."""
    features, classes = parts[0][0].shape[1], int(parts[0][1].max()) + 1
    cell = swapped(nn.Sequential(nn.Identity(), nn.Linear(features, classes + 1)), *parts)
    seconds, _ = timed(lambda: fit_softmax(*parts[0], classes))
    return cell | {"peer": seconds, "rest": cell["seconds"], "ratio": cell["seconds"] / max(seconds, 1e-9)}


def intents(data: Path) -> list[Pair]:
    """The embeddings of the sentences of clinc150.json by MiniLM, made once and kept beside the data."""
    kept = data / "cache" / "intents.pt"
    if not kept.is_file():
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(data / "minilm")
        encoder = AutoModel.from_pretrained(data / "minilm").eval()
        content = json.loads((data / "clinc150.json").read_text())
        names = sorted({intent for _, intent in content["train"]})
        found = []
        for part in ("train", "val", "test"):
            labels = torch.tensor([names.index(intent) for _, intent in content[part]])
            found.append((_encode(tokenizer, encoder, [text for text, _ in content[part]]), labels))
        kept.parent.mkdir(exist_ok=True)
        torch.save(found, kept)
    return list(torch.load(kept, weights_only=True))


@torch.no_grad()
def _encode(tokenizer: Any, encoder: Any, texts: list[str]) -> Tensor:
    """Sentences → (N, d), the mean over words."""
    rows = []
    for first in range(0, len(texts), 128):
        words = tokenizer(texts[first : first + 128], padding=True, truncation=True, return_tensors="pt")
        mask = words["attention_mask"][..., None]
        rows.append((encoder(**words).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def tables(rows: int, smoke: bool) -> Cell:
    """The classifier on a table of 20 columns; the peer is gradient boosting."""
    rows = 120 if smoke else rows
    x, y = make_classification(2 * rows, 20, n_informative=8, n_classes=3, random_state=0)
    return classifier(x, y, HistGradientBoostingClassifier(random_state=0))


def wide_table(smoke: bool) -> Cell:
    """The classifier on 600 rows of 2,000 columns, of which 40 say something; the peer is logistic regression."""
    rows, width, inform = (60, 40, 5) if smoke else (600, 2000, 20)
    x, y = make_classification(2 * rows, width, n_informative=inform, n_redundant=inform, random_state=0)
    penalties = np.logspace(-5, 1, 7)
    linear = LogisticRegressionCV(Cs=penalties, cv=5, scoring="neg_log_loss", max_iter=200)
    return classifier(x, y, make_pipeline(StandardScaler(), linear))


def classifier(x: NDArray[Any], y: NDArray[Any], peer: Any) -> Cell:
    """The classifier beside another; it learns from the first half of the rows, and the others judge."""
    rows, before = len(x) // 2, peak()
    model = BRAINetClassifier(random_state=0)
    seconds, _ = timed(lambda: model.fit(x[:rows], y[:rows]))
    memory = peak() - before
    theirs, _ = timed(lambda: peer.fit(x[:rows], y[:rows]))
    loss, their_loss = (float(log_loss(y[rows:], each.predict_proba(x[rows:]))) for each in (model, peer))
    cell = {"seconds": seconds, "peer": theirs, "rest": seconds, "ratio": seconds / theirs, "memory": memory}
    return cell | {"NLL": loss, "peer NLL": their_loss}


def structure(width: int, smoke: bool) -> Cell:
    """The tree of 2,000 rows of features that depend on each other; the peer is their correlation matrix."""
    rows, width = (200, 12) if smoke else (2000, width)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, width // 4)) @ draw.normal(size=(width // 4, width)) + draw.normal(size=(rows, width))
    before = peak()
    seconds, _ = timed(lambda: learn_structure(x.astype(np.float32), progress=False))
    memory = peak() - before
    theirs, _ = timed(lambda: np.corrcoef(x.T))
    cell = {"seconds": seconds, "peer": theirs, "rest": seconds, "ratio": seconds / max(theirs, 1e-9)}
    return cell | {"memory": memory}


def categories(rows: int, smoke: bool) -> Cell:
    """`rai` of 109 columns of up to 63 values; the peer is BOSS, and nothing where causal-learn is not installed."""
    x = many_values(rows, 8 if smoke else 109)
    before = peak()
    seconds, _ = timed(lambda: rai(x, test="g2"))
    cell = {"seconds": seconds, "peer": 0.0, "rest": seconds, "ratio": 0.0, "memory": peak() - before}
    if smoke:
        return cell | {"ratio": 1.0}
    try:
        from peers import causal_learn_boss

        theirs, _ = timed(lambda: causal_learn_boss(x, "local_score_BDeu"))
    except ImportError:
        return cell
    return cell | {"peer": theirs, "ratio": seconds / theirs}


def many_values(rows: int, columns: int) -> NDArray[np.int64]:
    """Categories (N, d): the first column has 63 values, each other has 2 to 30 and depends on one or two before it."""
    draw = np.random.default_rng(0)
    levels = np.concatenate([[63], draw.choice([2, 3, 3, 4, 4, 5, 6, 8, 12, 30], columns - 1)])
    x = np.zeros((rows, columns), dtype=np.int64)
    x[:, 0] = draw.integers(63, size=rows)
    for column in range(1, columns):
        parents = [0] if column < 40 else draw.choice(column, draw.integers(1, 3), replace=False).tolist()
        if np.prod(levels[parents]) > 200:
            parents = parents[:1]
        table = draw.dirichlet(np.full(levels[column], 0.3), size=tuple(levels[parents]))
        shares = table[tuple(x[:, parent] for parent in parents)].cumsum(axis=1)
        x[:, column] = (draw.random((rows, 1)) > shares[:, :-1]).sum(axis=1)
    return x


def test_of_digits(smoke: bool) -> Cell:
    """`brainet test` of a checkpoint of digits; the peer is the imports of the libraries that it needs."""
    brainet = [sys.executable, "-m", "brainet_pl.cli"]
    with tempfile.TemporaryDirectory() as folder:
        test = [*brainet, "--help"]
        if not smoke:
            in_another([*brainet, "fit", "--config", "digits", "--trainer.max_epochs", "1"], folder)
            checkpoint = next(Path(folder).rglob("last.ckpt"))
            test = [*brainet, "test", "--ckpt_path", str(checkpoint)]
        seconds = in_another(test, folder)
        needs = "json" if smoke else "pytorch_lightning, torchvision, wandb"
        theirs = in_another([sys.executable, "-c", f"import {needs}"], folder)
    return {"seconds": seconds, "peer": theirs, "rest": seconds, "ratio": seconds / theirs}


def in_another(command: Sequence[str], folder: str) -> float:
    """Seconds of the processor that another program takes, started in a folder."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the rows that are not finished, and print all."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="measure the rows whose name holds this word")
    args: argparse.Namespace = parse(parser, argv)
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Cell]] = {
        "swap, 1,300 photographs": partial(photographs, args.data, args.smoke),
        "swap, 15,000 embeddings": partial(embeddings, args.data, args.smoke),
        "swap, 1,000 classes": partial(many_classes, args.smoke),
        "classifier, 1,000 × 20": partial(tables, 1000, args.smoke),
        "classifier, 4,000 × 20": partial(tables, 4000, args.smoke),
        "classifier, 100,000 × 20": partial(tables, 100_000, args.smoke),
        "classifier, 600 × 2,000": partial(wide_table, args.smoke),
        "structure, 2,000 × 1,024": partial(structure, 1024, args.smoke),
        "structure, 2,000 × 4,096": partial(structure, 4096, args.smoke),
        "rai, 500 × 109": partial(categories, 500, args.smoke),
        "rai, 5,000 × 109": partial(categories, 5000, args.smoke),
        "brainet test": partial(test_of_digits, args.smoke),
    }
    store = Store(args.out / "costs.json", {"smoke": args.smoke})
    shown = []
    for name, make in makers.items():
        if args.only in name:
            cell = store.cell(name, partial(in_process_of_its_own, make))
            numbers = [f"{cell[key]:.1f}" for key in ("seconds", "peer", "rest", "ratio")]
            memory = f"{cell['memory']:,.0f}" if "memory" in cell else ""
            shown.append(
                [name, *numbers, memory, *(f"{cell[k]:.3f}" if k in cell else "" for k in ("NLL", "peer NLL"))]
            )
    titles = ["row", "seconds", "peer", "without the network", "ratio to the peer", "MiB", "NLL", "of the peer"]
    table(titles, shown)


if __name__ == "__main__":
    main()
