"""Processes with a share of the data each learn what one process learns of all of it, and do not repeat its work."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import brainet_pl
from brainet_pl.graphs import rai
from brainet_pl.scores import ScoreContext, Stages
from brainet_pl.scores.fitting import fit_score
from brainet_pl.structure import GGT, FeatureStream, Leaf, learn_structure
from brainet_pl.tasks.passes import Passes

SCRIPT = Path(__file__).with_name("shares.py")


def run(folder, *parts):
    env = os.environ | {"PYTHONPATH": str(Path(brainet_pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), *parts]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def found(folder):
    """What each process found, in the order of ranks."""
    files = sorted(folder.glob("[0-9].json"))
    return [json.loads(path.read_text()) for path in files]


def shape(node):
    """A tree without its scores."""
    if isinstance(node, Leaf):
        return node.variables, node.parents
    return node.variables, [([shape(a) for a in b.ancestors], shape(b.descendant)) for b in node.branches]


def same_tree(text, expected):
    ggt = GGT.from_json(text)
    assert shape(ggt.root) == shape(expected.root)
    scores = [[node.score for node in tree.nodes if isinstance(node, Leaf)] for tree in (ggt, expected)]
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=0.05)
    assert ggt.settings == expected.settings


@pytest.fixture(scope="module")
def table():
    return runpy.run_path(str(SCRIPT))["table"]()[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What 2 and 3 processes found."""
    folder = tmp_path_factory.mktemp("shares")
    run(folder, "trees", "stages", "broken", "sharded")
    return folder


class TestTrees:
    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("test", ["gaussian", "cmi"])
    @pytest.mark.parametrize("source", ["held", "streamed", "empty", "empty held"])
    def test_are_those_of_one_process(self, folder, table, count, test, source):
        expected = learn_structure(table, test=test, max_order=2, progress=False)
        every = found(folder / f"trees{count}")
        assert len(every) == count
        for one in every:
            same_tree(one[f"{source}, {test}"], expected)
            assert one == every[0]

    @pytest.mark.parametrize("count", [2, 3])
    def test_with_cells_and_with_fewer_rows(self, folder, table, count):
        first = found(folder / f"trees{count}")[0]
        for test in ("gaussian", "cmi"):
            stream = FeatureStream(lambda: [table], resolution=100)
            expected = learn_structure(stream, test=test, max_order=2, progress=False)
            same_tree(first[f"cells, {test}"], expected)
        same_tree(first["few rows"], learn_structure(table, test="gaussian", max_rows=500, progress=False))

    def test_one_graph(self, folder, table):
        expected = rai(table, test="fisher_z", threshold=0.01).directed.tolist()
        assert all(one["rai"] == expected for count in (2, 3) for one in found(folder / f"trees{count}"))


def test_densities_of_stages_are_those_of_one_process(folder):
    x, y = (torch.from_numpy(part) for part in runpy.run_path(str(SCRIPT))["table"]())
    score = Stages(progress=False)
    score.set_context(ScoreContext(3, widths=(3, 5)))
    fit_score(score, x, y)
    expected = score(Passes(torch.zeros(1, 50, 3), None, x[:50], torch.full((50, 3), 1 / 3)))["stages"]
    for one in found(folder / "stages"):
        for values in one.values():
            torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-4, atol=1e-4)


def test_an_error_in_one_share_ends_all_with_its_cause(folder):
    first, second = found(folder / "broken")
    assert second.startswith("ValueError: expected finite features, got 1 NaN")
    assert first.startswith("RuntimeError: process 1 failed while all worked together: ValueError: expected finite")


class TestShardedBackbone:
    def test_structure_and_features(self, folder, table):
        """The same backbone in one process, whole, and all its features at once."""
        torch.manual_seed(0)
        whole = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 12), torch.nn.ReLU())
        with torch.no_grad():
            features = torch.cat([whole(part) for part in torch.from_numpy(table).split(100)])
        expected = learn_structure(features, test="gaussian", progress=False)
        every = found(folder / "sharded")
        assert [one["rows"] for one in every] == [500, 400]  # not as many batches in both
        for one in every:
            same_tree(one["ggt"], expected)
            assert one["share"] == sum(p.numel() for p in whole.parameters()) // 2

    def test_the_head_trains_and_resumes(self, folder):
        every = found(folder / "sharded")
        for one in every:
            assert one["losses"][1] < one["losses"][0]
            assert one["features"]
            assert one["resumed"]
        assert every[0]["weights"] == every[1]["weights"]


@pytest.mark.slow
def test_learning_may_take_longer_than_the_group_waits(tmp_path, table):
    run(tmp_path, "slow")
    expected = learn_structure(table, test="gaussian", max_order=0, progress=False)
    for text in found(tmp_path / "slow"):
        assert shape(GGT.from_json(text).root) == shape(expected.root)


@pytest.mark.slow
class TestLightning:
    @pytest.fixture(scope="class")
    @classmethod
    def fits(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("fits")
        run(folder, "lightning")
        return folder

    @pytest.mark.parametrize("count", [2, 3])
    def test_trees_and_scores_are_those_of_one_process(self, fits, count):
        (one,) = found(fits / "fit1")
        several = found(fits / f"fit{count}")
        assert len(several) == count
        for two in several:
            for tree in ("ggt", "density"):
                same_tree(two[tree], GGT.from_json(one[tree]))
            assert two["scores"].keys() == one["scores"].keys()
            for name, values in one["scores"].items():
                np.testing.assert_allclose(two["scores"][name], values, rtol=1e-3, atol=1e-4, err_msg=name)
            assert two["head"] == several[0]["head"]

    def test_every_process_runs_the_backbone_on_its_share_alone(self, fits):
        """450 samples; the first process sees two more to find the width, and all the first training batch later."""
        (one,) = found(fits / "fit1")
        for count in (2, 3):
            rows = [two["rows"] for two in found(fits / f"fit{count}")]
            assert sum(rows) <= one["rows"] + 2 * count
            assert max(rows) <= one["rows"] / count + 64

    def test_a_cache_of_features_takes_them_from_the_shares(self, fits):
        (expected,) = found(fits / "fit1")
        for one in found(fits / "cached"):
            same_tree(one["ggt"], GGT.from_json(expected["ggt"]))
