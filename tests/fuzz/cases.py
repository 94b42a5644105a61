"""Random inputs to every door of the package. A case ends in a right result or in a clear error; all else is a finding.

Each target is a function of `draw` (hypothesis) that makes an input, mostly a wrong one, calls the package with it and
checks what must hold of the result. `outcome` runs it: "right" if it returns, "refused" if the package said what it
expected and what it got. An error of another kind, an error from inside a library, a NaN that nobody asked for and
anything that takes longer than ten seconds are findings and fail the test.
"""

import json
import math
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from brainet_pl import BRAINet, export_folder, learn_structure, rai, swap_head
from brainet_pl._utils.digest import fingerprint
from brainet_pl._utils.framework import pl
from brainet_pl._utils.parts import arguments, make_part, part_classes
from brainet_pl._utils.stored import FORMAT
from brainet_pl.backbones.loading import Backbone
from brainet_pl.calibration import Calibrator
from brainet_pl.calibration.temperature import fit_temperature
from brainet_pl.callbacks import Evaluation
from brainet_pl.datamodules import Table
from brainet_pl.datamodules.base import Samples
from brainet_pl.evaluation.compare import write_comparison
from brainet_pl.evaluation.report import write_report
from brainet_pl.features import store as feature_store
from brainet_pl.features.extraction import extract as extract_plainly
from brainet_pl.lightning.pretrained import from_pretrained, save_pretrained
from brainet_pl.metrics import curves
from brainet_pl.metrics.measures import classification_measures, regression_measures
from brainet_pl.network import HeadSettings, Linear, Tree
from brainet_pl.scores import Score, ScoreContext
from brainet_pl.scores.fitting import fit_score
from brainet_pl.serving import ExportedModel
from brainet_pl.sklearn import BRAINetClassifier
from brainet_pl.structure import GGT, Branch, DSeparation, Leaf, Node, cache
from brainet_pl.tasks import Classification, Regression, Task
from brainet_pl.tasks.passes import Passes

SECONDS = 10  # of processor time
OURS = ("brainet_pl", "datamodules", "callbacks")
TARGETS: dict[str, Callable] = {}


class Finding(AssertionError):
    """What a user should never see."""


def target(function):
    TARGETS[function.__name__] = function
    return function


def outcome(case: Callable, draw: Callable) -> str:
    """Run one case: "right" or "refused"; a case whose door sets aside what is wrong says so itself."""

    def too_long(signum, frame):
        raise Finding(f"still running after {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case(draw) or "right"
    except (ValueError, TypeError, RuntimeError, FileNotFoundError) as error:  # and their kin
        check_clear(error)
        return "refused"
    except (Finding, pytest.skip.Exception):
        raise
    except Exception as error:
        raise Finding(f"an obscure {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check_clear(error: Exception) -> None:
    """An error is clear if the package raised it itself and it says what was expected and what came."""
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    text = str(error).lower()
    if not set(OURS) & set(place.parts) or "expected" not in text or not ("got" in text or "found" in text):
        raise Finding(f"an unclear {type(error).__name__} from {place}: {error}") from error


def must(condition, what: str) -> None:
    if not bool(condition):
        raise Finding(what)


# -- what goes in -----------------------------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**6, -(10**9), 2**70]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-2, 9), max_size=3),
    st.builds(np.int64, st.integers(-2, 5)),
    st.builds(np.float32, st.floats(-2, 2, width=32)),
)
HUGE = [1e38, -3e38, 1e300, -1.7e308, 5e-324, 1e-30, 0.0, -0.0]
BAD = [math.nan, math.inf, -math.inf]


def rarely(draw, usual, odd=JUNK, share=8):
    """Mostly a usual value, once in a while anything."""
    return draw(odd) if sometimes(draw, share) else draw(usual)


def sometimes(draw, share):
    """True once in about `share` times; hypothesis likes the ends of a range, so the middle is the rare one."""
    return draw(st.integers(1, share)) == share // 2 + 1


def some(draw, settings, share=8):
    """A few of the settings of a function, each usual or rarely not."""
    return {name: rarely(draw, usual, share=share) for name, usual in settings.items() if draw(st.booleans())}


def table(draw, rows=(0, 40), columns=(0, 6)):
    """A table of features: an array, a tensor or a list, with all that real ones suffer from."""
    n = draw(st.integers(*rows))
    d = draw(st.integers(*columns))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=(n, d))
    if d > 1 and draw(st.booleans()):
        x = np.cumsum(x, axis=1)
    for _ in range(draw(st.integers(0, 2))):
        if not x.size:
            break
        i, j = draw(st.integers(0, n - 1)), draw(st.integers(0, d - 1))
        match draw(st.sampled_from(["constant", "copy column", "copy row", "huge", "bad", "ties", "last"])):
            case "constant":
                x[:, j] = draw(st.sampled_from([0.0, 1.0, -7.5]))
            case "copy column":
                x[:, j] = x[:, i % d]
            case "copy row":
                x[:] = x[i]
            case "huge":
                x[i, j] = draw(st.sampled_from(HUGE))
            case "bad":
                x[i, j] = draw(st.sampled_from(BAD))
            case "ties":
                x = np.round(x)
            case "last":
                x[:, -1] = x.sum(axis=1)
    dtype = rarely(
        draw,
        st.sampled_from(["float64", "float32", "float16", "int64", "int8", "uint8", "bool"]),
        st.sampled_from(["complex64", "str", "object", "datetime64[s]"]),
    )
    with np.errstate(all="ignore"):
        x = x.astype(np.int64).astype(dtype) if dtype in ("uint8", "datetime64[s]") else x.astype(dtype)
    if dtype in ("complex64", "str", "object", "datetime64[s]"):
        return x
    form = draw(st.sampled_from(["array", "array", "tensor", "bfloat16", "list", "transposed", "flat", "cube"]))
    if form in ("tensor", "bfloat16"):
        tensor = torch.tensor(x)
        return tensor.bfloat16() if form == "bfloat16" else tensor
    return {"list": x.tolist(), "flat": x.ravel(), "cube": x[None], "transposed": x.T.copy().T}.get(form, x)


def grow(draw, variables, depth):
    """Any tree over these variables."""
    if depth == 0 or draw(st.booleans()):
        parents = tuple(tuple(variables[:i][:2]) for i in range(len(variables)))
        return Leaf(tuple(variables), parents, draw(st.floats(-1e4, 0)))
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        k = draw(st.integers(0, len(variables) - 1))
        ancestors = (grow(draw, variables[:k], depth - 1),) if k else ()
        branches.append(Branch(ancestors, grow(draw, variables[k:], depth - 1)))
    return Node(tuple(variables), tuple(branches))


def any_tree(draw, most=5):
    d = draw(st.integers(1, most))
    return GGT(grow(draw, tuple(range(d)), 2), d, draw(st.integers(1, 1000)), {"s": 2})


def edited(draw, data, edits=3):
    """A JSON value with a few random changes, anywhere in it."""
    data = json.loads(json.dumps(data))
    for _ in range(draw(st.integers(0, edits))):
        places = []

        def walk(value, places=places):
            keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            for key in keys:
                places.append((value, key))
                walk(value[key])

        walk(data)
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "nudge", "remove", "repeat", "swap"])):
            case "replace":
                holder[key] = draw(JUNK)
            case "nudge" if isinstance(holder[key], int | float):
                holder[key] = holder[key] + draw(st.sampled_from([-1, 1, 0.5, 1e308]))
            case "remove":
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder.insert(key, holder[key])
            case _:
                other, place = draw(st.sampled_from(places))
                if place in other if isinstance(other, dict) else place < len(other):
                    holder[key] = json.loads(json.dumps(other[place], default=str))
    return data


def tensor(draw, rows, columns):
    """(rows, columns) numbers, or rarely a tensor of another shape or type."""
    shape = rarely(
        draw,
        st.just((rows, columns)),
        st.sampled_from([(rows,), (), (rows, columns + 1), (1, rows, columns), (0, columns)]),
    )
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=rng)
    if x.numel() and sometimes(draw, 6):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([*BAD, 1e38, 1e-40]))
    types = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
    return x.to(rarely(draw, st.sampled_from(types), st.sampled_from([torch.complex64, torch.bool])))


# -- structure --------------------------------------------------------------------------------------------------------

LEARN = {
    "max_order": st.one_of(st.none(), st.integers(0, 2)),
    "test": st.sampled_from(["cmi", "gaussian", "g2", "fisher_z"]),
    "threshold": st.one_of(st.none(), st.floats(0, 1)),
    "bins": st.integers(2, 5),
    "max_rows": st.one_of(st.none(), st.integers(2, 30)),
    "max_tests": st.one_of(st.none(), st.integers(0, 100)),
    "max_seconds": st.one_of(st.none(), st.floats(0, 2)),
}
TREE = {
    "s": st.integers(1, 3),
    "score": st.one_of(st.none(), st.sampled_from(["bdeu", "bge", "bic"])),
    "ess": st.floats(0.1, 100),
    "seed": st.integers(0, 2**31),
}


@target
def structures(draw):
    features = rarely(draw, st.just(None), JUNK, share=25)
    features = table(draw) if features is None else features
    settings = some(draw, LEARN | TREE, share=25)
    settings["max_order"] = settings.get("max_order", 1)
    check_tree(learn_structure(features, progress=False, **settings), torch.as_tensor(features).shape[1])


def check_tree(ggt, d=None):
    d = ggt.num_variables if d is None else d
    must(ggt.num_variables == d, "another number of variables")
    must(GGT.from_json(ggt.to_json()) == ggt, "JSON gives another tree")
    must(all(math.isfinite(node.score) for node in ggt.nodes if isinstance(node, Leaf)), "a score is not finite")
    must(math.isfinite(ggt.auto_temperature) and ggt.auto_temperature > 0, "no temperature")
    for temperature in (0.0, 1.0, ggt.auto_temperature, math.inf):
        for p in ggt.branch_probabilities(temperature):
            must(not len(p) or (np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6), f"probabilities {p}")
    best = ggt.map()
    must(sorted(v for leaf in ggt.leaves(best) for v in leaf.variables) == list(range(d)), "a variable is lost")
    must(ggt.dag(best).shape == (d, d), "a graph of another shape")
    must(all(math.isfinite(ggt.log_prob(drawn)) for drawn in ggt.sample(3)), "a draw without probability")
    must(ggt.perplexity() >= 1 - 1e-6 and ggt.num_unique_structures >= 1 and ggt.summary(), "no size")


def any_matrix(x):
    """A drawn table as numbers that are true or false."""
    return np.array(x.float() if isinstance(x, torch.Tensor) else x, dtype=bool)


@target
def graphs(draw):
    if sometimes(draw, 5):
        dag = any_matrix(table(draw, (1, 5), (1, 5))) if sometimes(draw, 6) else None
        d = draw(st.integers(1, 5))
        edges = draw(st.lists(st.booleans(), min_size=d * d, max_size=d * d))
        dag = np.triu(np.array(edges).reshape(d, d), 1) if dag is None else dag
        settings = some(draw, {"max_order": LEARN["max_order"], "second_pass": st.booleans()})
        graph = rai(rarely(draw, st.just(len(dag)), st.integers(-1, 5)), test=DSeparation(dag), **settings)
        d = len(dag)
    else:
        features = table(draw)
        graph = rai(features, **some(draw, LEARN | {"second_pass": st.booleans()}, share=25))
        d = torch.as_tensor(features).shape[1]
    must(graph.adjacency.shape == (d, d), "a graph of another shape")
    must(not graph.adjacency.diagonal().any(), "a variable that is its own neighbour")


@target
def trees(draw):
    content = any_tree(draw).to_dict()
    if draw(st.booleans()):
        ggt = GGT.from_dict(edited(draw, content))
    else:
        text = json.dumps(edited(draw, content) if draw(st.booleans()) else content, default=float)
        cut = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["cut", "insert", "nest", "other", "number", "number", "as it is", "as it is"])):
            case "cut":
                text = text[:cut]
            case "insert":
                text = text[:cut] + draw(st.text(max_size=3)) + text[cut:]
            case "nest":
                text = "[" * draw(st.sampled_from([10, 100_000])) + text
            case "number":
                text = text.replace("0", draw(st.sampled_from(["1e999", "-0", "NaN", "9" * 30, "00"])), 1)
            case "other":
                text = draw(
                    st.one_of(st.just(None), st.text(max_size=20), st.just("[]"), st.just("3"), st.binary(max_size=9))
                )
        ggt = GGT.from_json(text)
    if ggt.num_variables < 50:
        check_tree(ggt)


# -- network ----------------------------------------------------------------------------------------------------------

PART_SETTINGS = {
    "num_params": st.integers(1, 3000),
    "hidden": st.integers(1, 3),
    "members": st.integers(1, 3),
    "min_width": st.integers(1, 3),
    "norm": st.sampled_from(["batch", None]),
    "dropout": st.floats(0, 0.9),
    "rate": st.floats(0, 0.9),
    "activation": st.sampled_from(["relu", "gelu", "tanh"]),
    "sampling": st.sampled_from(["batch", "sample"]),
    "inference": st.sampled_from(["stochastic", "simultaneous", "enumerated"]),
    "temperature": st.one_of(st.none(), st.floats(0, 100)),
    "num_classes": st.integers(2, 5),
    "loss": st.sampled_from(["cross_entropy", "confidence"]),
    "label_smoothing": st.floats(0, 0.9),
    "confidence_budget": st.floats(0.01, 2),
    "min_variance": st.floats(1e-8, 1),
    "k": st.integers(1, 60),
    "max_rows": st.integers(1, 60),
    "seed": st.integers(0, 100),
    "normalize": st.booleans(),
    "kind": st.sampled_from(["gaussian", "discrete"]),
    "threshold": st.one_of(st.none(), st.floats(0, 1)),
    "s": st.integers(1, 2),
    "max_order": st.integers(0, 2),
    "prior": st.one_of(st.none(), st.floats(0.01, 100)),
    "bins": st.integers(2, 6),
    "max_parents": st.one_of(st.none(), st.integers(0, 3)),
    "progress": st.just(False),
}


def written(draw, base, share=8):
    """A part as a file would hold it: a name and some of its settings, now and then wrong."""
    cls = draw(st.sampled_from([c for c in part_classes(base).values() if c.__module__.startswith("brainet_pl")]))
    names = [argument.name for argument in arguments(cls) if argument.name in PART_SETTINGS]
    settings = some(draw, {name: PART_SETTINGS[name] for name in names}, share)
    if cls is Classification:
        settings.setdefault("num_classes", 3)
    if "progress" in names:
        settings["progress"] = False
    return {"class_path": cls.__name__, "init_args": settings}


@target
def parts(draw):
    base = draw(st.sampled_from([HeadSettings, Score, Task, Calibrator]))
    given = rarely(draw, st.just(None), JUNK, share=10)
    given = written(draw, base, share=5) if given is None else given
    if isinstance(given, dict) and given and sometimes(draw, 4):
        given = edited(draw, json.loads(json.dumps(given, default=str)), 1)
    part = make_part(base, given, "part")
    again = make_part(base, json.loads(json.dumps(part.to_dict())), "part")
    must(again.to_dict() == part.to_dict() and part.describe(), "a part that does not come back as it was")


@target
def heads(draw):
    ggt = any_tree(draw)
    settings = make_part(HeadSettings, written(draw, HeadSettings, share=30), "head")
    classes = rarely(draw, st.integers(1, 4), share=20)
    head = settings.build(ggt.num_variables, classes, rarely(draw, st.just(ggt), st.none(), share=20))
    x = tensor(draw, 6, ggt.num_variables)
    head.train()
    out = head(x)
    must(out.shape[-2:] == (len(x), classes), "outputs of another shape")
    head.eval()
    with torch.no_grad():
        passes = head.passes(x, rarely(draw, st.integers(1, 4), share=20))
    must(passes.values.shape[-2:] == (len(x), classes) and passes.values.dim() == 3, "passes of another shape")
    usable = x.double().isfinite().all(dim=1) & (x.double().abs() < 1e4).all(dim=1)
    if usable.all():  # batch norm lets one sample of a batch reach all others
        must(out.isfinite().all() and passes.values.isfinite().all(), "outputs that are not finite")
        must((passes.values.softmax(-1).sum(-1) - 1).abs().max() < 1e-4 if len(x) else True, "no probabilities")
        must(passes.weights is None or abs(float(passes.weights.sum()) - 1) < 1e-4, "weights that are not 1 in sum")


# -- evaluation -------------------------------------------------------------------------------------------------------


def labels(draw, n, classes):
    y = torch.tensor(draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n)), dtype=torch.long)
    if not sometimes(draw, 6):
        return y
    return draw(
        st.sampled_from(
            [y - 1, y + classes, y[:-1], y.float(), y.float() + 0.5, y[:, None], y.bool(), torch.empty(0), y.int()]
        )
    )


@target
def scores(draw):
    part = make_part(Score, written(draw, Score, share=40), "score")
    d, n = draw(st.integers(1, 5)), draw(st.integers(1, 30))
    classes = draw(st.integers(1, 3))
    part.set_context(ScoreContext(classes, draw(st.booleans()), rarely(draw, st.none(), st.just(None))))
    fit_score(part, tensor(draw, n, d), labels(draw, n, classes))
    features = tensor(draw, 4, d)
    probs = torch.full((len(features) if features.dim() else 1, classes), 1 / classes)
    energy = {"energy": torch.zeros(len(probs))} if draw(st.booleans()) else {}
    for name, values in part(Passes(probs[None], None, features, probs, energy)).items():
        must(values.shape == (len(features),), f"{name} of another shape")
        usable = features.double().isfinite().all(dim=1)
        must(values[usable].isfinite().all(), f"{name} is not finite for finite features")
    other = type(part)(**part.settings())
    other.load_state_dict(part.state_dict())
    must(other.ready == part.ready, "a score that a checkpoint does not bring back")


def numbers(draw, least=0):
    value = st.one_of(st.floats(-3, 3), st.sampled_from([0.0, 0.5, 1.0]))
    if sometimes(draw, 3):
        value = st.one_of(value, st.sampled_from([math.inf, -math.inf]))
    if sometimes(draw, 6):
        value = st.one_of(value, st.just(math.nan))
    found = torch.tensor(draw(st.lists(value, min_size=least, max_size=12)), dtype=torch.float64)
    return found.to(draw(st.sampled_from([torch.float32, torch.float64, torch.float16])))


def within(values, low=0.0, high=1.0):
    must(
        all(low - 1e-6 <= float(v) <= high + 1e-6 for v in torch.as_tensor(values).flatten()), f"not in range: {values}"
    )


@target
def metrics(draw):
    match draw(st.sampled_from(["separation", "risk", "calibration", "temperature", "classes", "classes", "numbers"])):
        case "separation":
            found = curves.separation(numbers(draw), numbers(draw))
            within([v for name, v in found.items() if not name.startswith("n_")])
        case "risk":
            u = numbers(draw)
            wrong = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(u), max_size=len(u))))
            risk = curves.risk_coverage(u, wrong[: rarely(draw, st.just(len(u)), st.just(1))])
            within(risk)
        case "calibration":
            confidence = numbers(draw)
            correct = torch.ones(rarely(draw, st.just(len(confidence)), st.integers(0, 5)))
            within(curves.adaptive_calibration_error(confidence.clamp(0, 1), correct))
            within(curves.calibration_error(curves.calibration_sums(confidence, correct)))
        case "temperature":
            c = draw(st.integers(1, 3))
            probs = tensor(draw, 6, c)
            probs = probs.softmax(-1) if probs.is_floating_point() and probs.dim() else probs
            within(fit_temperature(probs, labels(draw, 6, c)), 0.05, 20)
        case "classes":
            c = draw(st.integers(2, 4))
            probs = tensor(draw, 6, c)
            probs = probs.softmax(-1) if probs.is_floating_point() and probs.dim() else probs
            y = labels(draw, 6, c)
            for measure in classification_measures(c):
                measure.update(probs, y)
                value = measure.compute()
                fine = len(y) and bool(probs.isfinite().all())
                must(not fine or math.isfinite(value), f"{measure.key} is {value}")
                must(fine or measure.key == "cls/Acc" or math.isnan(value), f"{measure.key} of what is NaN is {value}")
        case "numbers":
            preds, y = tensor(draw, 6, 2), tensor(draw, 6, 1)
            preds = preds.abs() if preds.is_floating_point() else preds
            y = y.squeeze(1) if y.dim() == 2 else y
            for measure in regression_measures():
                measure.update(preds, y)
                usable = len(y) and preds.double().isfinite().all() and y.double().isfinite().all()
                if usable and (preds[:, 1] > 1e-3).all() and preds.abs().max() < 1e4 and y.abs().max() < 1e4:
                    must(math.isfinite(measure.compute()), f"{measure.key} is not finite")


# -- data -------------------------------------------------------------------------------------------------------------

CELLS = st.one_of(
    st.integers(-9, 9).map(str),
    st.floats(allow_nan=True).map(repr),
    st.sampled_from(
        ["a", "b", "c", "", "NA", "?", "1e400", "-1e308", "1,5", "1.000,5", "2020-01-31", "=cmd|x", "\x00"]
    ),
    st.text(max_size=5),
)


@target
def tables(draw):
    columns = rarely(draw, st.integers(2, 4), st.just(1), share=12)
    names = [rarely(draw, st.just(name), st.text(max_size=3), share=30) for name in "abcd"[:columns]]
    lines = [names]
    kinds = [
        draw(
            st.sampled_from(
                [st.floats(-5, 5).map(str), st.integers(0, 3).map(str), st.sampled_from(["x", "y", ""]), CELLS]
            )
        )
        for _ in names
    ]
    kinds[0] = draw(st.sampled_from([st.floats(-5, 5).map(str), st.sampled_from(["1", "2"]), CELLS]))
    for _ in range(rarely(draw, st.integers(8, 25), st.integers(0, 7))):
        line = [rarely(draw, kind, CELLS, share=80) for kind in kinds]
        if sometimes(draw, 200):
            line = line[:-1] if draw(st.booleans()) else [*line, "1"]
        lines.append(line)
    separator = rarely(draw, st.just(","), st.sampled_from([";", "\t", "|", " "]), share=10)
    quote = rarely(draw, st.sampled_from(["", '"']), st.just("'"), share=12)
    ends = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = ends.join(separator.join(f"{quote}{cell}{quote}" for cell in line) for line in lines)
    encoding = rarely(draw, st.just("utf-8"), st.sampled_from(["latin-1", "utf-16", "utf-8-sig", "cp1252"]), share=10)
    data = text.encode(encoding, errors="replace" if encoding != "utf-8" else "surrogatepass")
    if sometimes(draw, 15):
        data = draw(st.binary(max_size=60))
    settings = some(
        draw,
        {
            "task": st.sampled_from(["regression", "classification"]),
            "test_fraction": st.floats(0.05, 0.6),
            "val_fraction": st.floats(0.05, 0.6),
            "missing": st.sampled_from(["impute", "refuse"]),
            "max_categories": st.integers(1, 20),
            "delimiter": st.just(","),
            "encoding": st.just("utf-8"),
            "drop": st.lists(st.sampled_from(names[-1:]), max_size=1),
            "categorical": st.lists(st.sampled_from(names), max_size=1),
            "batch_size": st.integers(2, 9),
            "seed": st.integers(0, 9),
        },
        share=30,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_bytes(data)
        file = rarely(draw, st.just(str(path)), st.just(str(path) + "x"), share=40)
        module = Table(file, rarely(draw, st.just("a"), st.text(max_size=2), share=20), **settings)
        module.setup("fit")
        for name in ("train_set", "val_set", "test_set", "predict_set"):
            samples = getattr(module, name)
            must(samples.x.isfinite().all(), f"{name} has inputs that are not finite")
            must(samples.x.shape == (len(samples), len(module.feature_names)), f"{name} has another shape")
            must(samples.y.isfinite().all(), f"{name} has targets that are not finite")
        x, y = next(iter(module.train_dataloader()))
        must(len(x) == len(y), "a batch of another shape")


# -- models -----------------------------------------------------------------------------------------------------------


class Wired(nn.Module):
    """A few dense layers, registered in one order and used in another, and a last step."""

    def __init__(self, order, sizes, end):
        super().__init__()
        self.order, self.end = order, end
        for i in sorted(range(len(order)), key=lambda i: order[i]):
            self.add_module(f"layer{i}", nn.Linear(sizes[i], sizes[i + 1]))

    def forward(self, x):
        h = x
        for i in range(len(self.order)):
            h = self.get_submodule(f"layer{i}")(h)
            h = h if i == len(self.order) - 1 else torch.tanh(h)
        return {
            "plain": lambda: h,
            "softmax": lambda: h.softmax(-1),
            "tuple": lambda: (h, h.sum()),
            "dict": lambda: {"logits": h},
            "residual": lambda: h + x.mean(),
            "argmax": lambda: h.argmax(-1),
            "first": lambda: h[0],
            "none": lambda: None,
        }[self.end]()

    def features(self, x):
        for i in range(len(self.order) - 1):
            x = torch.tanh(self.get_submodule(f"layer{i}")(x))
        return x


@target
def swaps(draw):
    depth = draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 5)) for _ in range(depth + 1)]
    ends = st.sampled_from(["tuple", "dict", "residual", "argmax", "first", "none"])
    model = Wired(
        draw(st.permutations(range(depth))), sizes, rarely(draw, st.sampled_from(["plain", "softmax"]), ends, share=5)
    )
    model.to(draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])))
    model.train(draw(st.booleans()))
    x = tensor(draw, 20, sizes[0])
    data = x
    if draw(st.booleans()):
        form = draw(st.sampled_from(["array", "list", "pairs", "dataset", "tree", "junk"]))
        data = {
            "array": lambda: x.float().numpy() if not x.is_complex() else x.numpy(),
            "list": lambda: [x, x],
            "pairs": lambda: [(x, None), (x, None)],
            "dataset": lambda: torch.utils.data.TensorDataset(x) if x.dim() else x,
            "tree": lambda: GGT(Leaf(tuple(range(sizes[-2])), ((),) * sizes[-2], 0.0), sizes[-2]),
            "junk": lambda: draw(JUNK),
        }[form]()
    before = [p.clone() for p in model.parameters()]
    layer = rarely(draw, st.none(), st.sampled_from(["", f"layer{depth - 1}", "nope", "layer0"]), share=6)
    head = rarely(draw, st.sampled_from([Tree(num_params=300), "MLP", "Linear"]), share=20)
    classes = rarely(draw, st.integers(1, 3), share=20)
    settings = some(draw, {name: LEARN[name] for name in ("test", "bins", "max_rows")}, share=20)
    swapped = swap_head(model, data, classes, head_layer=layer, head=head, progress=False, **settings).eval()
    must(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the model was changed")
    probe = torch.randn(3, sizes[0])
    probs = swapped.probabilities(probe, passes=2)
    must((probs.sum(-1) - 1).abs().max() < 1e-4, "no probabilities")
    if layer is None:
        expected = model.eval().features(probe.to(next(model.parameters()).dtype))
        found = swapped.backbone(probe).float()
        near = 0.05 if expected.dtype == torch.bfloat16 else 1e-5
        must(
            torch.allclose(found, expected.float(), atol=near),
            f"features of another layer, {found} instead of {expected}",
        )


def stored(kind):
    """The checkpoint of a small model."""
    task = Classification(3) if kind != "regression" else Regression()
    head = Tree(num_params=300) if kind == "tree" else Linear()
    model = BRAINet(task=task, head=head, scores=["KNN"])
    if kind == "tree":
        x = np.random.default_rng(0).normal(size=(60, 4)).cumsum(axis=1)
        model.set_structure(learn_structure(x, test="gaussian", threshold=0.05, progress=False))
    else:
        model.predictor.build_head(model.head_settings, 4)
    content = {"hyper_parameters": dict(model.hparams), "state_dict": model.state_dict()}
    content["pytorch-lightning_version"] = pl.__version__
    model.on_save_checkpoint(content)
    return content


STORED = {}


@target
def checkpoints(draw):
    kind = draw(st.sampled_from(["tree", "linear", "regression"]))
    if kind not in STORED:
        STORED[kind] = stored(kind)
    content = dict(STORED[kind])
    part = draw(st.sampled_from(["brainet", "brainet", "hyper_parameters"]))
    content["brainet"] = dict(content["brainet"])
    if not sometimes(draw, 4):  # else the digest alone refuses what was changed
        del content["brainet"]["digest"]
    content[part] = edited(draw, content[part], 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        torch.save(content, path)
        if sometimes(draw, 8):
            data = bytearray(path.read_bytes())
            path.write_bytes(data[: draw(st.integers(0, len(data)))])
        model = BRAINet.load_from_checkpoint(path).eval()
    if model.head is not None:
        out = model(torch.randn(3, 4))
        must(out.shape[0] == 3 and out.isfinite().all(), "predictions that are not finite")


# -- files and folders of others --------------------------------------------------------------------------------------


def cut(draw, path):
    """Rarely, a part of a file in its place."""
    if sometimes(draw, 8):
        data = path.read_bytes()
        path.write_bytes(data[: draw(st.integers(0, len(data)))])


@target
def estimators(draw):
    if "estimator" not in STORED:
        x = np.random.default_rng(0).normal(size=(60, 4)).cumsum(1)
        with tempfile.TemporaryDirectory() as folder:
            BRAINetClassifier(max_epochs=1).fit(x, (x[:, 3] > 0).astype(int)).save(Path(folder) / "a.pt")
            STORED["estimator"] = torch.load(Path(folder) / "a.pt", weights_only=True)
    content = {key: value for key, value in STORED["estimator"].items() if key not in ("digest", "weights")}
    part = draw(st.sampled_from(["network", "settings", None]))
    if part is None:
        content = edited(draw, content, 1)
    else:
        content[part] = edited(draw, content[part], 2)
    content["weights"] = STORED["estimator"]["weights"]
    if not sometimes(draw, 4):
        content["digest"] = fingerprint(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        torch.save(content, path)
        cut(draw, path)
        model = BRAINetClassifier.load(path)
        must(np.isfinite(model.predict_proba(np.zeros((2, 4)))).all(), "probabilities that are not finite")


@target
def caches(draw):
    """A structure cache never ends in an error: what does not fit is set aside."""
    ggt = GGT(Leaf((0, 1), ((), (0,)), -1.0), 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key.json"
        cache.store(path, ggt)
        content = edited(draw, json.loads(path.read_text()), 3)
        changed = draw(st.booleans())
        if changed:
            path.write_text(json.dumps(content, default=str))
        cut(draw, path)
        found = cache.load(path, 2)
        must(found is None or found == ggt, "another tree than the one that was stored")
        if found is None:
            cache._read_entry((Path(folder) / "key.json.bad").read_text(), "key", 2)  # why, in words


@target
def run_folders(draw):
    with tempfile.TemporaryDirectory() as outer:
        folder, mine = Path(outer) / "run", Path(outer) / "mine"
        folder.mkdir()
        mine.write_text("private")
        texts = {
            "config.yaml": draw(st.sampled_from(["a: 1", "a: &a [*a]", "a: [", "\x00", "- 1", ""])),
            "metrics.csv": draw(st.sampled_from(["step,a\n0,1\n", "step,a\n0,x\n", "a\n", "", "step,step\n1,2\n"])),
            "record.json": draw(st.sampled_from(["{}", "[", '{"format": 3}', "null", '{"format": 1e400}'])),
            "structure.json": draw(
                st.sampled_from(["{}", "[", json.dumps({"format": FORMAT, "num_variables": 10**9})])
            ),
        }
        for name in draw(st.lists(st.sampled_from(sorted(texts)), min_size=1, unique=True)):
            if sometimes(draw, 3):
                (folder / name).symlink_to(mine)
            else:
                (folder / name).write_text(texts[name])
        (folder / "report.html").symlink_to(mine)
        try:
            if draw(st.booleans()):
                must("private" not in write_report(folder).read_text(), "a file of mine in the page")
            else:
                write_comparison([str(folder)], Path(outer) / "c.html")
                must("private" not in (Path(outer) / "c.html").read_text(), "a file of mine in the page")
        finally:
            must(mine.read_text() == "private", "a file of mine was written to")


def small_model(folder):
    """A fitted model and its data; what a test writes of it is in the folder."""
    if "model" not in STORED:
        x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), batch_size=30)
        model = BRAINet(2, head=Linear(), scores=["KNN"])
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet["enable_model_summary"] = False
        callbacks = [Evaluation(figures=False, report=False)]
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, callbacks=callbacks, **quiet)
        trainer.fit(model, loader, loader)
        trainer.test(model, {"known": loader, "unknown": loader}, verbose=False)
        STORED["model"] = model.eval(), x
        STORED["record"] = {name: (folder / name).read_text() for name in ("record.json", "scores.csv")}
    return STORED["model"]


def files_of(kind):
    """Name → bytes: a file or folder that rebuilds something, made once."""
    if kind not in STORED:
        with tempfile.TemporaryDirectory() as outer:
            folder = Path(outer)
            model, x = small_model(folder)
            place = folder / kind
            place.mkdir()
            match kind:
                case "estimator file":
                    labels_of = (x[:, 0] > 0).long().numpy()
                    BRAINetClassifier(max_epochs=1, members=1).fit(x.numpy(), labels_of).save(place / "a.pt")
                case "checkpoint file":
                    content = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}
                    content["pytorch-lightning_version"] = pl.__version__
                    model.on_save_checkpoint(content)
                    torch.save(content, place / "a.ckpt")
                case "hub folder":
                    save_pretrained(model, place)
                case "exported folder":
                    export_folder(model, place, x[:4], held=x)
                case "feature store":
                    feature_store.extract(place, store_backbone(), store_batches(), progress=False)
            files = (path for path in place.rglob("*") if path.is_file())
            STORED[kind] = {str(path.relative_to(place)): path.read_bytes() for path in files}
    return STORED[kind]


def put(files, folder):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def damaged(draw, data):
    """Bytes with a few of them changed, dropped, repeated or added, anywhere."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([1, 1, 8, 64, 5_000]))
        match draw(st.sampled_from(["change", "change", "drop", "repeat", "add", "zero"])):
            case "change":
                if data:
                    data[at] ^= draw(st.integers(1, 255))
            case "drop":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length]
            case "add":
                data[at:at] = draw(st.binary(max_size=9))
            case "zero":
                data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


@target
def containers(draw):
    """Bytes of files that rebuild a model: damaged anywhere, it is the same model or none."""
    kind = draw(st.sampled_from(["estimator file", "checkpoint file", "hub folder"]))
    files = dict(files_of(kind))
    name = draw(st.sampled_from(sorted(name for name in files if name != "README.md")))
    if name == "config.json" and draw(st.booleans()):
        files[name] = json.dumps(edited(draw, json.loads(files[name])), default=str).encode()
    elif not sometimes(draw, 5):
        files[name] = damaged(draw, files[name])
    model, x = STORED["model"]
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer)
        put(files, folder)
        if kind == "estimator file":
            found = BRAINetClassifier.load(folder / "a.pt").predict_proba(x[:5].numpy())
            must(np.isfinite(found).all(), "probabilities that are not finite")
            return
        other = (
            BRAINet.load_from_checkpoint(folder / "a.ckpt") if kind == "checkpoint file" else from_pretrained(folder)
        ).eval()
        must(other.head is None or other(x[:5]).isfinite().all(), "predictions that are not finite")
        if name != "config.json":
            must(torch.allclose(other(x[:5]), model(x[:5]), atol=1e-5), "another model than the one that was stored")


@target
def exports(draw):
    """The folder of an exported model, which a server is started with."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    files = dict(files_of("exported folder"))
    name = draw(st.sampled_from(["model.json", "model.json", "model.json", "model.onnx"]))
    if name == "model.json" and not sometimes(draw, 5):
        files[name] = json.dumps(edited(draw, json.loads(files[name])), default=str).encode()
    else:
        files[name] = damaged(draw, files[name])
    with tempfile.TemporaryDirectory() as folder:
        put(files, Path(folder))
        exported = ExportedModel(folder, 1)
        outputs = exported.predict(np.zeros((2, 4), dtype=np.float32))
        json.dumps(exported.as_answers(outputs), allow_nan=False)
        monitor = exported.monitor()
        if monitor is not None:
            must(monitor.update(exported.signals(outputs)).inputs == 2, "a monitor that has seen other inputs")


@target
def records(draw):
    """The record of a test, and the pages that are made of it."""
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer)
        small_model(folder)
        texts = dict(STORED["record"])
        if sometimes(draw, 5):
            name = draw(st.sampled_from(sorted(texts)))
            damaged_text = damaged(draw, texts[name].encode())
            (folder / name).write_bytes(damaged_text)
            del texts[name]
        else:
            texts["record.json"] = json.dumps(edited(draw, json.loads(texts["record.json"])), default=str)
        for name, text in texts.items():
            (folder / name).write_text(text)
        if draw(st.booleans()):
            must("</html>" in write_report(folder).read_text(), "half a page")
        else:
            write_comparison([str(folder), str(folder)], folder / "c.html")


def store_backbone():
    torch.manual_seed(0)
    return Backbone(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))).build()


def store_batches():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(Samples(x, torch.arange(30) % 2), batch_size=8)


@target
def feature_stores(draw):
    """Features on disk: whatever is there, a fit gets those of its inputs."""
    files = dict(files_of("feature store"))
    name = draw(st.sampled_from(sorted(files)))
    signed = name.endswith("index.json") and not sometimes(draw, 4)
    if signed:
        content = edited(draw, json.loads(files[name])["content"])
        files[name] = json.dumps({"content": content, "digest": fingerprint(content)}, default=str).encode()
    elif not sometimes(draw, 5):
        files[name] = damaged(draw, files[name])
    with tempfile.TemporaryDirectory() as folder:
        put(files, Path(folder))
        entry = feature_store.extract(folder, store_backbone(), store_batches(), progress=False)
        plain = extract_plainly(store_backbone(), store_batches(), progress=False)
        must(torch.equal(entry.extracted.features, plain.features), "other features than those of the inputs")
        must(torch.equal(entry.extracted.targets, plain.targets), "other targets than those of the data")
        feature_store.list_stored(folder)
        return "refused" if any(Path(folder).glob("*/*.bad")) else "right"
