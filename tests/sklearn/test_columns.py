"""Columns of data frames: what people have in them becomes numbers, and what can't is told at once."""

import numpy as np
import pytest

from brainet_pl.sklearn.columns import Column, encode, read_columns

pandas = pytest.importorskip("pandas")


def read(values):
    return read_columns(pandas.DataFrame({"a": values}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1,234.5", "999", "-12,345,678"], [1234.5, 999, -12345678]),
        (["1.234,5", "0,25", "7"], [1234.5, 0.25, 7]),
        (["1.5", "?", "", "2"], [1.5, np.nan, np.nan, 2]),
        (["1 000", "2 500", "nan"], [1000, 2500, np.nan]),
        ([1, None, "n/a"], [1, np.nan, np.nan]),
        (pandas.array([1, None, 3], dtype="Int64"), [1, np.nan, 3]),
        (["1970-01-02", "2024-02-29 12:00", None], [1, 19782.5, np.nan]),
        (pandas.to_datetime(["1970-01-11", None]), [10, np.nan]),
        ([True, False], [1, 0]),
    ],
)
def test_numbers_and_dates(values, expected):
    frame = pandas.DataFrame({"a": values})
    columns = read_columns(frame)
    found = frame.to_numpy(dtype=float) if columns is None else encode(columns, frame)
    np.testing.assert_allclose(found[:, 0], expected)


def test_categories_and_missing_ones():
    (column,) = read(["red", None, "blue", "NA", "red"])
    assert column == Column("a", ["blue", "missing", "red"])
    assert column.names() == ["a=blue", "a=missing", "a=red"]
    assert column.encode(["blue", "violet", np.nan]).tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_plain_numbers_stay_as_they_are():
    assert read([1.0, 2.0]) is None
    assert read_columns(np.ones((2, 2))) is None


def test_all_problems_come_in_one_error():
    frame = pandas.DataFrame(
        {
            "day": ["31/12/2020", "1/2/2021"] * 30,
            "name": [f"n{i}" for i in range(60)],
            "fine": range(60),
            "span": pandas.to_timedelta(range(60), unit="s"),
        }
    )
    with pytest.raises(ValueError, match="3 columns can't be read") as caught:
        read_columns(frame)
    text = str(caught.value)
    assert "column 'day', got dates such as '31/12/2020'" in text
    assert "at most 50 categories, got 60 in column 'name'" in text
    assert "column 'span', got spans of time" in text
    assert "fine" not in text


def test_later_rows_must_be_of_the_same_kind():
    with pytest.raises(ValueError, match="expected numbers in column 'a', as in fit, got 'many'"):
        read(["1,000", "2,000"])[0].encode(["many"])
    for text in ("someday", "now", "-1", "20240-01-01"):
        with pytest.raises(ValueError, match="expected dates such as 2024-12-31 in column 'a'"):
            read(["2024-01-01", "2024-01-02"])[0].encode([text])
