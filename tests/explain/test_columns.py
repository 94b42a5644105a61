"""Which columns of a row are strange: parts that add up to the score, a changed value that is first, and its words."""

import datetime

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl import BRAINetClassifier, BRAINetRegressor
from brainet_pl.explain.columns import ColumnParts, Units, explain_columns, plain_units, relief_of
from brainet_pl.scores import Generative, ScoreContext
from brainet_pl.scores.fitting import fit_score


def chain(count, seed, d=6):
    """Columns of which each is half of the one before it, in two classes."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = torch.randn(count, d, generator=draw, dtype=torch.double)
    for column in range(1, d):
        x[:, column] = 0.9 * x[:, column - 1] + 0.4 * x[:, column]
    x[:, 0] += 2 * y
    return x, y


@pytest.fixture(scope="module", params=[None, 4])
def density(request):
    x, y = chain(500, 0)
    score = Generative(normalize=False, max_features=request.param, progress=False)
    score.set_context(ScoreContext(2, raw=True))
    fit_score(score, x, y)
    score.density.double()
    return score


def test_parts_add_up_to_the_score(density):
    x, _ = chain(40, 1)
    found = explain_columns([density], x, plain_units(6))
    expected = density.density.scores(density.read(x))["generative"]
    torch.testing.assert_close(found.parts.sum(dim=1), expected, rtol=1e-6, atol=1e-6)
    several = explain_columns([density], x, [Units("both", (0, 1)), Units("rest", (2, 3, 4, 5))])
    torch.testing.assert_close(several.parts.sum(dim=1), expected, rtol=1e-6, atol=1e-6)


def test_the_usual_value_is_where_the_score_is_least(density):
    """Slopes and curvatures by hand, against those of autograd, at the same weights of the networks."""
    x, _ = chain(12, 2)
    read = density.chosen.tolist() or list(range(6))
    found = explain_columns([density], x, plain_units(6))
    moved = x.clone().requires_grad_()
    density.density.scores(density.read(moved))["generative"].sum().backward()
    slope = (x - found.usual) / found.spread.square()
    torch.testing.assert_close(slope[:, read], moved.grad[:, read], rtol=1e-5, atol=1e-6)
    relief = 0.5 * ((x - found.usual) / found.spread).square()
    torch.testing.assert_close(found.relief[:, read], relief[:, read], rtol=1e-4, atol=1e-6)
    assert not found.relief[:, [i for i in range(6) if i not in read]].any()


def test_a_changed_value_has_the_most_relief_though_its_children_are_strange_too():
    x, y = chain(500, 0)
    score = Generative(normalize=False, progress=False)
    score.set_context(ScoreContext(2, raw=True))
    fit_score(score, x, y)
    new, _ = chain(200, 3)
    column = torch.arange(200) % 6
    new[torch.arange(200), column] += 3.0
    found = explain_columns([score], new, plain_units(6))
    assert float((found.relief.argmax(dim=1) == column).double().mean()) > 0.9
    row = 2
    assert found.because(row)[0].startswith("column 2 is ")
    assert "with the other columns" in found.because(row)[0]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10**6))
def test_relief_of_a_block_is_what_the_best_block_gains(d, seed):
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(d, d, generator=draw, dtype=torch.double)
    precision, x = root @ root.T + torch.eye(d), torch.randn(d, generator=draw, dtype=torch.double)
    wiring = torch.linalg.cholesky(precision).T
    block = [0, 1]
    slope = (precision @ x)[block][None]
    found = relief_of(wiring[:, block], torch.ones(1, d, dtype=torch.double), slope)
    rest = [i for i in range(d) if i not in block]
    best = x.clone()
    best[block] = -torch.linalg.solve(precision[block][:, block], precision[block][:, rest] @ x[rest]) if rest else 0.0
    gained = 0.5 * (x @ precision @ x - best @ precision @ best)
    torch.testing.assert_close(found[0], gained, rtol=1e-3, atol=1e-6)


def test_levels_have_no_usual_values():
    x, y = chain(300, 0)
    score = Generative(kind="discrete", normalize=False, progress=False)
    score.set_context(ScoreContext(2, raw=True))
    fit_score(score, x.float(), y)
    assert explain_columns([score], x.float(), plain_units(6)) is None


def test_words_of_numbers_dates_categories_and_gaps():
    units = [
        Units("price", (0, 1), (100_000.0, 0.0), (20_000.0, 1.0)),
        Units("seen", (2,), (19_000.0,), (10.0,), is_date=True),
        Units("district", (3, 4), (0.5, 0.5), (0.5, 0.5), ("north", "south")),
    ]
    values = torch.tensor([[-4.4, 0.0, 9.0, 1.0, -1.0], [0.0, 1.0, 0.0, 1.0, -1.0]])
    usual = torch.tensor([[0.0, 0.0, 0.0, -1.0, 1.0], [0.0, 0.0, 0.0, 1.0, -1.0]])
    spread = torch.full((2, 5), 0.5)
    relief = torch.tensor([[9.0, 8.0, 7.0], [9.0, -1.0, 5.0]])
    found = ColumnParts(units, relief, relief, values, usual, spread)
    day = datetime.date(1970, 1, 1) + datetime.timedelta(days=19_090)
    assert found.because(0) == [
        "price is 12,000; with the other columns 83,550 to 116,450 would be usual",
        f"seen is {day}; with the other columns 2021-12-31 to 2022-01-16 would be usual",
        "district is north; with the other columns south would be usual",
    ]
    assert found.because(1) == ["price is missing", "district is north, which is rare with the other columns"]


def houses(count, seed):
    """A table with a column of words, one with gaps and one that never varies."""
    rng = np.random.default_rng(seed)
    rooms = rng.integers(1, 8, count).astype(float)
    district = rng.choice(["north", "south"], count)
    price = 20_000 * rooms + 30_000 * (district == "south") + rng.normal(0, 4_000, count)
    age = rng.uniform(0, 80, count)
    age[rng.random(count) < 0.1] = np.nan
    frame = pd.DataFrame({"rooms": rooms, "district": district, "price": price, "age": age, "country": 1.0})
    return frame, (price + rng.normal(0, 9_000, count) > 110_000).astype(int)


@pytest.fixture(scope="module")
def estimator():
    return BRAINetClassifier(random_state=0, max_epochs=15, members=2).fit(*houses(400, 0))


def test_a_row_of_a_table_is_explained_in_its_units(estimator):
    frame, _ = houses(30, 1)
    frame.loc[0, "price"], frame.loc[0, "rooms"] = 400_000.0, 4.0
    found = estimator.explain(frame)
    first = found.because(0)[0]
    assert first.startswith("price is 400,000; with the other columns ")
    low, high = (float(part.replace(",", "")) for part in first.split("columns ")[1].split(" would")[0].split(" to "))
    assert 60_000 < low < high < 180_000
    assert "calibration rows" in found.sentences[0]
    assert found.sentences[0].endswith(f"{first}.")
    assert found.to_dict()[0]["because"] == found.because(0)


def test_parts_of_folds_add_up_to_the_score_and_shares_to_the_verdict(estimator):
    found = estimator.explain(houses(40, 2)[0])
    torch.testing.assert_close(found.columns.parts.sum(dim=1), found.prediction["generative"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum(found.shares.values()), found.prediction[found.score], check_dtype=False)
    np.testing.assert_allclose(found.prediction["known_p"], estimator.known_p(houses(40, 2)[0]))
    assert [units.name for units in found.columns.units] == ["rooms", "district", "price", "age", "country"]


def test_a_row_of_the_fit_resembles_itself_and_a_file_keeps_it(estimator, tmp_path):
    frame, _ = houses(400, 0)
    estimator.save(tmp_path / "model.pt")
    again = BRAINetClassifier.load(tmp_path / "model.pt")
    found = again.explain(frame[50:60])
    assert found.resembled.numbers[:, 0].tolist() == list(range(50, 60))
    assert found.sentences == estimator.explain(frame[50:60]).sentences


def test_one_column_and_few_rows_have_a_sentence():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    model = BRAINetRegressor(random_state=0, max_epochs=5, members=1).fit(x, 2 * x[:, 0] + rng.normal(size=200))
    found = model.explain(np.array([[0.0], [30.0]]))
    assert found.sentences[1].startswith("Stranger than all ")
    assert "x0 is 30; with the other columns" in found.sentences[1]
    few = BRAINetRegressor(random_state=0, max_epochs=3).fit(x[:30], x[:30, 0])
    assert few.explain(x[:2]).sentences[0].startswith("Nothing was held out")
