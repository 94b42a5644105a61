"""Sentences of 150 intents, and of none: `swap_head` on a small encoder beside other heads on the same embeddings.

    python benchmarks/sentences.py --data DIR     # docs/results/sentences.json, some 10 minutes
    python benchmarks/sentences.py --smoke

CLINC150: 15,000 queries train, 3,000 validate, 4,500 test; no fit sees the 200 queries of no intent (the training and
validation ones of the data set). All heads read the mean of the tokens of a MiniLM of six layers; the row "chosen
layers" reads what `swap_head` chooses by itself. `--data` needs clinc150.json and minilm.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common.command import arguments, parse
from common.store import Store
from common.tables import markdown
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from brainet_pl import TextEncoder, swap_head
from brainet_pl._utils.texts import Texts
from brainet_pl.backbones import Backbone
from brainet_pl.metrics.curves import roc_area

PARTS = ("train", "val", "test")
PENALTIES = (1.0, 10.0, 100.0)  # C of logistic regression, chosen by the NLL of validation queries
LEVEL = 0.05  # of test queries that may be called unknown
STEPS, RATE, SIMILAR = 1500, 1e-3, 0.1  # of the contrastive step, and the temperature of similarities
TITLES = {
    "logistic regression": "logistic regression",
    "contrastive": "a linear map learned by contrast, then logistic regression (as SetFit, without its encoder)",
    "swap_head": "**`swap_head`**, mean of tokens",
    "swap_head, chosen layers": "**`swap_head`**, chosen layers (the default)",
}


class Queries(NamedTuple):
    """Some queries and their intents; those of no intent have the label 0."""

    texts: list[str]
    labels: Tensor


def queries(data: Path | None) -> dict[str, Queries]:
    """Queries by part, and those of no intent as "none"."""
    if data is None:
        words = [("rain", "sun"), ("loan", "bank"), ("goal", "ball")]
        made = [(f"{a} number {i} {w}", y) for i in range(40) for y, ws in enumerate(words) for w in ws for a in "ab"]
        parts = {name: made[place::3] for place, name in enumerate(PARTS)} | {"none": [("zebra crossing", 0)] * 20}
    else:
        content = json.loads((data / "clinc150.json").read_text())
        number = {name: i for i, name in enumerate(sorted({intent for _, intent in content["train"]}))}
        parts = {name: [(text, number[intent]) for text, intent in content[name]] for name in PARTS}
        parts["none"] = [(text, 0) for text, _ in content["oos_train"] + content["oos_val"]]
    return {name: Queries([t for t, _ in rows], torch.tensor([y for _, y in rows])) for name, rows in parts.items()}


def encoder_of(data: Path | None) -> TextEncoder:
    """MiniLM; of a smoke run a network of a few random words."""
    if data is not None:
        return TextEncoder.from_pretrained(data / "minilm")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from brainet_pl._utils.texts import TextSteps

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(
        queries(None)["train"].texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"])
    )
    return TextEncoder(Vectors(words.get_vocab_size()), TextSteps(words.to_str()))


class Vectors(nn.Module):
    """The vectors of words, which stand for an encoder."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token numbers (B, T) → (B, T, 16)."""
        return self.words(input_ids)


# -- heads ------------------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """Probabilities of test queries, and scores of these and of queries of no intent, higher for the unknown."""

    probs: Tensor
    known: Tensor
    strange: Tensor
    noticed: float
    alarms: float
    seconds: float


def told_apart(probs: Tensor, strange: Tensor, held: Tensor, seconds: float) -> Answers:
    """What the largest probability tells; the threshold is that of validation queries."""
    scores = [1 - part.amax(dim=1) for part in (probs, strange, held)]
    limit = scores[2].quantile(1 - LEVEL)
    shares = [float((score > limit).double().mean()) for score in scores]
    return Answers(probs, scores[0], scores[1], shares[1], shares[0], seconds)


def logistic(x: Mapping[str, Tensor], found: Mapping[str, Queries]) -> Answers:
    """Logistic regression with the penalty that validation queries like best."""
    start = time.process_time()
    fits = []
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=300).fit(x["train"].numpy(), found["train"].labels.numpy())
        probs = model.predict_proba(x["val"].numpy())
        chosen = probs[np.arange(len(probs)), found["val"].labels.numpy()]
        fits.append((-float(np.log(chosen.clip(1e-12)).mean()), model))
    best = min(fits, key=lambda fit: fit[0])[1]
    seconds = time.process_time() - start
    probs, strange, held = (torch.from_numpy(best.predict_proba(x[name].numpy())) for name in ("test", "none", "val"))
    return told_apart(probs, strange, held, seconds)


def contrastive(x: Mapping[str, Tensor], found: Mapping[str, Queries]) -> Answers:
    """A linear map by which queries of one intent are alike, and logistic regression on it."""
    start = time.process_time()
    torch.manual_seed(0)
    width, labels = x["train"].shape[1], found["train"].labels
    layer = nn.Linear(width, width, bias=False)
    nn.init.eye_(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters(), RATE)
    for _ in range(STEPS):
        rows = torch.randint(len(labels), (256,))
        z = F.normalize(layer(x["train"][rows]), dim=1)
        alike = (z @ z.T / SIMILAR).fill_diagonal_(-math.inf).log_softmax(dim=1)
        same = (labels[rows][:, None] == labels[rows]).fill_diagonal_(False)
        some = same.any(dim=1)
        loss = -(alike.masked_fill(~same, 0.0).sum(dim=1) / same.sum(dim=1).clamp_min(1))[some].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        mapped = {name: F.normalize(layer(part), dim=1) for name, part in x.items()}
    seconds = time.process_time() - start
    answers = logistic(mapped, found)
    return answers._replace(seconds=answers.seconds + seconds)


def swapped(data: Path | None, found: Mapping[str, Queries], x: Mapping[str, Tensor] | None) -> Answers:
    """`swap_head` on texts with its defaults, or on embeddings, which are texts that were read already."""
    start = time.process_time()
    if x is None:
        model = swap_head(encoder_of(data), found["train"], held=found["val"], head_layer="", progress=False)
        inputs: dict[str, Any] = {name: part.texts for name, part in found.items()}
    else:
        pairs = {name: (x[name], found[name].labels) for name in x}
        model = swap_head(nn.Identity(), pairs["train"], held=pairs["val"], head_layer="", layers=None, progress=False)
        inputs = dict(x)
    model.fit(progress=False)
    seconds = time.process_time() - start
    answers = {name: model.predict(inputs[name]) for name in ("test", "none")}
    unknown = [float((~one["known"]).double().mean()) for one in answers.values()]
    scores = [one["joint"] for one in answers.values()]
    return Answers(answers["test"]["probabilities"], *scores, unknown[1], unknown[0], seconds)


def embeddings(data: Path | None, found: Mapping[str, Queries]) -> tuple[dict[str, Tensor], float]:
    """The mean of the tokens of all queries, and the processor time that this took."""
    body = Backbone(encoder_of(data), head_layer="", layers=None).build()
    start = time.process_time()
    with torch.no_grad():
        loaders = {name: DataLoader(part.texts, batch_size=1024) for name, part in found.items()}
        x = {name: torch.cat([body(Texts(texts)) for texts in loader]) for name, loader in loaders.items()}
    return x, time.process_time() - start


def measured(answers: Answers, labels: Tensor) -> dict[str, float]:
    """The numbers of one row."""
    probs = answers.probs.double()
    chosen = probs.gather(1, labels[:, None]).clamp_min(1e-12)
    return {
        "nll": -float(chosen.log().mean()),
        "error": 100 * float((probs.argmax(dim=1) != labels).double().mean()),
        "auroc": 100 * float(roc_area(answers.known.double(), answers.strange.double())),
        "noticed": 100 * answers.noticed,
        "alarms": 100 * answers.alarms,
        "seconds": answers.seconds,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure all heads; finished ones are kept."""
    args = parse(arguments(__doc__), argv)
    torch.set_num_threads(1)
    store = Store(args.out / "sentences.json", {"steps": STEPS, "smoke": args.smoke})
    found = queries(args.data)
    cells = store.content["cells"]
    x: dict[str, Tensor] = {}
    if not {"logistic regression", "contrastive", "swap_head"} <= set(cells):
        x, seconds = embeddings(args.data, found)
        store.cell("embeddings", lambda: {"seconds": seconds})
    heads: dict[str, Callable[[], Answers]] = {
        "logistic regression": lambda: logistic(x, found),
        "swap_head": lambda: swapped(args.data, found, x),
        "contrastive": lambda: contrastive(x, found),
        "swap_head, chosen layers": lambda: swapped(args.data, found, None),
    }
    for name, make in heads.items():
        cell = store.cell(name, lambda make=make: measured(make(), found["test"].labels))  # type: ignore[misc]
        print(name, cell, flush=True)
    print(summary(cells))


def summary(cells: Mapping[str, Any]) -> str:
    """One row for each head."""
    rows = []
    for name, title in TITLES.items():
        if name in cells:
            cell = cells[name]
            shown = [f"{cell['nll']:.3f}", f"{cell['error']:.1f} %", f"{cell['auroc']:.1f}"]
            shown += [f"{cell['noticed']:.0f} % at {cell['alarms']:.1f} %", f"{cell['seconds']:.0f} s"]
            rows.append([title, *shown])
    header = ["head", "NLL", "error", "AUROC of queries of no intent", "noticed, false alarms", "processor time"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
