"""Columns of tables: what people have in them becomes numbers, and what can't is told at once."""

import datetime
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brainet_pl.serving.tables import Feature, encode_array, encode_rows, features_of
from brainet_pl.tables import Column, encode_frame, read_column, read_frame
from brainet_pl.tables.cells import Notation, days_of, text_of
from brainet_pl.tables.frame import columns_of

pandas = pytest.importorskip("pandas")


def numbers(values, later=None):
    """A column as numbers (N,), read from itself."""
    values = pandas.Series(values)
    return read_column("a", values).encode(values if later is None else pandas.Series(later)).numbers[:, 0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1,234.5", "999", "-12,345,678"], [1234.5, 999, -12345678]),
        (["1.234,5", "0,25", "7"], [1234.5, 0.25, 7]),
        (["1,234", "0,5"], [1.234, 0.5]),  # one value says what the comma means for all
        (["1.5", "?", "", "2"], [1.5, np.nan, np.nan, 2]),
        (["1 000", "2 500", "nan"], [1000, 2500, np.nan]),
        (["$5.20", "-$1,000.00", None], [5.2, -1000, np.nan]),
        (["12 %", "3 %", "7.5%"], [12, 3, 7.5]),
        (["3,50 €", "1.200,00 €"], [3.5, 1200]),
        ([1, None, "n/a"], [1, np.nan, np.nan]),
        (["3", "-", "-3", "unknown"], [3, np.nan, -3, np.nan]),
        (["1970-01-02", "-"], [1, np.nan]),
        (pandas.array([1, None, 3], dtype="Int64"), [1, np.nan, 3]),
        ([True, False], [1, 0]),
        (["1970-01-02", "2024-02-29 12:00", None], [1, 19782.5, np.nan]),
        (pandas.to_datetime(["1970-01-11", None]), [10, np.nan]),
        (pandas.to_datetime(["1970-01-02 01:00"]).tz_localize("Europe/Amsterdam"), [1.0]),
        (["1970-01-02T06:00Z", "1970-01-02 06:00:00+02:00", "1970-01-02"], [1.25, 1 + 4 / 24, 1]),
        (pandas.period_range("1970-01", periods=3, freq="M"), [0, 31, 59]),
        (pandas.period_range("1970Q1", periods=2, freq="Q"), [0, 90]),
        (["1970-02", "1970-03"], [31, 59]),
        (["1970Q2", "1970-Q3"], [90, 181]),
        (pandas.to_timedelta([36, None], unit="h"), [1.5, np.nan]),
        (pandas.Series([datetime.timedelta(hours=12), None], dtype=object), [0.5, np.nan]),
    ],
)
def test_numbers_and_dates(values, expected):
    np.testing.assert_allclose(numbers(values), expected)


def test_a_data_type_is_law():
    for labels, names in (
        ([3, 4, 6, 8, 3], ["a=3", "a=4", "a=6", "a=8"]),
        (["01234", "10115"], ["a=01234", "a=10115"]),
        (["1,2", "3,4", "1,2"], ["a=1,2", "a=3,4"]),
    ):
        column = read_column("a", pandas.Series(pandas.Categorical(labels)))
        assert column.names() == names
        assert column.note == ""
    column = read_column("a", pandas.Series(pandas.Categorical([3, 4, None])))
    assert column.encode(pandas.Series([4.0, np.nan, 5])).numbers.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_digits_with_leading_zeros_are_codes_and_that_is_told():
    with pytest.warns(UserWarning, match="column 'zip': read as categories, because digits with leading zeros"):
        (column,) = read_frame({"zip": ["01234", "10115", None]})
    assert column.categories == ["01234", "10115", "missing"]
    assert read_column("a", ["0", "10", "0.5"]) == Column("a")


def test_categories_and_missing_ones():
    column = read_column("a", ["red", None, "blue", "NA", "red"])
    assert column == Column("a", "category", ["blue", "missing", "red"])
    assert column.names() == ["a=blue", "a=missing", "a=red"]
    encoded = column.encode(["blue", "violet", np.nan])
    assert encoded.numbers.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert encoded.unread == ["violet"]


def test_rare_ones_of_many_categories_are_one():
    texts = ["a"] * 30 + ["b"] * 20 + ["c"] * 3 + [f"rare {i}" for i in range(60)]
    with pytest.warns(UserWarning, match=r"3 most frequent of 63 .* all others \(60 rows\) as one, '\(other\)'"):
        (column,) = read_frame({"a": texts})
    assert column.names() == ["a=a", "a=b", "a=c", "a=(other)"]
    encoded = column.encode(["b", "rare 5", "never seen"])
    assert encoded.numbers.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    assert encoded.unread == []
    many = [f"c{i:02}" for i in range(70) for _ in range(3 + (i < 49))]
    assert read_column("a", many).categories == [f"c{i:02}" for i in range(49)]
    with pytest.raises(ValueError, match="at most 50 categories, got 60 in column 'a': drop it if it is a name"):
        read_column("a", [f"n{i}" for i in range(60)])


def test_text_where_fit_had_numbers_is_missing_and_told():
    columns = read_frame({"cylinders": ["4", "6"]})
    with pytest.warns(
        UserWarning, match=r"got text in column 'cylinders': 'rotary' \(1 row\); such a value counts as m"
    ):
        found = encode_frame(columns, {"cylinders": ["6", "rotary"]})
    np.testing.assert_array_equal(found, [[6], [np.nan]])
    mostly = [str(i / 8) for i in range(99)] + ["rotary"]
    with pytest.warns(UserWarning, match=r"column 'a': read as numbers; 'rotary' \(1 rows\) counts as missing"):
        (column,) = read_frame({"a": mostly})
    assert column.kind == "number"
    assert read_column("a", ["yes", "no", "unknown"]).categories == ["no", "unknown", "yes"]


def test_the_folder_of_a_model_reads_cells_alike():
    colours = ["red"] * 3 + ["blue"] * 3 + ["", "x"]
    for values in (["$5", "-", "$6,000.5", None], ["2024-01", "2024Q2", "unknown"], colours):
        column = read_column("a", values, most=3)
        expected = column.encode(values).numbers
        gaps = np.isnan(expected[:, 0])
        features = [replace(feature, fill=0.0) for feature in features_of(column)]
        found = np.stack([feature.of(values) for feature in features], axis=1)
        np.testing.assert_allclose(found, np.where(np.isnan(expected), 0.0, expected))
        np.testing.assert_array_equal(Feature("a", "missing").of(values)[gaps], 1.0)


def test_a_comma_is_decided_by_column_told_or_refused():
    with pytest.warns(UserWarning, match="read with commas between thousands, so that '1,234' is 1234"):
        (column,) = read_frame({"a": ["1,234", "999"]})
    assert column.encode(["1,234"]).numbers.tolist() == [[1234]]
    with pytest.raises(ValueError, match=r"all written in one way in column 'a', got '1,5', '1\.5'"):
        read_column("a", ["1,5", "1.5"])
    european = read_column("a", ["1,5", "2,75"])
    assert european.note == ""
    for other in ("1.5", "1.500", "1,500.5"):
        with pytest.raises(ValueError, match=r"numbers such as 1234,5 in column 'a', as in fit, got .* in row 1"):
            european.encode(["1,5", other])
    with pytest.raises(ValueError, match=r"numbers such as 1,234\.5 in column 'a', as in fit, got '1,5' in row 0"):
        column.encode(["1,5"])


@given(st.integers(-(10**9), 10**9), st.sampled_from([",", " ", "'", "."]), st.sampled_from(["", "$", "%"]))
def test_written_numbers_are_read_back(value, separator, symbol):
    """By Python's own way to write thousands."""
    decimal = "," if separator == "." else "."
    text = f"{value:,}".replace(",", separator) + f"{decimal}25" + symbol
    assert Notation(separator, decimal, symbol).number(text) == (abs(value) + 0.25) * (-1 if value < 0 else 1)


@given(st.datetimes(datetime.datetime(1600, 1, 1), datetime.datetime(2200, 1, 1)), st.integers(-14, 14))
def test_dates_are_those_of_the_standard_library(moment, hours):
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    moment = moment.replace(tzinfo=zone)
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert days_of(text_of(moment)) == pytest.approx(since.total_seconds() / 86400, abs=1e-9)
    assert days_of(moment.isoformat()) == pytest.approx(since.total_seconds() / 86400, abs=1e-9)


def test_all_problems_come_in_one_error():
    with pytest.raises(ValueError, match="3 columns can't be read") as caught:
        read_frame(
            {
                "day": ["31/12/2020", "1/2/2021"] * 30,
                "name": [f"n{i}" for i in range(60)],
                "fine": range(60),
                "lists": [[1, 2]] * 60,
            }
        )
    text = str(caught.value)
    assert "column 'day', got dates such as '31/12/2020'" in text
    assert "at most 50 categories, got 60 in column 'name'" in text
    assert "one value in every cell of column 'lists', got a list in a cell" in text
    assert "fine" not in text


def test_names_must_differ():
    frame = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(ValueError, match="names that differ, got 'a' twice: rename one"):
        columns_of(frame)


def test_later_rows_must_be_dates_too():
    column = read_column("a", ["2024-01-01", "2024-01-02"])
    for text in ("someday", "now", "-1", "20240-01-01", "2024-13-01"):
        with pytest.raises(ValueError, match="expected dates such as 2024-12-31 in column 'a'"):
            column.encode([text])


def test_an_array_is_rows_in_the_order_of_the_columns():
    features = [
        Feature("a", fill=2.0, center=1.0, scale=4.0),
        Feature("b", "date", center=1.0),
        Feature("a", "missing"),
    ]
    rows = [[5.0, "1970-01-03"], [np.nan, "1970-01-02"]]
    table = np.array(rows, dtype=object)
    expected = [[1.0, 1.0, 0.0], [0.25, 0.0, 1.0]]
    np.testing.assert_array_equal(encode_array(features, table), expected)
    np.testing.assert_array_equal(encode_rows(features, rows), expected)
    numbers = [Feature("a", center=1.0), Feature("b", scale=2.0)]
    np.testing.assert_array_equal(encode_array(numbers, np.array([[3.0, 4.0]])), [[2.0, 2.0]])
    for wrong in (np.zeros((2, 3)), np.zeros(2), np.zeros((0, 2))):
        with pytest.raises(ValueError, match="expected rows of 2 columns, a, b, got"):
            encode_array(numbers, wrong)
