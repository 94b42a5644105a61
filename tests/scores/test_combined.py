"""Several scores in one."""

import math

import pytest
import torch

from brainet_pl.scores import KNN, Combined, Generative, Score, ScoreSet
from brainet_pl.scores.combined import cross_fitted
from brainet_pl.scores.fitting import fit_score
from brainet_pl.scores.reference import fit_surprise, p_values
from brainet_pl.tasks.passes import Passes


class Column(Score):
    """One column of the features."""

    needs_fit = False
    units = {"column": "u"}  # noqa: RUF012

    def __init__(self, column=0, name=None):
        super().__init__()
        self.column, self.name = column, name

    def forward(self, passes):
        return {"column": passes.features[:, self.column]}


def passes_of(x):
    return Passes(torch.zeros(1, len(x), 3), None, x, torch.full((len(x), 3), 1 / 3), {"energy": x[:, 0]})


@pytest.fixture
def data():
    return torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))


def finalized(scores, x):
    for part in x.split(100):
        passes = passes_of(part)
        scores.observe(passes, scores(passes))
    scores.finalize()
    return scores


def test_scores_of_one_class_live_side_by_side_under_names(data):
    scores = finalized(ScoreSet([Column(1), Column(2, "second")], {"energy": "nats"}), data)
    assert list(scores.members) == ["Column", "Column_second"]
    found = scores(passes_of(data[:5]))
    torch.testing.assert_close(found["column"], data[:5, 1])
    torch.testing.assert_close(found["column_second"], data[:5, 2])
    assert scores.units == {"energy": "nats", "column": "u", "column_second": "u"}
    assert scores.reference.names == ["energy", "column", "column_second"]
    with pytest.raises(ValueError, match=r"column_second twice.*Column\(name=…\)"):
        scores.add(Column(0, "second"))


class Relative(Column):
    """A column in means of the validation data, which it counts itself."""

    units = {"column": "u", "relative": ""}  # noqa: RUF012

    def __init__(self, column=0, name=None):
        super().__init__(column, name)
        self.rows, self.mean = 0, None

    def observe(self, passes, scores):
        self.rows += len(passes.features)
        assert torch.equal(scores["column"], passes.features[:, self.column])

    def finalize(self, columns):
        assert len(columns["column"]) == self.rows
        self.mean = columns["column"].mean()
        return {"relative": columns["column"] / self.mean}


def test_a_score_of_ones_own_may_learn_from_validation_data(data):
    score = Relative(1, "own")
    scores = finalized(ScoreSet([score]), data)
    assert score.rows == 1000
    expected = (data[:, 1] / data[:, 1].mean()).sort().values
    torch.testing.assert_close(scores.reference["relative_own"], expected)


@pytest.mark.parametrize("name", ["a b", "1", "", 3])
def test_names_are_words(name):
    with pytest.raises(ValueError, match="name of a score"):
        KNN(name=name)


def test_the_joint_score_is_the_sum_of_surprises_from_the_first_epoch_on(data):
    scores = finalized(ScoreSet([Combined(), Column(1), Column(2, "second")], {"energy": ""}), data)
    x = 3 * torch.randn(50, 3)
    expected = sum(fit_surprise(data[:, c])(x[:, c]) for c in (1, 2, 0))
    torch.testing.assert_close(scores(passes_of(x))["joint"], expected)
    assert "joint" in scores.reference
    assert len(scores.reference["joint"]) == 1000
    chosen = finalized(ScoreSet([Combined(of=["column"], name="one"), Column(1)]), data)
    torch.testing.assert_close(chosen(passes_of(x))["joint_one"], fit_surprise(data[:, 1])(x[:, 1]))


def test_nan_in_one_score_is_nan(data):
    scores = finalized(ScoreSet([Combined(), Column(1)], {"energy": ""}), data)
    x = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, 0.0]])
    joint = scores(passes_of(x))["joint"]
    assert joint[0].isnan()  # its p-value is 0
    assert joint[1].isfinite()


def test_weights_bring_the_joint_score_back_even_beside_others(data):
    scores = finalized(ScoreSet([Column(1), Combined()], {"energy": ""}), data)
    again = ScoreSet([Column(1), Column(2, "second"), Combined()], {"energy": ""})
    again.load_state_dict(scores.state_dict(), strict=False)
    x = passes_of(torch.randn(9, 3))
    torch.testing.assert_close(again(x)["joint"], scores(x)["joint"])


def test_one_validation_sample_is_a_reference_too(data):
    scores = finalized(ScoreSet([Column(1)]), data[:1])
    assert scores.reference["column"].tolist() == data[:1, 1].tolist()


def test_what_is_not_there_is_said(data):
    with pytest.raises(ValueError, match=r"got knn: it has energy"):
        finalized(ScoreSet([Combined(of=["knn"])], {"energy": ""}), data)
    with pytest.raises(ValueError, match="expected of to be a list of names"):
        Combined(of="generative")


def test_a_density_knows_its_own_scores_by_any_name(data):
    """`combined` is standardised with its own density's moments, and is in the reference from the first epoch on."""
    labels = torch.arange(1000) % 3
    scores = ScoreSet(
        [Generative(progress=False), Generative(progress=False, normalize=False, name="b")], {"energy": ""}
    )
    for score in scores:
        fit_score(score, data, labels)
    finalized(scores, data)
    columns = {name: scores.reference[name] for name in ("combined", "combined_b")}
    for name, values in columns.items():
        assert values.mean().abs() < 0.05, name
        assert len(values) == 1000
    assert not torch.equal(*columns.values())


def test_of_many_features_some_are_read(data):
    wide = torch.cat([data, data.square(), data.abs()], dim=1)
    score, again = Generative(progress=False, max_features=4), Generative(max_features=4)
    fit_score(score, wide, torch.zeros(1000))
    passes = Passes(torch.zeros(1, 1000, 1), None, wide, torch.ones(1000, 1))
    found = score(passes)["generative"]
    assert score.density.ggt.num_variables == len(score.chosen) == 4
    torch.testing.assert_close(found, score.density.scores(wide[:, score.chosen])["generative"])
    again.load_state_dict(score.state_dict())
    torch.testing.assert_close(again(passes)["generative"], found)
    every = Generative(progress=False, max_features=9)
    fit_score(every, wide, torch.zeros(1000))
    assert not len(every.chosen)


def test_few_samples_call_no_more_known_ones_unknown_than_agreed():
    """Of 19 validation samples each is judged by the others; by themselves, they would call 12 % unknown."""
    rng, shares = torch.Generator().manual_seed(0), {"cross-fitted": [], "plain": []}
    for _ in range(60):
        held, new = (torch.randn(n, 3, generator=rng).exp() for n in (19, 100))
        surprises = [fit_surprise(column) for column in held.T]
        joint = sum(one(new[:, i]) for i, one in enumerate(surprises))
        plain = sum(one(held[:, i]) for i, one in enumerate(surprises))
        for name, reference in (("cross-fitted", cross_fitted(list(held.T))), ("plain", plain)):
            shares[name].append(float((p_values(joint, reference.sort().values) < 0.051).float().mean()))
    found = {name: sum(values) / 60 for name, values in shares.items()}
    assert 0.02 < found["cross-fitted"] < 0.06
    assert found["plain"] > 0.09
    scores = finalized(ScoreSet([Combined(), Column(1)], {"energy": ""}), held)
    expected = cross_fitted([held[:, 1], held[:, 0]]).sort().values
    torch.testing.assert_close(scores.reference["joint"], expected)


# -- what is joined ----------------------------------------------------------------------------------------------------


class Unjoined(Column):
    joins = "never"


def of_three(data, *scores):
    return finalized(ScoreSet([*scores, Combined()], {"energy": "nats"}), data)


def test_a_sample_of_the_reference_counts_as_a_new_one(data):
    scores = of_three(data, Column(1), Column(2, "near"))
    new = torch.randn(4000, 3, generator=torch.Generator().manual_seed(2))
    p = p_values(scores(passes_of(new))["joint"], scores.reference["joint"])
    assert float((p <= 0.05).float().mean()) == pytest.approx(0.05, abs=0.015)


def test_what_others_say_as_well_is_not_joined(data):
    scores = of_three(data, Column(1), Unjoined(2, "more"))
    assert scores.parts_of("joint") == ("column", "energy")
    alone = of_three(data, Unjoined(2, "more"))
    assert alone.parts_of("joint") == ("column_more", "energy")  # better than nothing
