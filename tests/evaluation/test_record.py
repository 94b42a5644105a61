"""The record of a test against a slow twin: dictionaries of samples, one at a time."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from brainet_pl.evaluation import record as record_module
from brainet_pl.evaluation.record import SampleBatch, SetRecord, TestRecord, group_means
from brainet_pl.metrics.catalogue import SEPARATION
from brainet_pl.metrics.curves import separation
from brainet_pl.metrics.passes import PassTrace, pass_metrics, trace_passes

SETS = {"test": "known", "b": "near", "a": "far"}


class Twin:
    """Samples by set and number; the first that is told of a number stays."""

    def __init__(self):
        self.samples = {name: {} for name in SETS}
        self.names = {name: [] for name in SETS}  # the columns of each batch

    def add(self, name, numbers, columns):
        self.names[name].append(list(columns))
        for i, number in enumerate(numbers):
            self.samples[name].setdefault(number, {column: values[i] for column, values in columns.items()})

    def columns(self, name):
        every = self.names[name]
        return [column for column in every[0] if all(column in other for other in every)] if every else []

    def column(self, name, column):
        return [self.samples[name][number][column] for number in sorted(self.samples[name])]


@st.composite
def batches(draw):
    """(set, sample numbers, columns) in a random order, some sets with a column that a batch lacks, some with NaN."""
    found = []
    for name in SETS:
        total = draw(st.integers(0, 12))
        order = draw(st.permutations(range(total)))
        order += draw(st.lists(st.sampled_from(order), max_size=4)) if order else []  # seen twice
        missing = draw(st.sampled_from([None, "first", "second"]))
        nan = draw(st.sampled_from([None, None, "first"]))
        while order:
            cut = draw(st.integers(1, len(order)))
            numbers, order = order[:cut], order[cut:]
            columns = {
                column: [float((31 * n + 7 * len(column)) % 11) for n in numbers] for column in ("first", "second")
            }
            if nan:
                columns[nan] = [math.nan if n == 2 else v for n, v in zip(numbers, columns[nan], strict=True)]
            if missing and draw(st.booleans()):
                del columns[missing]
            found.append((name, numbers, columns))
    return draw(st.permutations(found))


def same(a, b):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), equal_nan=True, check_dtype=False)


@settings(max_examples=200, deadline=None)
@given(batches())
def test_against_a_twin(told):
    record, twin = TestRecord(SETS), Twin()
    for name, numbers, columns in told:
        tensors = {column: torch.tensor(values) for column, values in columns.items()}
        answers = {f"{column}_answer": values + 1 for column, values in tensors.items()}
        record.add(name, torch.tensor(numbers), SampleBatch(tensors, answers))
        twin.add(name, numbers, columns)
    assert record.gather() is record
    assert (record.known.name, [part.name for part in record.unknown]) == ("test", ["b", "a"])
    rankable = {}
    for name, part in record.sets.items():
        assert part.numbers.tolist() == sorted(twin.samples[name])
        assert len(part) == len(twin.samples[name])
        assert list(part.scores) == twin.columns(name)
        assert list(part.answers) == [f"{column}_answer" for column in twin.columns(name)]
        for column in twin.columns(name):
            same(part.scores[column], twin.column(name, column))
            same(part.answers[f"{column}_answer"], [v + 1 for v in twin.column(name, column)])
        rankable[name] = [c for c in twin.columns(name) if not any(math.isnan(v) for v in twin.column(name, c))]
        assert list(part.rankable()) == rankable[name]
    if any(not len(part) for part in record.sets.values()):
        return
    found = record.separations()
    assert list(found) == ["b", "a"]
    for name in found:
        assert list(found[name]) == [column for column in rankable[name] if column in rankable["test"]]
        for column, measures in found[name].items():
            known, unknown = twin.column("test", column), twin.column(name, column)
            assert measures == separation(torch.tensor(known), torch.tensor(unknown))


def test_known_samples_after_shifts_count_as_known_in_the_full_spectrum():
    """Against scikit-learn, and against sums by hand for selective prediction with unknown samples."""
    draw = torch.Generator().manual_seed(0)
    sets = {"test": "known", "far": "far", "shift/fog/1": "shift", "shift/fog/2": "shift"}
    x = {name: torch.randn(30 + 5 * i, generator=draw) + i for i, name in enumerate(sets)}
    wrong = (torch.rand(30, generator=draw) < 0.3).float()
    record = TestRecord(sets)
    for name, values in x.items():
        for part in torch.arange(len(values)).split(8):
            answers = {"wrong": wrong[part]} if name == "test" else {}
            record.add(name, part, SampleBatch({"doubt": values[part]}, answers))
    found = record.gather().separations()["far"]["doubt"]
    known = torch.cat([x["test"], x["shift/fog/1"], x["shift/fog/2"]])
    truth = [0] * len(known) + [1] * len(x["far"])
    assert found["AUROC_full"] == pytest.approx(roc_auc_score(truth, torch.cat([known, x["far"]])))
    assert found["AUROC"] == pytest.approx(roc_auc_score([0] * 30 + [1] * 35, torch.cat([x["test"], x["far"]])))
    assert len(record.shifted["doubt"]) == 85
    values, failed = torch.cat([x["test"], x["far"]]), torch.cat([wrong, torch.ones(35)])
    share = torch.tensor([0.5 / 30] * 30 + [0.5 / 35] * 35)
    area, coverage, risk = 0.0, 0.0, 0.0
    for i in values.argsort().tolist():
        more = float(share[i] * failed[i])
        area += float(share[i]) * (risk + more / 2)
        coverage, risk = coverage + float(share[i]), risk + more
    assert coverage == pytest.approx(1)
    assert found["SCOD"] == pytest.approx(area, rel=1e-5)


def test_nothing_is_shifted_without_shifts():
    record = TestRecord({"test": "known", "far": "far"})
    for name in ("test", "far"):
        record.add(name, torch.arange(3), SampleBatch({"doubt": torch.rand(3)}))
    assert record.gather().shifted == {}
    assert set(record.separations()["far"]["doubt"]) == set(SEPARATION) - {"AUROC_full", "SCOD"}


def test_all_that_two_processes_saw_counts_once(monkeypatch):
    """Both saw everything, in different batches: what is gathered is what one alone would have."""
    x = torch.rand(20, generator=torch.Generator().manual_seed(0))
    alone, shared = TestRecord(SETS), TestRecord(SETS)
    for record in (alone, shared):
        record.add("test", torch.arange(20), SampleBatch({"doubt": x}))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    other = TestRecord(SETS)
    for part in (slice(0, 7), slice(7, 20)):
        other.add("test", order[part], SampleBatch({"doubt": x[order[part]]}))
    theirs = {id(getattr(shared, part)["test"]): getattr(other, part)["test"] for part in ("_rows", "_traced")}
    monkeypatch.setattr(record_module, "all_gather", lambda own: [own, theirs.get(id(own), own)])
    same(shared.gather().known.scores["doubt"], x)
    assert shared.known.numbers.tolist() == list(range(20))
    monkeypatch.undo()
    assert torch.equal(alone.gather().known.scores["doubt"], shared.known.scores["doubt"])


def test_gathering_again_changes_nothing():
    record = TestRecord(SETS)
    record.add("a", torch.tensor([1, 0]), SampleBatch({"doubt": torch.tensor([1.0, 0.0])}))
    record.gather().gather()
    assert record.sets["a"].scores["doubt"].tolist() == [0, 1]


def test_everything_is_kept_in_32_bits_away_from_the_graph():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    record = TestRecord(SETS)
    record.add("test", torch.arange(2), SampleBatch({"doubt": 2 * x}, {"label": torch.tensor([1, 2])}))
    record.gather()
    assert record.known.scores["doubt"].dtype == torch.float32
    assert not record.known.scores["doubt"].requires_grad
    assert record.known.answers["label"].dtype == torch.int64


def test_traces_of_batches_become_one():
    probs = (2 * torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(0))).softmax(dim=-1)
    target = torch.randint(3, (30,), generator=torch.Generator().manual_seed(1))
    whole = trace_passes(probs, None, target)
    record = TestRecord(SETS)
    for part in (torch.arange(20, 30), torch.arange(20)):  # the last first
        trace = trace_passes(probs[:, part], None, target[part])
        record.add("test", part, SampleBatch({"doubt": probs[0, part, 0]}, trace=trace, passes=4))
        record.add("b", part, SampleBatch({"doubt": probs[0, part, 0]}, trace=trace if part[0] else None))
    record.gather()
    assert (record.steps, record.passes) == ([1, 2, 3, 4], 4)
    for name, values in whole.scores.items():
        same(record.known.running[name], values)
    for name, values in pass_metrics(whole.sums).items():
        assert pass_metrics(record.known.sums)[name] == pytest.approx(values)
    assert record.sets["b"].running == {}  # a batch has no trace: there is none of the set
    assert record.sets["a"].sums is None


@pytest.mark.parametrize("sizes", [[3] * 400, [700, 500], [1] * 1100 + [100]])
def test_many_batches_are_packed_and_traces_of_many_samples_thinned(monkeypatch, sizes):
    """Columns stay whole; of the running scores a fixed number of samples is left, the same however they came."""
    monkeypatch.setattr(record_module, "MOST_TRACED", 100)
    scores = torch.rand(2, 1200, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(len(sizes)))
    record = TestRecord(SETS)
    for part in order.split(sizes):
        trace = PassTrace([1, 2], {"doubt": scores[:, part]}, None)
        record.add("test", part, SampleBatch({"doubt": scores[1, part]}, {"label": part}, trace))
    assert len(record._rows["test"].batches) <= 256 + len(sizes) // 256
    assert len(record._traced["test"].batches) <= 256
    record.gather()
    same(record.known.scores["doubt"], scores[1])
    assert record.known.answers["label"].tolist() == list(range(1200))
    golden = (math.sqrt(5) - 1) / 2
    chosen = sorted(sorted(range(1200), key=lambda n: n * golden % 1)[:100])
    same(record.known.running["doubt"], scores[:, chosen])
    assert max(b - a for a, b in pairwise([0, *chosen, 1200])) < 40  # spread over the whole set


def parts(**roles):
    return [SetRecord(name, role) for name, role in roles.items()]


def test_near_and_far_sets_are_averaged_apart():
    found = {name: {"entropy": {"AUROC": i / 10, "n_ood": 5.0}} for i, name in enumerate("abcd")}
    means = group_means(found, parts(a="far", b="near", c="near", d="far"))
    assert list(means) == ["near_mean", "far_mean"]
    assert means["near_mean"]["entropy"] == pytest.approx({"AUROC": 0.15, "n_ood": 10.0})
    assert means["far_mean"]["entropy"] == pytest.approx({"AUROC": 0.15, "n_ood": 10.0})
    assert group_means(found, parts(a="far", b="far", c="far", d="far")) == {}
    assert set(group_means(found, parts(a="near", b="far", c="far", d="far"))) == {"far_mean"}
    assert group_means({}, parts(a="near", b="near")) == {}


def test_a_mean_is_of_the_scores_that_all_its_sets_have():
    found = {"a": {"x": {"AUROC": 0.5}, "y": {"AUROC": 0.7}}, "b": {"y": {"AUROC": 0.9}, "z": {"AUROC": 0.1}}}
    assert group_means(found, parts(a="near", b="near")) == {"near_mean": {"y": {"AUROC": pytest.approx(0.8)}}}
