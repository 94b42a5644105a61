"""Tables and quoted numbers of README and docs are those of docs/results; a change of one number is noticed."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def pages(load):
    return load("pages")


@pytest.fixture(scope="module")
def common(load, pages):
    return load("common/pages")


def test_tables_of_all_pages_are_those_of_the_results(pages, common):
    for page in common.pages():
        assert common.filled(page, pages.TABLES) == page.read_text(encoding="utf-8"), f"{page}: call make results-pages"


def test_every_table_stands_in_one_page(pages, common):
    marks = [name for page in common.pages() for name in common.MARK.findall(page.read_text(encoding="utf-8"))]
    assert sorted(marks) == sorted(pages.TABLES)
    assert len(marks) > 30


def test_no_other_table_has_measurements_unless_it_says_so(pages, common):
    for page in common.pages():
        name = str(page.relative_to(ROOT))
        checked = [common.sentence_of(one) for one in pages.QUOTED if one.page == name]
        assert common.loose_tables(page.read_text(encoding="utf-8"), checked) == [], page


def test_numbers_in_sentences_are_those_of_the_results(pages, common):
    assert [said for said in map(common.stale, pages.QUOTED) if said] == []


def numbers(content):
    """Every number of nested cells, as (container, key)."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, float) or key == "shd":  # a distance of graphs; other whole numbers are counts and sizes
            yield content, key
        elif isinstance(value, dict | list):
            yield from numbers(value)


def test_a_changed_number_is_noticed(pages, common, tmp_path):
    """One number of a copy is changed: the page that shows it is no longer what the results say."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png"))
    path = tmp_path / "defaults.json"
    content = json.loads(path.read_text())
    content["cells"]["MNIST 5,000/BRAINet/0"]["test"]["nll"] += 0.01
    path.write_text(json.dumps(content))
    page = ROOT / "docs" / "benchmarks" / "defaults.md"
    text = page.read_text(encoding="utf-8")
    assert common.filled(page, pages.TABLES, tmp_path) != text
    assert common.filled(page, pages.TABLES, RESULTS) == text

    path = tmp_path / "honest.json"
    content = json.loads(path.read_text())
    content["cells"]["cifar"]["stages, learned, 0.01"]["shifted ece ratio"] += 0.001
    path.write_text(json.dumps(content))
    (said,) = [one for one in (common.stale(quoted, tmp_path) for quoted in pages.QUOTED) if one]
    assert said.startswith('docs/benchmarks/honest.md: expected "falls to 0.737 of temperature')


def change_all(folder, files):
    """Copies of the results in a folder, in which every number of some files is another."""
    shutil.copytree(RESULTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png"))
    for file in sorted(files):
        path, draw = folder / file, random.Random(file)  # whatever the other files hold
        lines = [json.loads(line) for line in path.read_text().splitlines()] if file.endswith("l") else None
        content = lines if lines is not None else json.loads(path.read_text())
        for where, key in list(numbers(content)):
            if key != "dial":  # a setting of benchmarks/tempered.py, by which its cells are found
                where[key] = where[key] * draw.uniform(1.3, 3) + 0.011
        path.write_text("\n".join(map(json.dumps, lines)) if lines is not None else json.dumps(content))


def test_every_number_in_a_sentence_is_noticed_when_it_changes(pages, common, tmp_path):
    assert len(pages.QUOTED) > 50
    change_all(tmp_path, {quoted.file for quoted in pages.QUOTED})
    missed = [quoted for quoted in pages.QUOTED if not common.stale(quoted, tmp_path)]
    assert missed == []


def test_one_number_of_a_swap_changes_the_sentences_that_repeat_it(pages, common, tmp_path):
    """And no others: the ensemble on the last layer stands in one difference alone."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png"))
    path = tmp_path / "swap.json"
    content = json.loads(path.read_text())
    content["cells"]["clothing/last/Ensemble/0"]["nll"] += 0.02
    path.write_text(json.dumps(content))
    said = [common.stale(quoted, tmp_path) for quoted in pages.QUOTED]
    assert [one.split(" by ")[0] for one in said if one] == ["docs/howto/swap.md: expected \"than the ensemble's"]


def test_every_file_of_results_is_behind_a_table_that_reads_it(pages, common, tmp_path):
    """All numbers of a file are changed: each table that names it is another."""
    change_all(tmp_path, {table.file for table in pages.TABLES.values()})
    for name, table in pages.TABLES.items():
        if file_of_counts(table.file):
            continue
        before, after = (common.rendered(table, ROOT / "README.md", folder) for folder in (RESULTS, tmp_path))
        assert before != after, name


def file_of_counts(file):
    """`reliability.json` has whole numbers in its first table."""
    return file == "reliability.json"


def test_a_page_says_what_its_results_were_measured_with(common):
    today = {"version": "1.0", "algorithm": "7", "layout": "2"}
    assert common.measured_with(["1.0 / 7 / 2 / abc"], today) == "measured with 1.0 (abc)"
    assert "**before today's structures**" in common.measured_with(["1.0 / 6 / 2 / abc"], today)
    assert "**partly before" in common.measured_with(["1.0 / 7 / 2 / abc", "1.0 / 7 / 1 / def"], today)
    assert "not noted" in common.measured_with([], today)


def test_new_cells_are_stamped(load, tmp_path):
    store = load("common/store")
    store.Store(tmp_path / "cells.json", {}).cell("a/0", lambda: {"nll": 0.5})
    (stamp,) = json.loads((tmp_path / "cells.json").read_text())["measured"].values()
    version, algorithm, layout, _ = stamp.split(" / ")
    from brainet_pl import __version__
    from brainet_pl.network.plan import LAYOUT
    from brainet_pl.structure.cache import ALGORITHM

    assert (version, algorithm, layout) == (__version__, str(ALGORITHM), str(LAYOUT))


def test_marks_without_a_table_are_an_error(pages, common, tmp_path):
    (tmp_path / "page.md").write_text("<!-- table: nothing -->\n\n<!-- end of table -->")
    with pytest.raises(ValueError, match="add it there"):
        common.filled(tmp_path / "page.md", pages.TABLES)


def test_tables_without_results_are_found(common):
    text = "Words.\n\n| a | b |\n|---|---|\n" + "| 0.12 | 0.34 |\n" * 5
    assert common.loose_tables(text) == ["| a | b |"]
    assert common.loose_tables(text.replace("Words.", common.BY_HAND)) == []
    assert common.loose_tables(re.sub(r"0\.(\d+)", r"\1", text)) == []
