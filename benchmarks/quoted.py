"""Numbers in sentences of README and docs, and where in docs/results each comes from; `pages.py` compares them.

A sentence is not written by a program: if a number changes, `make results-pages` and the fast tests name the page, and
say what it should say. A new one: the words around it with {} in its place, the file, and a function of its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from common.pages import Quoted, benchmark

Cells = Mapping[str, Any]
Number = Callable[[Cells], float | str]
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
README, LIMITS = "README.md", "docs/explanation/limits.md"
SWAP, UNKNOWN, PRETRAINED = "docs/howto/swap.md", "docs/howto/unknown.md", "docs/tutorials/pretrained.md"
DEFAULTS, HONEST = "docs/benchmarks/defaults.md", "docs/benchmarks/honest.md"
MEASUREMENTS = "docs/benchmarks/measurements.md"
BATTERY, PRODUCTION = "docs/benchmarks/battery.md", "docs/howto/production.md"


def plain(value: float, digits: int) -> str:
    """A number without the zero in front, as pages write shares.

    >>> plain(0.119, 3), plain(1.5, 1)
    ('.119', '1.5')
    """
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def quotes(page: str, file: str, said: Iterable[tuple[str, Number, str]]) -> list[Quoted]:
    """Sentences of one page that repeat numbers of one file."""
    return [Quoted(page, sentence, file, number, form) for sentence, number, form in said]


# -- honest predictions, calibration under shift ----------------------------------------------------------------------


def of_cifar(row: str, key: str, digits: int | None = None) -> Number:
    """A number of benchmarks/honest.py on CIFAR-10."""

    def number(cells: Cells) -> float | str:
        value: float = cells["cifar"][row][key]
        return value if digits is None else plain(value, digits)

    return number


def fitted(key: str) -> Number:
    """A number of benchmarks/tempered.py: `DensityScaling` as it is fitted by default; "ratio" is to temperature's."""

    def number(cells: Cells) -> float:
        script = benchmark("tempered")
        point = next(point for point in cells[script.OURS] if point["dial"] == script.SHOWN)
        return float(point["ece"] / cells["temperature scaling"][0]["ece"] if key == "ratio" else point[key])

    return number


def at_one_percent(row: str) -> Number:
    """The calibration error of a method under corruption, at a price of 1 % on test images."""

    def number(cells: Cells) -> str:
        script = benchmark("tempered")
        return plain(script.at_budget([script.Point(**cell) for cell in cells[row]]).ece, 3)

    return number


OURS_AT, MORE, TEMPERATURE = "stages, learned, 0.01", "stages, learned, 0.04", "temperature scaling"
SHIFT = [
    *quotes(README, "tempered.json", [("| {} of its calibration error", fitted("ratio"), "{:.2f}")]),
    *quotes(README, "tempered.json", [("at a price of {} in the NLL of clean test", fitted("price"), "{:.1%}")]),
    *quotes(
        UNKNOWN,
        "tempered.json",
        [
            ("calibration error under corruption ({}) than these", at_one_percent("`DensityScaling`, stages"), "{}"),
            ("({} by the first neighbour;", at_one_percent("density-aware calibration, k = 1"), "{}"),
            ("neighbour; {} by the 50th", at_one_percent("density-aware calibration, k = 50"), "{}"),
            ("({} of all stages,", at_one_percent("k-NN tempering, all stages"), "{}"),
            ("stages, {} of the last layer)", at_one_percent("k-NN tempering, last layer"), "{}"),
            ("five heads ({}, at", at_one_percent("ensemble of 5 heads"), "{}"),
            ("Density-Softmax ({}) is two", at_one_percent("Density-Softmax"), "{}"),
            ("as fitted** is {} on test images", fitted("price"), "{:.1%}"),
        ],
    ),
    *quotes(
        HONEST,
        "honest.json",
        [
            ("falls to {} of temperature scaling's", of_cifar(OURS_AT, "shifted ece ratio"), "{:.3f}"),
            ("at `cost=0.04` to {},", of_cifar(MORE, "shifted ece ratio", 2), "{}"),
            ("at the highest severity to {};", of_cifar(MORE, "worst ece ratio", 2), "{}"),
            ("a mean confidence of {} in the place", of_cifar(MORE, "svhn confidence", 2), "{}"),
            ("in the place of {}, and the largest", of_cifar(TEMPERATURE, "svhn confidence", 2), "{}"),
            ("with an AUROC of {} in the place", of_cifar(MORE, "svhn auroc"), "{:.1f}"),
            ("in the place of {}. Clean ECE", of_cifar(TEMPERATURE, "svhn auroc"), "{:.1f}"),
        ],
    ),
    *quotes(LIMITS, "honest.json", [("of them 1 % became {} on test images", of_cifar(OURS_AT, "cost"), "{:.1%}")]),
]

# -- heads with their defaults, tables that nobody tuned --------------------------------------------------------------

HEADS = ("BRAINet", "BRAINet, shuffled", "linear", "MLP", "MC-dropout", "ensemble", "Bayes")


def losses(cells: Cells, task: str, head: str) -> list[float]:
    """Test NLL of all seeds."""
    return [cells[key]["test"]["nll"] for key in sorted(cells) if key.rsplit("/", 1)[0] == f"{task}/{head}"]


def last_layer(choose: Callable[[Sequence[float]], float], *heads: str) -> Number:
    """The mean test NLL on the last layer of the ResNet-20, of one head or chosen of several."""
    return lambda cells: choose([fmean(losses(cells, "last layer, 50,000", head)) for head in heads])


def tasks_first(cells: Cells) -> tuple[int, int]:
    """On how many tasks BRAINet is first, or within a standard error of the first, of how many; no control counts."""
    script, tasks = benchmark("defaults"), {key.split("/")[0] for key in cells}
    ahead = 0
    for task in tasks:
        best = min(HEADS[2:], key=lambda head: fmean(losses(cells, task, head)))
        ahead += script.outcome(script.paired(losses(cells, task, "BRAINet"), losses(cells, task, best))) != "loss"
    return ahead, len(tasks)


def in_words(cells: Cells) -> str:
    """`tasks_first` as README says it."""
    ahead, tasks = tasks_first(cells)
    return f"{WORDS[ahead]} of the {WORDS[tasks]}"


def in_figures(cells: Cells) -> str:
    """`tasks_first` as a page of benchmarks says it."""
    ahead, tasks = tasks_first(cells)
    return f"{ahead} of {tasks}"


def wired(cells: Cells) -> list[str]:
    """The tasks on which the learned wiring is ahead of the shuffled one by two standard errors."""
    paired, ahead = benchmark("defaults").paired, []
    for task in sorted({key.split("/")[0] for key in cells}):
        found = paired(losses(cells, task, HEADS[0]), losses(cells, task, HEADS[1]))
        if found.mean < -2 * found.error:
            ahead.append(task)
    return ahead


def wired_tasks(cells: Cells) -> str:
    """Where README says that the wiring matters, if that is where it does; else where it does."""
    named = {"MNIST 5,000", "MNIST 60,000", "stage 3, 4,000"}
    found = wired(cells)
    return "MNIST and on a ResNet's third stage" if set(found) == named else ", ".join(found)


def ratios(cells: Cells) -> list[float]:
    """The loss of BRAINet on each table of the battery, to that of the best peer."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, cell in cells.items():
        if key.startswith("quality/"):
            _, task, head, _ = key.split("/")
            found.setdefault(task, {}).setdefault(head, []).append(cell.get("log_loss", cell.get("rmse")))
    means = [{head: fmean(values) for head, values in heads.items()} for heads in found.values()]
    return [heads.pop("BRAINet") / min(heads.values()) for heads in means]


def tables_behind(cells: Cells) -> str:
    """On how many tables the best peer's loss is lower by more than 5 % of it."""
    found = ratios(cells)
    return f"{WORDS[sum(one > 1.05 for one in found)]} of {'twenty' if len(found) == 20 else len(found)}"


OTHERS = ("MLP", "MC-dropout", "ensemble", "Bayes")
COMPARED = [
    *quotes(README, "defaults.json", [("on {} the same head with shuffled wiring is worse", wired_tasks, "{}")]),
    *quotes(DEFAULTS, "defaults.json", [("of the first, on {} tasks.", in_figures, "{}")]),
    *quotes(DEFAULTS, "defaults.json", [("on {} tasks**", lambda cells: len(wired(cells)), "{}")]),
    *quotes(README, "battery.json", [("on {} by more than 5 %", tables_behind, "{}")]),
    *quotes(
        BATTERY,
        "battery.json",
        [
            ("best peer on {} of", lambda cells: sum(one <= 1.05 for one in ratios(cells)), "{}"),
            ("ahead of all peers on {}**", lambda cells: sum(one < 1 for one in ratios(cells)), "{}"),
            ("at the most {} times the best", lambda cells: max(ratios(cells)), "{:.2f}"),
        ],
    ),
    *quotes(DEFAULTS, "defaults.json", [("layer is better** ({} against", last_layer(min, "linear"), "{:.3f}")]),
    *quotes(DEFAULTS, "defaults.json", [("against {}), and than all", last_layer(min, "BRAINet"), "{:.3f}")]),
    *quotes(LIMITS, "defaults.json", [("NLL {} linear,", last_layer(min, "linear"), "{:.3f}")]),
    *quotes(LIMITS, "defaults.json", [("linear, {} to", last_layer(min, *OTHERS), "{:.3f}")]),
    *quotes(LIMITS, "defaults.json", [("to {} the others,", last_layer(max, *OTHERS), "{:.3f}")]),
    *quotes(LIMITS, "defaults.json", [("the others, {} a BRAINet", last_layer(min, "BRAINet"), "{:.3f}")]),
]

# -- swapped heads ----------------------------------------------------------------------------------------------------


def folds(cells: Cells, key: str, name: str) -> list[float]:
    """A number of every fold in which a cell of benchmarks/swap.py was measured."""
    return [cell[name] for at, cell in sorted(cells.items()) if at.rsplit("/", 1)[0] == key]


def swapped(key: str, name: str = "nll", first: int | None = None) -> Number:
    """The mean over folds, all or the first few."""
    return lambda cells: fmean(folds(cells, key, name)[:first])


def less(cells: Cells) -> float:
    """How much lower the NLL of a BRAINet on chosen layers is than that of a linear layer on the last."""
    return 1 - fmean(folds(cells, "clothing/auto/BRAINet", "nll")) / fmean(folds(cells, "clothing/last/Linear", "nll"))


def apart(layers: str, head: str) -> Number:
    """The size of the paired difference in NLL between a BRAINet and another head, ± its standard error."""

    def number(cells: Cells) -> str:
        ours, theirs = (folds(cells, f"clothing/{layers}/{one}", "nll") for one in ("BRAINet", head))
        found = benchmark("defaults").paired(ours, theirs)
        return f"{abs(found.mean):.3f} ± {found.error:.3f}"

    return number


SWAPPED = quotes(
    SWAP,
    "swap.json",
    [
        ("`fit` chooses has {} less NLL", less, "{:.0%}"),
        ("the last one ({} against", swapped("clothing/auto/BRAINet"), "{:.3f}"),
        ("against {}), and", swapped("clothing/last/Linear"), "{:.3f}"),
        ("and {} in place of", swapped("clothing/auto/BRAINet", "err"), "{:.1f}"),
        ("in place of {} % errors", swapped("clothing/last/Linear", "err"), "{:.1f}"),
        ("the benchmark chose has {};", swapped("clothing/auto/BRAINet", first=2), "{:.3f}"),
        ("than the ensemble's by {},", apart("last", "Ensemble"), "{}"),
        ("the linear layer's by {},", apart("last", "Linear"), "{}"),
        ("an MLP's by {} and", apart("last", "MLP"), "{}"),
        ("MC-dropout's by {}.", apart("last", "MCDropout"), "{}"),
        ("comes closest: {}.", apart("last", "logistic regression"), "{}"),
        ("behind MC-dropout ({})", apart("auto", "MCDropout"), "{}"),
        ("and the ensemble ({})", apart("auto", "Ensemble"), "{}"),
        ("could show: {} on the last", apart("last", "shuffled"), "{}"),
        ("last layer, {} on the chosen", apart("auto", "shuffled"), "{}"),
        ("nothing is lost: {}.", swapped("cifar10/auto/one call"), "{:.3f}"),
    ],
)

# -- unknown inputs ---------------------------------------------------------------------------------------------------


def detector(name: str, key: str) -> Number:
    """A number of the leaderboard."""
    return lambda cells: cells["test"][name][key]


def left_out_sets(cells: Cells, judge: bool) -> Iterator[tuple[Cells, Cells]]:
    """The tasks of benchmarks/unknown_classes.py that choose or judge, each with one of its unknown sets."""
    for cell in cells.values():
        if cell["judges"] == judge:
            yield from ((cell, found) for found in cell["sets"].values())


def within_range(cells: Cells, judge: bool) -> str:
    """Of how many unknown sets that have a range the share that is noticed lies in it."""
    hits = [c["low"] <= found["noticed"] <= c["high"] for c, found in left_out_sets(cells, judge) if "low" in c]
    return f"{sum(hits)} of {len(hits)}"


def near_the_best(cells: Cells, judge: bool) -> str:
    """On how many unknown sets the sum is at most 3 points of AUROC below its best part."""
    hits = []
    for _, found in left_out_sets(cells, judge):
        parts = [area for name, area in found.items() if name not in ("noticed", "joint")]
        hits.append(found["joint"] >= max(parts) - 0.03)
    return f"{sum(hits)} of {len(hits)}"


def of_set(task: str, unknown: str, key: str) -> Number:
    """In percent, a number of a task of benchmarks/unknown_classes.py for one of its unknown sets."""
    return lambda cells: 100 * cells[task]["sets"][unknown][key]


CALL, LAYER = "left out/auto/one call", "left out/last/logistic regression"
HATS = "clothing without hats and shoes"
DETECTED = [
    *quotes(
        README,
        "swap.json",
        [
            ("a new last layer: NLL {},", swapped(LAYER, "nll"), "{:.3f}"),
            ("{} % errors |", swapped(LAYER, "err"), "{:.1f}"),
            ("| NLL {},", swapped(CALL, "nll"), "{:.3f}"),
            ("{} % errors ([how]", swapped(CALL, "err"), "{:.1f}"),
            ("by confidence: AUROC {} %", swapped(LAYER, "left out/one_minus_max_p"), "{:.1f}"),
            ("| AUROC {} %, 61", swapped(CALL, "left out/verdict"), "{:.1f}"),
            ("%, {} % of them called unknown |", swapped(CALL, "left out/called unknown"), "{:.0f}"),
        ],
    ),
    *quotes(
        README,
        "unknown_classes.json",
        [
            ("of the logits: AUROC {} %", of_set("60 intents", "no intent", "energy"), "{:.1f}"),
            ("AUROC {} %, 97", of_set("60 intents", "no intent", "joint"), "{:.1f}"),
            ("%, {} % of them called unknown ([all]", of_set("60 intents", "no intent", "noticed"), "{:.0f}"),
            ("of TinyImageNet, {} % are noticed", of_set("CIFAR-10", "tiny", "noticed"), "{:.0f}"),
            ("of SVHN {} %", of_set("CIFAR-10", "svhn", "noticed"), "{:.0f}"),
        ],
    ),
    *quotes(
        UNKNOWN,
        "unknown.json",
        [
            ("every single score ({};", detector("joint", "far auroc"), "{:.1f}"),
            ("`Mahalanobis` {}, `Stages`", detector("mahalanobis", "far auroc"), "{:.1f}"),
            ("`Stages` {}, `KNN`", detector("stages", "far auroc"), "{:.1f}"),
            ("energy {}, `GEN`", detector("energy", "far auroc"), "{:.1f}"),
            ("it is behind the energy ({})", detector("energy", "near auroc"), "{:.1f}"),
            ("`NNGuide` ({}), `GEN`", detector("nnguide", "near auroc"), "{:.1f}"),
            ("and `FDBD` ({}), and ahead", detector("fdbd", "near auroc"), "{:.1f}"),
            ("ahead of `KNN` ({})", detector("knn", "near auroc"), "{:.1f}"),
        ],
    ),
    *quotes(
        SWAP,
        "swap.json",
        [
            ("verdict calls {} % of them unknown", swapped(CALL, "left out/called unknown"), "{:.0f}"),
            ("(AUROC {}), and", swapped(CALL, "left out/verdict"), "{:.1f}"),
            ("and {} % of known clothes", swapped(CALL, "called unknown"), "{:.1f}"),
            ("all stages alone has an AUROC of {},", swapped(CALL, "left out/stages"), "{:.1f}"),
            ("the energy {}, the", swapped(CALL, "left out/energy"), "{:.1f}"),
            ("largest probability {}.", swapped(CALL, "left out/one_minus_max_p"), "{:.1f}"),
            ("`fit` said {} % then", swapped(CALL, "expected"), "{:.0f}"),
        ],
    ),
    *quotes(
        PRETRAINED,
        "unknown_classes.json",
        [
            ("as the head: {} to", lambda cells: 100 * cells[HATS]["low"], "{:.0f}"),
            ("to {} %, where", lambda cells: 100 * cells[HATS]["high"], "{:.0f}"),
            ("where {} % of the hats", lambda cells: 100 * cells[HATS]["sets"]["hats"]["noticed"], "{:.0f}"),
            ("and {} % of the shoes", lambda cells: 100 * cells[HATS]["sets"]["shoes"]["noticed"], "{:.0f}"),
        ],
    ),
    *quotes(
        UNKNOWN,
        "unknown_classes.json",
        [
            ("within the range on {} sets that choose", lambda cells: within_range(cells, False), "{}"),
            ("and on {} that judge; the aim", lambda cells: within_range(cells, True), "{}"),
            ("where rules were chosen ({} sets", lambda cells: near_the_best(cells, False), "{}"),
            ("tasks that judge: {}**", lambda cells: near_the_best(cells, True), "{}"),
        ],
    ),
]

# -- in production ----------------------------------------------------------------------------------------------------


def slower(size: int) -> Number:
    """Processor time of the exported folder to that of the bare backbone."""

    def number(cells: Cells) -> float:
        exported, bare = (cells[f"{what}, {size} at a time"] for what in ("exported folder", "bare backbone"))
        return float(exported["processor, ms"] / bare["processor, ms"])

    return number


def watched(size: int, key: str, times: float = 1.0) -> Number:
    """A number of the drift alarm."""
    return lambda cells: times * cells[f"drift alarm, {size} at a time"][key]


def rows_ahead(*pools: str) -> Callable[[Cells], int]:
    """On how many changes the monitor's delay is at most that of the best peer, at thresholds of equal rates."""

    def number(cells: Cells) -> int:
        ahead = 0
        for pool in pools:
            ours = cells[f"{pool}, monitor"]["monitor, equal rate"]
            peers = [
                delays
                for key, cell in cells.items()
                if key.startswith(f"{pool}, ") and key.split(", ")[1] in ("KS", "CVM", "MMD", "LSDD")
                for delays in cell.values()
            ]
            changes = set(ours) - {"false alarms", "window"}
            ahead += sum(ours[change] <= min(delays[change] for delays in peers) for change in changes)
        return ahead

    return number


def clean(pool: str, key: str) -> Number:
    """False alarms of the guaranteed threshold in clean streams, and their standard error, in %."""
    return lambda cells: 100 * cells[f"{pool}, clean"][key]


SERVED = [
    *quotes(
        PRODUCTION,
        "serve.json",
        [
            ("takes {} times as long as the bare", slower(1), "{:.2f}"),
            ("and {} times for 64", slower(64), "{:.2f}"),
            ("take {} µs of processor time an input", watched(64, "processor, ms", 1000), "{:.0f}"),
            ("That is {} of the exported", watched(64, "share of inference"), "{:.1%}"),
            ("256 at a time take {} µs,", watched(256, "processor, ms", 1000), "{:.0f}"),
            ("25 µs, {} (`benchmarks", watched(256, "share of inference"), "{:.1%}"),
        ],
    ),
    *quotes(
        PRODUCTION,
        "drift.json",
        [
            ("best peer on {} of 18 rows", rows_ahead("digits", "CIFAR-10"), "{}"),
            ("rows**: {} of 9 of digits", rows_ahead("digits"), "{}"),
            ("of digits, {} of 9 of CIFAR-10", rows_ahead("CIFAR-10"), "{}"),
            ("guaranteed threshold**: {} % ±", clean("CIFAR-10", "false alarms"), "{:.1f}"),
        ],
    ),
]
# -- graphs ---------------------------------------------------------------------------------------------------------


def mean_distance(method: str, key: str = "shd") -> Number:
    """Over the cells that `rai`, BOSS and GRaSP finish."""
    return lambda cells: fmean(sample[key] for sample in benchmark("pages")._finished_by_all(cells)[method])


def of_ges(place: int) -> Number:
    """The distance of `rai` (0) or GES (1) on the samples that GES finishes."""
    return lambda cells: fmean(pair[place]["shd"] for pair in benchmark("pages").beside_ges(cells))


def bar(key: str) -> Number:
    """In how many cells the posterior over graphs is as good as was aimed at."""
    return lambda cells: int(benchmark("pages").posterior_bars(cells)[key])


BOSS, GRASP = "causal-learn BOSS", "causal-learn GRaSP"
GRAPHS = [
    *quotes(
        MEASUREMENTS,
        "structure.json",
        [
            ("the lowest mean distance, {} against", mean_distance("rai"), "{:.1f}"),
            ("against {} (BOSS)", mean_distance(BOSS), "{:.1f}"),
            ("(BOSS) and {} (GRaSP)", mean_distance(GRASP), "{:.1f}"),
            ("in {} s of processor time", mean_distance("rai", "seconds"), "{:.1f}"),
            ("better of the two in {} of", lambda cells: benchmark("pages").close_to_the_better(cells)[0], "{}"),
            ("GES has {} on the samples", of_ges(1), "{:.1f}"),
            ("where `rai` has {}.", of_ges(0), "{:.1f}"),
        ],
    ),
    *quotes(
        MEASUREMENTS,
        "structure_posterior.json",
        [
            ("at least as well as by every peer in {} of 14", bar("AP"), "{}"),
            ("ECE is at most 0.05 in {} of 14", bar("ECE"), "{}"),
        ],
    ),
]
QUOTED = [*GRAPHS, *SHIFT, *COMPARED, *SWAPPED, *DETECTED, *SERVED]
