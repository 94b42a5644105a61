"""What fits cost in processor time, beside what has to be paid anyway or what a peer takes.

    python benchmarks/costs.py --data DIR                  # docs/results/costs.json, some 20 minutes on one core
    python benchmarks/costs.py --data DIR --only swap      # rows whose name holds a word
    python benchmarks/costs.py --smoke

Rows: `swap_head(…).fit()` on photographs of clothes (EfficientNet-Lite0 at 128 pixels, beside one pass of the network
over the training images) and on embeddings of intents (15,000 of 384 numbers and 150 classes, beside a linear layer);
the classifier on tables (beside gradient boosting); the structure of features. One thread, one process. Seconds of the
processor, so that other programs do not count. Finished rows are kept: delete the file, or give another `--out`, to
measure other code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.command import arguments, parse
from common.store import Cell, Store
from common.tables import table
from PIL import Image
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss
from torch import Tensor, nn
from torchvision import transforms

from brainet_pl import swap_head
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


def swapped(network: nn.Module, train: Pair, held: Pair, test: Pair) -> Cell:
    """`swap_head(…).fit()`: its seconds, those of the network in it and of one pass over the training samples."""
    model = swap_head(network.eval(), train, held=held, progress=False)
    clock = PassClock(model.backbone.model)
    seconds, _ = timed(lambda: model.fit(progress=False))
    one_pass = clock.seconds / clock.rows * len(train[1])
    rest = seconds - clock.seconds
    with torch.no_grad():
        parts = [model.predict(rows)["probabilities"] for rows in test[0].split(256)]  # type: ignore[no-untyped-call]
    nll = nn.functional.nll_loss(torch.cat(parts).clamp_min(1e-30).log(), test[1])
    return {"seconds": seconds, "peer": one_pass, "rest": rest, "ratio": rest / one_pass, "NLL": float(nll)}


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
    features, classes = parts[0][0].shape[1], int(parts[0][1].max()) + 1
    cell = swapped(nn.Sequential(nn.Identity(), nn.Linear(features, classes + 1)), *parts)
    seconds, _ = timed(lambda: fit_softmax(*parts[0], classes))
    return cell | {"peer": seconds, "rest": cell["seconds"], "ratio": cell["seconds"] / seconds}


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
    model, peer = BRAINetClassifier(random_state=0), HistGradientBoostingClassifier(random_state=0)
    seconds, _ = timed(lambda: model.fit(x[:rows], y[:rows]))
    theirs, _ = timed(lambda: peer.fit(x[:rows], y[:rows]))
    loss = float(log_loss(y[rows:], model.predict_proba(x[rows:])))
    return {"seconds": seconds, "peer": theirs, "rest": seconds, "ratio": seconds / theirs, "NLL": loss}


def structure(smoke: bool) -> Cell:
    """The tree of 2,000 rows of 1,024 features that depend on each other; the peer is their correlation matrix."""
    rows, width = (200, 12) if smoke else (2000, 1024)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, width // 4)) @ draw.normal(size=(width // 4, width)) + draw.normal(size=(rows, width))
    seconds, _ = timed(lambda: learn_structure(x.astype(np.float32), progress=False))
    theirs, _ = timed(lambda: np.corrcoef(x.T))
    return {"seconds": seconds, "peer": theirs, "rest": seconds, "ratio": seconds / max(theirs, 1e-9)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the rows that are not finished, and print all."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="measure the rows whose name holds this word")
    args: argparse.Namespace = parse(parser, argv)
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Cell]] = {
        "swap, 1,300 photographs": lambda: photographs(args.data, args.smoke),
        "swap, 15,000 embeddings": lambda: embeddings(args.data, args.smoke),
        "classifier, 1,000 × 20": lambda: tables(1000, args.smoke),
        "classifier, 4,000 × 20": lambda: tables(4000, args.smoke),
        "structure, 2,000 × 1,024": lambda: structure(args.smoke),
    }
    store = Store(args.out / "costs.json", {"smoke": args.smoke})
    shown = []
    for name, make in makers.items():
        if args.only in name:
            cell = store.cell(name, make)
            nll = f"{cell['NLL']:.3f}" if "NLL" in cell else ""
            shown.append([name, *(f"{cell[key]:.1f}" for key in ("seconds", "peer", "rest", "ratio")), nll])
    table(["row", "seconds", "peer", "without the network", "ratio to the peer", "NLL"], shown)


if __name__ == "__main__":
    main()
