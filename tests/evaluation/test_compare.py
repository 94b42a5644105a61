"""Runs beside each other: who belongs together, what differs, and whether that is more than chance."""

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

import brainet_pl
from brainet_pl.cli import main
from brainet_pl.evaluation import compare
from brainet_pl.evaluation.compare.numbers import chance, difference, value_of
from brainet_pl.evaluation.compare.tables import verdict

AXIS = {"label": "share", "unit": "share", "low": 0.0, "high": 1.0, "log": False}


def a_chart(name, group, *lines):
    series = [
        {"name": line, "x": [0.0, 0.5, 1.0], "y": [0.0, 0.7, 1.0], "kind": "line", "note": "0.9", "low": None,
         "high": None, "shown": True, "group": ""}
        for line in lines
    ]  # fmt: skip
    key = "risk" if name == "test/risk_coverage" else "p"
    panel = {"key": key, "title": f"Of {name}", "x": AXIS, "y": AXIS, "series": series}
    return {"name": name, "group": group, "caption": "", "alt": "", "panels": [panel], "choose": False}


def write_run(folder, head="Tree", seed=0, accuracy=0.9, auroc=0.8, rate=0.01, tested=True):
    """What `brainet fit` and `brainet test` leave, as far as it is compared."""
    folder.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "model": {"head": {"class_path": f"brainet_pl.network.{head}", "init_args": {"num_params": 100}}, "lr": rate},
        "trainer": {"max_epochs": 3, "logger": [{"class_path": "CSVLogger", "init_args": {"name": str(folder)}}]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = "".join(f"{step},{1 / (step + 1)},{accuracy - 0.1 * (2 - step)}\n" for step in range(3))
    (folder / "metrics.csv").write_text("step,val/cls/NLL,val/cls/Acc\n" + rows)
    record = {
        "format": 3, "created": "2026-01-01T00:00:00+00:00", "seed": seed, "settings": {}, "headline_score": "entropy",
        "model": {"head": head, "task": "Classification", "head_parameters": 100, "parameters": 100, "passes": 3,
                  "temperature": None},
        "sets": [{"name": "test", "samples": 10, "role": "known"}, {"name": "far", "samples": 10, "role": "far"}],
        "metrics": [{"key": "test/cls/Acc", "value": accuracy, "title": "Accuracy", "unit": "share",
                     "better": "higher"}],
        "separation": [{"set": "far", "score": score, "AUROC": value} for score, value in
                       (("entropy", auroc), ("energy", 0.1))],
        "separation_measures": [{"name": "AUROC", "better": "higher"}], "figures": [], "tables": [], "confusion": None,
        "charts": [a_chart("test/risk_coverage", "test", "entropy", "energy"),
                   a_chart("ood/far/curves", "ood", "energy", "entropy")],
    }  # fmt: skip
    if tested:
        (folder / "record.json").write_text(json.dumps(record))
    return folder


def found_in(*folders, against=None):
    return compare.compare([compare.read_member(folder) for folder in folders], against)


@pytest.fixture
def runs(tmp_path):
    """Two heads with three seeds each; the second is better seed by seed, by less than seeds differ."""
    rng = np.random.default_rng(0)
    for seed in range(3):
        base = 0.8 + 0.1 * rng.random()
        write_run(tmp_path / "runs" / f"version_{2 * seed}", "Tree", seed, base, 0.5 + 0.1 * seed)
        write_run(
            tmp_path / "runs" / f"version_{2 * seed + 1}", "MLP", seed, base + 0.02 + 0.001 * seed, 0.7 - 0.1 * seed
        )
    return tmp_path / "runs"


def test_seeds_of_a_configuration_are_one_group(runs):
    found = found_in(*compare.find_runs([str(runs)]))
    assert [(group.name, len(group.members)) for group in found.groups] == [("Tree", 3), ("MLP", 3)]
    assert [member.seed for member in found.groups[0].members] == [0, 1, 2]
    assert found.settings == {"model.head": ["Tree", "MLP"]}
    assert [metric.key for metric in found.metrics] == ["cls/Acc", "ood/far/AUROC"]  # of the headline score alone


def test_differences_are_taken_seed_by_seed(runs):
    found = found_in(*compare.find_runs([str(runs)]))
    tree, mlp = (np.array(list(row["cls/Acc"].values.values())) for row in found.values)
    gap = found.differences[1]["cls/Acc"]
    assert (gap.paired, gap.runs) == (True, 3)
    assert gap.value == pytest.approx((mlp - tree).mean())
    assert gap.value / gap.error == pytest.approx(stats.ttest_rel(mlp, tree).statistic)
    assert gap.clear
    assert stats.ttest_ind(mlp, tree).pvalue > 0.3  # which the means alone would not show
    assert not found.differences[1]["ood/far/AUROC"].clear
    assert found.values[0]["cls/Acc"].deviation == pytest.approx(tree.std(ddof=1))


def test_without_shared_seeds_runs_are_independent():
    rng = np.random.default_rng(0)
    a, b = rng.random(4), rng.random(3) + 0.2
    one = value_of(dict(enumerate(a.tolist())))
    other = value_of({f"folder {i}": v for i, v in enumerate(b.tolist())})
    gap = difference(one, other)
    assert not gap.paired
    assert gap.value / gap.error == pytest.approx(stats.ttest_ind(a, b, equal_var=False).statistic)
    single = difference(value_of({0: 1.0}), value_of({0: 0.5}))
    assert (single.value, single.error, single.clear) == (0.5, None, False)


@pytest.mark.parametrize("runs_", [2, 3, 5, 20])
def test_how_often_chance_exceeds_two_standard_errors(runs_):
    assert chance(runs_) == pytest.approx(2 * stats.t.sf(2, runs_ - 1), abs=1e-5)


def test_tables_hold_the_numbers(runs, tmp_path, capsys):
    main(["compare", str(runs / "version_*"), "--out", str(tmp_path / "out" / "all.html")])
    printed = capsys.readouterr().out
    found = found_in(*compare.find_runs([str(runs)]))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "all.csv").read_text())))
    assert [(row["configuration"], row["metric"]) for row in rows] == [
        ("Tree", "cls/Acc"), ("Tree", "ood/far/AUROC"), ("MLP", "cls/Acc"), ("MLP", "ood/far/AUROC")
    ]  # fmt: skip
    assert float(rows[2]["mean"]) == pytest.approx(found.values[1]["cls/Acc"].mean)
    assert float(rows[2]["standard_error"]) == pytest.approx(found.differences[1]["cls/Acc"].error)
    assert [row["clear"] for row in rows] == ["False", "False", "True", "False"]
    markdown = (tmp_path / "out" / "all.md").read_text()
    assert markdown in printed
    mlp = found.values[1]["cls/Acc"]
    shown = f"{100 * mlp.mean:.2f}\u00a0% ±\u00a0{100 * mlp.deviation:.2f}\u00a0%\u00a0✓"
    assert f"| MLP | 3 | {shown} |" in markdown
    latex = (tmp_path / "out" / "all.tex").read_text()
    assert r"\checkmark" in latex
    assert latex.count(r"\\") == 3
    assert "%" not in latex.replace(r"\%", "")
    page = (tmp_path / "out" / "all.html").read_text()
    assert f"<strong>{shown}</strong>" in page
    assert "Accuracy: MLP is best" in page
    assert re.search(r'<li class="plain">Accuracy: MLP is best, .*, clearly ahead of Tree', page)  # without praise
    assert "td strong" not in page  # bold, in no colour
    shadow = re.search(r"\.scroll \{ overflow-x: auto;(.*?)\}", page, re.DOTALL)[1]  # a cue that there is more beside
    assert shadow.count("no-repeat local") == shadow.count("no-repeat scroll") == 1
    assert "by chance in 18 % of the comparisons" in page
    assert page.count('<figure class="chart ') == 2 + 2  # risk and coverage, ROC; two of training
    assert "0.9 (entropy)" in page
    assert "Unknown sets are judged by entropy." in page
    assert "Too few" not in page


def test_runs_are_found_by_folders_checkpoints_and_patterns(runs):
    (runs / "version_0" / "checkpoints").mkdir()
    (runs / "version_0" / "checkpoints" / "last.ckpt").touch()
    checkpoint = str(runs / "version_0" / "checkpoints" / "last.ckpt")
    assert compare.find_runs([checkpoint, str(runs / "version_0")]) == [runs / "version_0"]
    assert [path.name for path in compare.find_runs([str(runs)])] == [f"version_{i}" for i in range(6)]
    assert len(compare.find_runs([str(runs / "version_[12]")])) == 2
    with pytest.raises(FileNotFoundError, match="expected runs that match"):
        compare.find_runs([str(runs / "nothing*")])
    with pytest.raises(FileNotFoundError, match="expected the folder of a run, a folder of runs or a checkpoint"):
        compare.find_runs([str(runs / "nowhere")])


def test_what_differs_names_configurations_of_one_head(tmp_path):
    folders = [write_run(tmp_path / str(i), rate=rate) for i, rate in enumerate((0.01, 0.1))]
    found = found_in(*folders)
    assert [group.name for group in found.groups] == ["Tree, lr 0.01", "Tree, lr 0.1"]
    assert found.settings == {"model.lr": ["0.01", "0.1"]}
    assert found_in(*folders, against="Tree, lr 0.1").groups[0].name == "Tree, lr 0.1"
    with pytest.raises(ValueError, match=r"expected --against to be one of Tree, lr 0\.01, Tree, lr 0\.1, got 'x'"):
        found_in(*folders, against="x")
    assert verdict(found.metrics[0], found.differences[1]["cls/Acc"]._replace(value=0.1)) == "?"


def test_a_setting_that_a_later_version_added_is_no_difference(tmp_path):
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    config["model"]["later"] = None
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert [len(group.members) for group in found_in(*folders).groups] == [2]
    config["model"]["later"] = 3
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert found_in(*folders).settings == {"model.later": ["–", "3"]}


def test_runs_that_were_only_fitted_are_compared_by_validation(tmp_path):
    folders = [write_run(tmp_path / str(i), accuracy=0.7 + 0.1 * i, rate=0.01 + i, tested=False) for i in range(2)]
    found = found_in(*folders)
    assert [metric.title for metric in found.metrics] == ["Accuracy, validation", "NLL, validation"]
    assert found.values[1]["val/cls/Acc"].mean == pytest.approx(0.8)  # at the epoch of the lowest NLL
    assert "Comparison of runs" in compare.render_page(compare.page_of(found))


def test_a_test_is_never_averaged_with_a_validation(tmp_path):
    """One seed was tested, the other only fitted: two columns, each with the runs that have it."""
    for seed in range(2):
        write_run(tmp_path / f"tree{seed}", "Tree", seed, 0.9, tested=seed == 0)
        write_run(tmp_path / f"mlp{seed}", "MLP", seed, 0.6)
    found = found_in(*(tmp_path / name for name in ("tree0", "tree1", "mlp0", "mlp1")))
    assert [metric.key for metric in found.metrics] == ["cls/Acc", "ood/far/AUROC", "val/cls/Acc", "val/cls/NLL"]
    assert found.values[0]["cls/Acc"].values == {0: 0.9}
    assert found.values[0]["val/cls/Acc"].values == pytest.approx({0: 0.9, 1: 0.9})
    assert found.values[1]["cls/Acc"].values == {0: 0.6, 1: 0.6}
    assert found.values[1]["val/cls/Acc"].values == pytest.approx({0: 0.6, 1: 0.6})
    page = compare.render_page(compare.page_of(found))
    assert f"Not tested: {tmp_path / 'tree1'}." in page
    assert "Accuracy, validation" in page
    assert "Not tested" not in compare.render_page(compare.page_of(found_in(tmp_path / "tree1")))  # validation alone


def test_curves_of_one_run_alone_are_no_section(tmp_path):
    for name, head, tested in (("tree", "Tree", True), ("fitted", "MLP", False), ("tested", "MLP", True)):
        write_run(tmp_path / name, head, tested=tested)
    for other in ("fitted", "tested"):
        page = compare.render_page(compare.page_of(found_in(tmp_path / "tree", tmp_path / other)))
        assert (">Curves<" in page) == (other == "tested")


def test_a_seed_counts_once_by_its_latest_run(tmp_path):
    for name, seed, accuracy in (("a", 0, 0.5), ("b", 0, 0.7), ("c", 1, 0.9), ("d", 1, 0.1)):
        write_run(tmp_path / name, seed=seed, accuracy=accuracy, tested=name != "d")
    record = json.loads((tmp_path / "a" / "record.json").read_text())
    (tmp_path / "a" / "record.json").write_text(json.dumps(record | {"created": "2026-01-02T00:00:00+00:00"}))
    found = found_in(*(tmp_path / name for name in "abcd"))
    (group,) = found.groups
    assert [member.folder.name for member in group.members] == ["a", "c"]  # later than b; d was not tested
    assert [member.folder.name for member in group.earlier] == ["b", "d"]
    assert found.values[0]["cls/Acc"].values == {0: 0.5, 1: 0.9}
    page = compare.render_page(compare.page_of(found))
    named = f"{tmp_path / 'b'} (seed 0), {tmp_path / 'd'} (seed 1)"
    assert f"Not counted, because a later run has the same configuration and seed: {named}." in page
    assert page.count("not counted</td>") == 2
    assert "2 runs of 1 configurations" in page


def test_two_seeds_are_too_few_for_an_interval(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"tree{seed}", "Tree", seed, 0.8 + 0.01 * seed)
        write_run(tmp_path / f"mlp{seed}", "MLP", seed, 0.9 + 0.011 * seed)
    two = found_in(*(tmp_path / f"{name}{seed}" for name in ("tree", "mlp") for seed in range(2)))
    assert two.values[0]["cls/Acc"].deviation is None
    assert two.differences[1]["cls/Acc"].error is None
    table = compare.as_markdown(two)
    assert "±" not in table
    assert "90.55\u00a0%\u00a0?" in table
    page = compare.render_page(compare.page_of(two))
    assert "Too few runs for an interval, fewer than 3 seeds (Tree: 2; MLP: 2)" in page
    assert '<li class="plain">Accuracy: MLP is best, 90.55\u00a0%, ahead of Tree; too few runs to tell' in page
    three = found_in(*(tmp_path / f"{name}{seed}" for name in ("tree", "mlp") for seed in range(3)))
    assert three.differences[1]["cls/Acc"].clear
    assert "±" in compare.as_markdown(three)


def test_names_say_what_differs_among_the_runs_of_one_head(tmp_path):
    folders = [write_run(tmp_path / f"tree{rate}", rate=rate) for rate in (0.01, 0.1)]
    folders.append(write_run(tmp_path / "mlp", "MLP", rate=0.5))
    assert [group.name for group in found_in(*folders).groups] == ["Tree, lr 0.01", "Tree, lr 0.1", "MLP"]
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    config["model"]["optimizer"] = {"lr": 3}
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    names = [group.name for group in found_in(*folders).groups]
    assert names[:2] == ["Tree, model.lr 0.01, model.optimizer.lr –", "Tree, model.lr 0.1, model.optimizer.lr 3"]
    config["model"] |= {f"s{i}": 1 for i in range(5)}
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert found_in(*folders).groups[1].name.endswith("s1 1, and 3 more")


def test_a_configuration_has_one_colour_in_every_chart(tmp_path):
    """The first was not tested: it is in the training curves alone, and the second keeps its colour there."""
    write_run(tmp_path / "a", "Tree", tested=False)
    write_run(tmp_path / "b", "MLP")
    write_run(tmp_path / "c", "Linear")
    page = compare.page_of(found_in(*(tmp_path / name for name in "abc")))
    styles = {
        section.key: [{key.name: key.style for key in chart.keys} for chart in block.charts]
        for section in page.sections
        if section.key in ("charts", "training")
        for block in section.blocks
    }
    assert styles["charts"] == [{"MLP": 1, "Linear": 2}] * 2
    assert styles["training"] == [{"Tree": 0, "MLP": 1, "Linear": 2}] * 2


def test_unknown_sets_are_judged_by_the_score_behind_the_verdict(tmp_path):
    for name, score in (("a", "energy"), ("b", "entropy")):
        folder = write_run(tmp_path / name, "Tree" if name == "a" else "MLP", auroc=0.8)
        record = json.loads((folder / "record.json").read_text())
        more = {"headline_score": score, "verdict_score": score, "ranking_score": "entropy"}
        (folder / "record.json").write_text(json.dumps(record | more))
    found = found_in(tmp_path / "a", tmp_path / "b")
    assert [row["ood/far/AUROC"].mean for row in found.values] == [0.1, 0.8]
    page = compare.render_page(compare.page_of(found))
    assert "judged by energy (Tree); entropy (MLP), the score behind the verdict." in page
    (block,) = next(section.blocks for section in compare.page_of(found).sections if section.key == "charts")
    shown = [key.note for chart in block.charts for key in chart.keys]
    area = "area 0.9, by entropy"  # by what ranks, where the table has that by the largest probability
    assert shown == [area, area, "0.9 (energy)", "0.9 (entropy)"]


def test_a_number_that_a_run_lacks_is_left_out(tmp_path):
    one = write_run(tmp_path / "a", "Tree")
    other = write_run(tmp_path / "b", "MLP", accuracy=math.inf)
    found = found_in(one, other)
    assert "cls/Acc" not in found.values[1]
    assert "–" in compare.as_markdown(found)


def test_a_comparison_starts_without_torch(runs):
    code = (
        "import sys; from brainet_pl.evaluation import compare; compare.main(sys.argv[1:]);"
        "assert not {'torch', 'pytorch_lightning', 'lightning', 'matplotlib'} & set(sys.modules), 'slow'"
    )
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(runs), "--out", str(runs / "c.html")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
