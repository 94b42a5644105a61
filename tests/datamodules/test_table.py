"""CSV files and the layout of the UCI sets, on files made here."""

import codecs
import csv
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brainet_pl.callbacks import PredictionFile
from brainet_pl.datamodules import UCI, Table
from brainet_pl.datamodules.columns import encode, fit_encoders, is_missing, read_csv
from brainet_pl.lightning.module import BRAINet
from brainet_pl.tables.cells import plain_number


def tensors(samples):
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.tensor(y)


def is_text(value):
    return not is_missing(value) and plain_number(value) is None


@pytest.fixture
def csv_file(tmp_path):
    """40 houses: size (two missing), colour (one missing), an identifier, a constant, a price."""
    rng = np.random.default_rng(0)
    lines = ["size,colour,id,country,price"]
    for i in range(40):
        size = "" if i in (3, 17) else f"{rng.uniform(50, 150):.1f}"
        colour = "NA" if i == 5 else ["red", "blue", "grey"][i % 3]
        lines.append(f"{size}, {colour},house-{i},nl,{1000 + i}")
    path = tmp_path / "houses.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_table_is_encoded_by_its_training_rows(csv_file):
    data = Table(csv_file, "price", drop=["id"], test_fraction=0.2, val_fraction=0.2, seed=1)
    data.setup("fit")
    sizes = [len(s) for s in (data.train_set, data.val_set, data.test_set)]
    assert sizes == [26, 6, 8]
    x, y = tensors(data.train_set)
    names = data.feature_names
    assert "country" not in " ".join(names)  # it never varies
    assert {"colour=blue", "colour=grey", "colour=red"} <= set(names)
    assert y.dtype is torch.float32
    assert 1000 <= y.min() <= y.max() < 1040
    seen = x[:, names.index("size")]
    if "size missing" in names:
        gaps = x[:, names.index("size missing")] == 1
        assert (seen[gaps] == 0).all()
        seen = seen[~gaps]
    assert seen.mean().abs() < 1e-5
    assert seen.std(correction=0) == pytest.approx(1, abs=1e-4)
    ones = x[:, [i for i, n in enumerate(names) if n.startswith("colour")]]
    assert (ones.sum(1) == 1).all()
    everything = torch.cat([tensors(s)[1] for s in (data.train_set, data.val_set, data.test_set)])
    assert sorted(everything.tolist()) == [1000.0 + i for i in range(40)]


def test_encoders_against_arithmetic():
    columns = {"n": ["1", "", "3", "5"], "c": ["b", "a", "?", "b"], "k": ["1", "2", "1", "2"]}
    numeric, categorical, named = fit_encoders(columns, categorical=["k"])
    assert numeric.features == ("n", "n missing")
    assert categorical.features == ("c=a", "c=b", "c=missing")
    assert named.features == ("k=1", "k=2")
    np.testing.assert_allclose(numeric.encode(["3", "nan", "5"]), [[0, 0], [0, 1], [2 / np.std([1, 3, 5]), 0]])
    np.testing.assert_array_equal(categorical.encode(["b", "", "new"]), [[0, 1, 0], [0, 0, 1], [0, 0, 0]])


def test_the_word_missing_is_a_category_among_words_and_no_value_among_numbers():
    (words,) = fit_encoders({"c": ["red", "missing", "", "red"]})
    assert words.features == ("c=missing", "c=red")
    (numbers,) = fit_encoders({"n": ["1", "missing", "3"]})
    assert numbers.features == ("n", "n missing")


def slow_encoding(train, other, categorical):
    """Names and values by loops and the definitions of mean and variance: (names, rows of `other`)."""
    names, parts = [], []
    for name, values in train.items():
        kinds = sorted({"missing" if is_missing(v) else v for v in values})
        if len(kinds) == 1:
            continue
        if name in categorical or any(map(is_text, values)):
            names += [f"{name}={kind}" for kind in kinds]
            parts += [[float(("missing" if is_missing(v) else v) == kind) for v in other[name]] for kind in kinds]
            continue
        known = [float(v) for v in values if not is_missing(v)]
        mean = sum(known) / len(known)
        std = (sum((x - mean) ** 2 for x in known) / len(known)) ** 0.5
        std = 1.0 if max(known) == min(known) else std
        names.append(name)
        parts.append([0.0 if is_missing(v) else (float(v) - mean) / std for v in other[name]])
        if len(known) < len(values):
            names.append(f"{name} missing")
            parts.append([float(is_missing(v)) for v in other[name]])
    return names, np.array(parts).T


GAPS = st.sampled_from(["", "?", "NA", "NaN", "null"])
NUMBERS = st.integers(-10_000, 10_000).map(lambda i: f"{i / 8}")
CATEGORIES = st.sampled_from(["red", "blue", "Grey", "7", "é", "a=b"])


@st.composite
def tables(draw):
    """Training rows, other rows of the same columns, and which columns are named as categorical."""
    train, other, named = {}, {}, []
    n, m = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    for j in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["x", "a__b", "x missing", "c=d"])) + str(j)
        cell = draw(st.sampled_from([NUMBERS, NUMBERS | GAPS, CATEGORIES, CATEGORIES | GAPS, GAPS]))
        train[name] = draw(st.lists(cell, min_size=n, max_size=n))
        chosen = draw(st.booleans())
        named += [name] if chosen else []
        new = CATEGORIES | GAPS | NUMBERS if chosen or any(map(is_text, train[name])) else NUMBERS | GAPS
        other[name] = draw(st.lists(new, min_size=m, max_size=m))
    return train, other, named


@settings(max_examples=300, deadline=None)
@given(tables())
def test_encoders_equal_their_slow_twin(table):
    train, other, named = table
    for rows in (train, other):
        names, expected = slow_encoding(train, rows, named)
        if not names:
            with pytest.raises(ValueError, match="expected columns that vary"):
                fit_encoders(train, categorical=named)
            return
        encoders = fit_encoders(train, categorical=named)
        assert [feature for encoder in encoders for feature in encoder.features] == names
        np.testing.assert_allclose(encode(encoders, rows), expected, rtol=1e-6, atol=1e-6)


def test_one_number_beside_gaps_is_a_zero():
    """Its mean is off by a rounding error; the deviation of that size must not be blown up to 1."""
    (encoder,) = fit_encoders({"x": ["0.1", "", "0.1", "0.1"]})
    np.testing.assert_allclose(encoder.encode(["0.1", ""]), [[0, 0], [0, 1]], atol=1e-12)


def test_gaps_in_new_rows_alone_get_no_indicator():
    (encoder,) = fit_encoders({"x": ["1", "3"]})
    np.testing.assert_array_equal(encoder.encode(["", "3"]), [[0], [1]])


def test_the_test_rows_do_not_depend_on_the_seed(csv_file):
    found = []
    for seed in (0, 1):
        data = Table(csv_file, "price", drop=["id"], seed=seed)
        data.setup("test")
        found.append(tensors(data.test_set)[1])
    torch.testing.assert_close(*found)


def test_test_and_prediction_files(csv_file, tmp_path):
    (tmp_path / "test.csv").write_text("colour,size,price\nred,100,7\ngreen,,8\n")  # other order, a new colour, a gap
    (tmp_path / "new.csv").write_text("colour,size\nred,100\nblue,80\ngrey,70\n")
    data = Table(
        csv_file, "price", drop=["id"], test=str(tmp_path / "test.csv"), predict=str(tmp_path / "new.csv"), seed=2
    )
    data.setup("test")
    assert len(data.train_set) + len(data.val_set) == 40
    x, y = tensors(data.test_set)
    assert y.tolist() == [7, 8]
    colours = [i for i, name in enumerate(data.feature_names) if name.startswith("colour=")]
    assert x[1, colours].sum() == 0
    assert len(next(iter(data.predict_dataloader()))[0]) == 3


def test_rows_are_found_again_in_predictions(csv_file, tmp_path, quiet_trainer):
    (tmp_path / "new.csv").write_text("id,colour,size\na-7,red,100\nb-1,blue,80\n=c,grey,70\n")
    data = Table(csv_file, "price", id="id", predict=str(tmp_path / "new.csv"))
    trainer = quiet_trainer(tmp_path, PredictionFile())
    model = BRAINet(task="Regression", head="Linear")
    trainer.fit(model, datamodule=data)
    assert not [name for name in data.feature_names if name.startswith("id")]
    trainer.predict(model, datamodule=data)
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]][:4] == ["loader", "sample", "row", "id"]
    assert [row["row"] for row in rows] == ["2", "3", "4"]  # the names are row 1
    assert [row["id"] for row in rows] == ["a-7", "b-1", "'=c"]  # no formula for a spreadsheet
    data.predict_file = None  # the test rows, wherever they stand in the file
    trainer.predict(model, datamodule=data)
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(row["id"] == f"house-{int(row['row']) - 2}" for row in rows)
    (tmp_path / "new.csv").write_text("colour,size\nred,100\n")
    with pytest.raises(ValueError, match="got none of id in"):
        Table(csv_file, "price", id="id", predict=str(tmp_path / "new.csv")).setup("predict")
    with pytest.raises(ValueError, match="got number: correct target, id, drop"):
        Table(csv_file, "price", id="number").setup("fit")
    with pytest.raises(ValueError, match="expected id to be the name of a column other than the target, got 'price'"):
        Table(csv_file, "price", id="price")


def test_a_column_that_only_numbers_the_rows_is_told(tmp_path):
    lines = [f"{i},{i % 3},{i * i}" for i in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["Id,group,price", *lines]))
    with pytest.warns(UserWarning, match="got 'Id', different in every row: name it in id"):
        Table(str(tmp_path / "a.csv"), "price").setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Table(str(tmp_path / "a.csv"), "price", id="Id").setup("fit")
        Table(str(tmp_path / "a.csv"), "price", drop=["Id"]).setup("fit")


def test_classes_are_numbered(csv_file):
    data = Table(csv_file, "colour", task="classification", drop=["id"], missing="impute")
    with pytest.raises(ValueError, match="expected a target in every row, got 1 of"):
        data.setup("fit")
    path = csv_file.replace("houses", "clean")
    with open(csv_file) as file, open(path, "w") as clean:
        clean.write(file.read().replace(" NA", "red"))
    data = Table(path, "colour", task="classification", drop=["id"])
    data.setup("fit")
    assert data.classes == ["blue", "grey", "red"]
    assert data.num_classes == 3
    assert tensors(data.train_set)[1].dtype is torch.int64


def test_bad_tables_say_what_to_do(csv_file, tmp_path):
    def refuse(message, error=ValueError, **settings):
        with pytest.raises(error, match=message):
            Table(**{"file": csv_file, "target": "price", **settings}).setup("fit")

    refuse(
        "expected at most 50 categories, got .* in column 'id': name it in id", max_categories=50, file=many(tmp_path)
    )
    refuse("expected no missing values, got [12] of 32 in column 'size'", drop=["id"], missing="refuse", seed=1)
    refuse("expected columns of .*size, colour, id, country, price.*, got cost", target="cost")
    refuse("found none", FileNotFoundError, file="nowhere.csv")
    numbers = {"target": "colour", "task": "regression"}
    refuse("expected finite numbers in column 'colour', got", drop=["id"], file=clean(csv_file), **numbers)
    refuse("test_fraction", test_fraction=1.5)
    refuse("expected task to be one of 'auto', 'regression', 'classification', got 'ranking'", task="ranking")
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n3\n")
    refuse("expected 2 values in row 3 of .*, got 1: check the delimiter", file=str(bad))
    bad.write_text("a,b\n")
    refuse("expected a line of names and then rows", file=str(bad))
    bad.write_text("a,a\n1,2\n")
    refuse("columns of different names", file=str(bad))
    bad.write_text("a;price\n" + "inf;2\n1;2\n" * 20)
    refuse("expected finite numbers in column 'a', got 'inf'", file=str(bad), delimiter=";")
    bad.write_text("a,price\n" + "1,2\n" * 20)
    refuse("expected columns that vary", file=str(bad))
    other = tmp_path / "other.csv"
    other.write_text("size,price\n1,2\n")
    refuse("expected the columns of .* in every file, got none of colour", test=str(other), drop=["id"])
    assert list(read_csv(csv_file)) == ["size", "colour", "id", "country", "price"]


def many(folder):
    path = folder / "many.csv"
    path.write_text("id,price\n" + "".join(f"name-{i},{i}\n" for i in range(80)))
    return str(path)


def clean(path):
    new = path.replace("houses", "full")
    with open(path) as file, open(new, "w") as out:
        out.write(file.read().replace(" NA", "red"))
    return new


@pytest.fixture
def uci(tmp_path):
    folder = tmp_path / "yacht"
    folder.mkdir()
    rng = np.random.default_rng(0)
    data = rng.normal(size=(50, 4)) * [1, 10, 0, 5] + [0, 5, 2, 100]
    np.savetxt(folder / "data.txt", data)
    np.savetxt(folder / "index_features.txt", [0, 1, 2])
    np.savetxt(folder / "index_target.txt", [3])
    for split in (0, 1):
        order = rng.permutation(50)
        np.savetxt(folder / f"index_train_{split}.txt", order[:45])
        np.savetxt(folder / f"index_test_{split}.txt", order[45:])
    return tmp_path, data


def test_uci_sets_keep_their_published_splits(uci):
    root, raw = uci
    data = UCI("yacht", root=str(root), split=1, val_fraction=0.2)
    data.setup("fit")
    x, y = tensors(data.train_set)
    assert x.shape == (36, 3)
    assert len(data.val_set) == 9
    torch.testing.assert_close(x.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4, rtol=0)
    rows = np.loadtxt(root / "yacht" / "index_test_1.txt").astype(int)
    np.testing.assert_allclose(tensors(data.test_set)[1], raw[rows, 3], rtol=1e-5)
    everything = torch.cat([y, tensors(data.val_set)[1], tensors(data.test_set)[1]])
    np.testing.assert_allclose(np.sort(everything), np.sort(raw[:, 3]), rtol=1e-5)


def test_wrong_uci_names_and_splits_are_named(uci):
    root, _ = uci
    for wrong, error, message in (
        ({"name": "iris"}, ValueError, "expected name to be one of 'boston', 'concrete'"),
        ({"name": "yacht", "split": 2}, ValueError, "expected a split of yacht from 0 to 1, got 2"),
        ({"name": "wine"}, FileNotFoundError, "root must hold the folders of the UCI sets"),
    ):
        with pytest.raises(error, match=message):
            UCI(root=str(root), **wrong).setup("fit")


def test_a_column_of_nothing_but_gaps_is_left_out():
    encoders = fit_encoders({"empty": ["", "NA", "?"], "size": ["1", "2", "3"]})
    assert [encoder.name for encoder in encoders] == ["size"]


# -- how files are written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "encoding"),
    [("utf-8", "utf-8"), ("utf-8-sig", "utf-8"), ("utf-8-sig", "UTF8"), ("latin-1", "latin-1"), ("utf-16", "utf-16")],
)
def test_encodings(tmp_path, written, encoding):
    path = tmp_path / "a.csv"
    path.write_text("größe,y\n1,é\n", encoding=written)
    assert read_csv(path, encoding=encoding) == {"größe": ["1"], "y": ["é"]}


def test_another_encoding_is_named(tmp_path):
    path = tmp_path / "a.csv"
    for text, written, advice in (("größe,y\n1,2\n", "latin-1", "latin-1"), ("größe,y\n1,2\n", "utf-16", "utf-16")):
        path.write_text(text, encoding=written)
        with pytest.raises(ValueError, match=f"encoded as utf-8, got the byte 0x.. at .*: set encoding='{advice}'"):
            read_csv(path)
    path.write_bytes("größe,price\n".encode("latin-1") + b"".join(b"%d,%d\n" % (i, i) for i in range(20)))
    with pytest.raises(ValueError, match="set encoding='latin-1'"):
        Table(str(path), "price").setup("fit")
    data = Table(str(path), "price", encoding="latin-1")
    data.setup("fit")
    assert data.feature_names == ["größe"]
    assert path.read_bytes()[:3] != codecs.BOM_UTF8


@pytest.mark.parametrize(("used", "name"), [(";", "semicolon"), ("\t", "tab"), ("|", "bar"), (",", "comma")])
def test_another_delimiter_is_named(tmp_path, used, name):
    path = tmp_path / "a.csv"
    path.write_text(f"a{used}b{used}c\n1.5{used}2{used}3\n")
    given = ";" if used == "," else ","
    with pytest.raises(ValueError, match=r"expected columns separated by .*: set delimiter=.* \(" + name) as error:
        read_csv(path, delimiter=given)
    assert f"delimiter={used!r}" in str(error.value)
    assert list(read_csv(path, delimiter=used)) == ["a", "b", "c"]


def test_decimal_commas_do_not_hide_the_delimiter(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a;b\n1,5;2\n")
    with pytest.raises(ValueError, match="set delimiter=';'"):
        read_csv(path)


def test_a_single_column_may_have_a_strange_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("size|m2\n1\n2\n")
    assert read_csv(path) == {"size|m2": ["1", "2"]}


def test_quotes_without_an_end_are_told(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,"' + "x" * 200_000)
    with pytest.raises(ValueError, match="got what is no CSV"):
        read_csv(path)


def written(folder, name, values):
    path = folder / "written.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[name, "n", "price"], *([v, i, i] for i, v in enumerate(values))])
    return str(path)


def test_dates_and_written_numbers_are_read_and_unclear_ones_refused(tmp_path):
    dates = written(tmp_path, "sold", [f"2024-01-{1 + i % 28:02}" for i in range(60)])
    data = Table(dates, "price")
    data.setup("fit")
    assert data.feature_names == ["sold", "n"]
    named = Table(dates, "price", categorical=["sold"])
    named.setup("fit")
    assert "sold=2024-01-02" in named.feature_names
    unclear = written(tmp_path, "sold", [f"{1 + i % 12}/{1 + i % 28}/2024" for i in range(60)])
    with pytest.raises(ValueError, match="column 'sold', got dates such as '1/1/2024': write dates as 2024-12-31"):
        Table(unclear, "price").setup("fit")
    amounts = written(tmp_path, "rent", [f"${900 + i:,}" for i in range(200)])  # some without a separator
    data = Table(amounts, "rent")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as text it can be nothing else than thousands: 900 has no decimals
        data.setup("fit")
    every = torch.cat([tensors(part)[1] for part in (data.train_set, data.val_set, data.test_set)])
    assert sorted(every.tolist()) == [900.0 + i for i in range(200)]


def test_text_in_a_column_of_numbers_is_told_and_refuses_no_file(tmp_path):
    train, new = written(tmp_path, "cylinders", [4 + 2 * (i % 2) for i in range(60)]), tmp_path / "new.csv"
    new.write_text("cylinders,n\n4,1\nrotary,2\n")
    data = Table(train, "price", predict=str(new))
    with pytest.warns(UserWarning, match=r"got text in column 'cylinders' of .*new.csv: 'rotary' \(1 row\)"):
        data.setup("predict")
    assert torch.stack([x for x, _ in data.predict_set]).isfinite().all()


def test_codes_stay_text(tmp_path):
    data = Table(written(tmp_path, "zip", ["01234", "10115", "99999"] * 20), "price")
    with pytest.warns(UserWarning, match="column 'zip': read as categories, because digits with leading zeros"):
        data.setup("fit")
    assert data.feature_names[:3] == ["zip=01234", "zip=10115", "zip=99999"]


# -- values that no training row is near to ---------------------------------------------------------------------------


def test_a_value_far_from_all_training_rows_is_told_once(tmp_path):
    train = written(tmp_path, "size", range(40))
    test, new = tmp_path / "test.csv", tmp_path / "new.csv"
    test.write_text("size,n,price\n1,1,2\n1e30,2,2\n")
    data = Table(train, "price", test=str(test))
    message = r"within 1,000,000 training standard deviations .*, got 1e30 in column 'size', row 3 of .*test.csv: fix"
    with pytest.warns(UserWarning, match=message) as caught:
        data.setup("test")
    assert len([w for w in caught if "standard deviations" in str(w.message)]) == 1
    new.write_text("n,size\n" + "-1e9,1e9\n" * 4)
    data = Table(train, "price", test=str(test), predict=str(new))
    with pytest.warns(UserWarning, match=r"1e30 .*; 1e9 in column 'size', row 2 of .*; -1e9 .*'n'.* and 6 more: fix"):
        data.setup("predict")


def test_the_row_is_that_of_the_file(tmp_path):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    values = [str(i) for i in range(40)]
    values[order[0]] = "-4e12"  # the first row that is held out
    with pytest.warns(UserWarning, match=f"got -4e12 in column 'size', row {order[0] + 2} of"):
        Table(written(tmp_path, "size", values), "price").setup("fit")


def test_ordinary_tables_give_no_warning(csv_file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Table(csv_file, "price", drop=["id"]).setup("fit")


def test_categories_that_no_training_row_had_are_told_once_at_test_and_predict_time(csv_file, tmp_path):
    new = tmp_path / "new.csv"
    new.write_text("size,colour,id,country\n" + "".join(f"80,{c},x,nl\n" for c in ["pink", "red", "pink", "p" * 99]))
    data = Table(csv_file, "price", drop=["id"], predict=str(new))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("fit")
    with pytest.warns(UserWarning, match=r"of .*houses.csv: 'missing' \(1 row\)"):  # the house without a colour
        data.setup("test")
    with pytest.warns(UserWarning, match="expected categories of the training rows") as record:
        data.setup("predict")
    (said,) = [str(one.message) for one in record]
    assert f"in column 'colour' of {new}: 'pink', '{'p' * 39}…' (3 rows); such a value counts as none" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("predict")
    test = Table(csv_file, "price", drop=["id"], test=str(new))
    new.write_text("size,colour,id,country,price\n80,pink,x,nl,3\n")
    with pytest.warns(UserWarning, match=r"'pink' \(1 row\)"):
        test.setup("test")
