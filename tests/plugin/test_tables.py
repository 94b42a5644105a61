"""CSV files and the layout of the UCI sets, on files made here."""

import numpy as np
import pytest
import torch

from brainet_pl.datamodules import UCI, Table
from brainet_pl.datamodules.table import Categorical, Numeric, fit_encoders, read_csv


def tensors(samples):
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.tensor(y)


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
    numeric, category, named = fit_encoders(columns, categorical=["k"])
    assert numeric == Numeric("n", 3.0, np.std([1, 3, 5]), True)
    assert category == Categorical("c", ("a", "b", "missing"))
    assert named.categories == ("1", "2")
    np.testing.assert_allclose(numeric.encode(["3", "nan", "5"]), [[0, 0], [0, 1], [2 / np.std([1, 3, 5]), 0]])
    np.testing.assert_array_equal(category.encode(["b", "", "new"]), [[0, 1, 0], [0, 0, 1], [0, 0, 0]])


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

    refuse("expected at most 50 categories, got .* in column 'id': drop it", max_categories=50, file=many(tmp_path))
    refuse("expected no missing values, got [12] of 32 in column 'size'", drop=["id"], missing="refuse", seed=1)
    refuse("expected columns of .*size, colour, id, country, price.*, got cost", target="cost")
    refuse("found none", FileNotFoundError, file="nowhere.csv")
    refuse("expected finite numbers in column 'colour', got", target="colour", drop=["id"], file=clean(csv_file))
    refuse("test_fraction", test_fraction=1.5)
    refuse("expected task to be one of regression, classification, got 'ranking'", task="ranking")
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
    for settings, error, message in (
        ({"name": "iris"}, ValueError, "expected one of boston, concrete"),
        ({"name": "yacht", "split": 2}, ValueError, "expected a split of yacht from 0 to 1, got 2"),
        ({"name": "wine"}, FileNotFoundError, "root must hold the folders of the UCI sets"),
    ):
        with pytest.raises(error, match=message):
            UCI(root=str(root), **settings).setup("fit")


def test_a_column_of_nothing_but_gaps_is_left_out():
    encoders = fit_encoders({"empty": ["", "NA", "?"], "size": ["1", "2", "3"]})
    assert [encoder.name for encoder in encoders] == ["size"]
