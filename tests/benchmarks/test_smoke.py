"""Every benchmark runs from end to end on small synthetic data, so that none can rot unnoticed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from sklearn.datasets import load_iris

from brainet_pl.backbones.cifar import CifarResNet
from brainet_pl.graphs import rai
from brainet_pl.metrics.curves import calibration_error, calibration_sums

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def cells_of(path):
    """The cells of a finished JSON file."""
    return json.loads(path.read_text())["cells"]


# -- the paper --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("table1", "BRAINet + dropout, shuffled/0"),
        ("table2", "BRAINet + confidence/0"),
        ("structures", "1000/0"),
        ("operations", "s=3 order=2 threshold=0.2"),
        ("latent", "AUROC far against near"),
        ("generative", "learned wiring"),
    ],
)
def test_experiments_of_the_paper(load, name, cell, tmp_path, capsys):
    load(f"paper/{name}").main(["--smoke", "--out", str(tmp_path)])
    assert cell in cells_of(tmp_path / f"{name}.json")
    printed = capsys.readouterr().out
    assert "|---|" in printed or name == "latent"
    assert "nan" not in printed
    assert (tmp_path / f"{name}.png").is_file() == (name in ("table1", "structures", "latent"))


@pytest.mark.parametrize("what", ["size", "passes", "ablation"])
def test_mnist(load, what, tmp_path):
    load("paper/mnist").main([what, "--smoke", "--out", str(tmp_path)])
    for cell in cells_of(tmp_path / f"mnist_{what}_5000.json").values():
        assert all(np.isfinite(value) for found in cell.values() for value in found.values())
    assert (tmp_path / f"mnist_{what}_5000.png").is_file()


def test_table3_without_its_peers(load, tmp_path, monkeypatch):
    table3 = load("paper/table3")
    monkeypatch.setattr(table3, "laplace", lambda data, layer: lambda x: layer(x).softmax(-1))
    predict = {name: lambda x: torch.full((len(x), 10), 0.1) for name in ("SWA", "SWAG")}
    monkeypatch.setattr(table3, "averaged", lambda data, layer, epochs, seed: predict)
    table3.main(["--smoke", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "table3.json")
    assert {"SGD", "SWAG/0", "BRAINet + dropout/0"} <= set(cells)
    assert cells["SWA/0"][""]["nll"] == pytest.approx(np.log(10), rel=1e-4)


def test_table3_with_its_peers(load, tmp_path):
    pytest.importorskip("torch_uncertainty")
    pytest.importorskip("laplace")
    load("paper/table3").main(["--smoke", "--out", str(tmp_path)])
    assert {"Laplace, last layer", "SWA/0", "SWAG/0"} <= set(cells_of(tmp_path / "table3.json"))


# -- the others -------------------------------------------------------------------------------------------------------


def test_serve(load, tmp_path):
    for name in ("fastapi", "onnxscript", "httpx"):
        pytest.importorskip(name)
    load("serve").main(["--smoke", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "serve.json")
    assert (cells["stop under load"]["lost"], cells["stop under load"]["exit"]) == (0, 0)
    assert cells["served, 8 clients"]["images/s"] > 0
    assert 0 < cells["drift alarm, 256 at a time"]["share of inference"] < 10


def test_estimate(load, tmp_path, capsys):
    load("drift")
    load("estimate").main(["--smoke", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "estimate.json").read_text())["cells"]
    line = cells["digits, fading"]["noise 0.2"]
    assert line["covers"] == (line["low"] <= line["truth"] <= line["high"])
    assert "the interval holds the truth on" in capsys.readouterr().out


def test_sentences(load, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    load("sentences").main(["--smoke", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "sentences.json").read_text())["cells"]
    assert cells["swap_head"]["nll"] < cells["logistic regression"]["nll"]
    assert "queries of no intent" in capsys.readouterr().out


def test_fading(load, tmp_path, capsys):
    load("fading").main(["--smoke", "--out", str(tmp_path)])
    (cell,) = json.loads((tmp_path / "fading.json").read_text())["cells"].values()
    assert cell["noise faded confidence"] < cell["noise plain confidence"]
    assert cell["plain err"] == cell["faded err"]  # the answer never changes
    assert "synthetic, seed 0" in capsys.readouterr().out


def test_coverage(load, tmp_path, capsys):
    load("coverage").main(["--smoke", "--rows", "60", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "coverage.json")
    assert set(cells) == {f"{kind}/60/0" for kind in load("coverage").KINDS}
    assert all(len(values) == 10 for cell in cells.values() for values in cell.values())
    assert "±" in capsys.readouterr().out


def test_reliability(load, tmp_path, capsys):
    (tmp_path / "reliability.json").write_text('{"other": 1}')
    load("fuzz").main(["--smoke"], tmp_path / "reliability.json")
    results = json.loads((tmp_path / "reliability.json").read_text())
    assert results["other"] == 1
    counts = results["fuzz"]["targets"].values()
    assert len(counts) == 10
    assert all(sum(c.values()) >= 5 and not c["findings"] for c in counts)
    assert "| `rai` | 5 |" in capsys.readouterr().out


def test_defaults(load, tmp_path, capsys):
    defaults = load("defaults")
    defaults.main(["--smoke", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    cells = cells_of(tmp_path / "defaults_validation.json")
    assert set(cells) == {f"{task}/{head}/0" for task in ("digits", "yacht") for head in defaults.HEADS}
    assert not any("test" in cell for cell in cells.values())  # not even computed before the settings are final
    assert "| digits | 1 |" in printed
    assert "first, or within a standard error of the first" in printed
    sizes = {cells[f"yacht/{head}/0"]["params"] for head in defaults.HEADS if head != "linear"}
    assert max(sizes) < 1.1 * min(sizes)
    defaults.main(["--smoke", "--out", str(tmp_path), "--final", "--only", "yacht"])
    assert all(np.isfinite(cell["test"]["nll"]) for cell in cells_of(tmp_path / "defaults.json").values())


def test_networks(load, tmp_path, monkeypatch):
    networks = load("networks")

    def flowers(seed):
        draw = torch.Generator().manual_seed(seed)
        x, y = map(torch.from_numpy, load_iris(return_X_y=True))
        parts = [(x[rows].float(), y[rows]) for rows in torch.randperm(150, generator=draw).split([90, 30, 30])]
        return networks.Sample(*parts, networks.Classification(3))

    monkeypatch.setattr(networks, "entries", lambda *_: {"iris": networks.Entry(flowers, 2, 2)})
    networks.main(["--smoke", "--out", str(tmp_path)])
    (cell,) = cells_of(tmp_path / "networks.json").values()
    assert cell["density, drawn"] > cell["density, shuffled"] + 0.1
    assert np.isfinite(cell["head, drawn"])


@pytest.mark.parametrize(("name", "cell"), [("unknown", "test"), ("tempered", "density-aware calibration, k = 50")])
def test_unknown_and_tempered(load, name, cell, tmp_path, capsys):
    load(name).main(["--smoke", "--out", str(tmp_path)])
    assert cell in cells_of(tmp_path / f"{name}.json")
    assert "|---|" in capsys.readouterr().out


def test_pixels(load, tmp_path, capsys):
    load("pixels").main(["--smoke", "--out", str(tmp_path)])
    assert set(cells_of(tmp_path / "pixels.json")) == {"all classes/0", "left out/0"}
    assert (tmp_path / "pixels.png").is_file()
    assert "nan" not in capsys.readouterr().out


def test_unknown_classes(load, tmp_path, capsys):
    load("unknown_classes").main(["--smoke", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "unknown_classes.json")
    assert set(cells) == {"digits without 3", "wine without 2", "digits without 1"}
    for cell in cells.values():
        assert all(0 <= found["noticed"] <= 1 for found in cell["sets"].values())
    assert "| digits without 3 |" in capsys.readouterr().out


def test_attacks(load, tmp_path, capsys):
    pytest.importorskip("torchattacks")
    attacks = load("attacks")
    attacks.main(["--smoke", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "attacks.json")
    assert {f"{bed}/{head}" for bed in ("CIFAR-10", "MNIST") for head in attacks.heads()} == set(cells)
    assert all(np.isfinite(v) for found in cells.values() for cell in found.values() for v in cell.values())
    assert "| knows the detector |" in capsys.readouterr().out


def test_the_attack_that_knows_the_detector_goes_by_its_gradient(load, monkeypatch):
    """Within its strength it makes answers wrong, and lowers the score of the verdict against one that only fools."""
    attacks = load("attacks")
    torch.manual_seed(0)
    bed = attacks.mnist_bed(None, 40, epochs=10)
    victim = bed.victim(attacks.network.MLP())
    eps = 0.2
    found = attacks.knowing(victim, bed.images, bed.labels, eps)
    assert float((found - bed.images).abs().max()) <= eps + 1e-5
    assert 0 <= float(found.min()) <= float(found.max()) <= 1
    clean, after = (attacks.described(victim, x) for x in (bed.images, found))
    right = [float((said["class"] == bed.labels).float().mean()) for said in (clean, after)]
    assert right[1] < right[0] - 0.3
    x = bed.images.clone().requires_grad_()
    slope = torch.autograd.grad(victim.both(x)[1]["generative"].sum(), x)[0]
    assert float(slope.abs().max()) > 0  # the density lets gradients through
    monkeypatch.setattr(attacks.Victim, "threshold", torch.inf)  # it sees nothing of the detector
    blind = attacks.described(victim, attacks.knowing(victim, bed.images, bed.labels, eps))
    assert float((after["joint"] - blind["joint"]).mean()) < 0


def test_paired_differences_of_calibration(load):
    """What two methods have in common cancels; of what they have not, the error stays."""
    tempered = load("tempered")
    rng = np.random.default_rng(0)
    common, own = rng.normal(0, 0.01, 500), rng.normal(0, 0.001, 500)
    ours = tempered.Point(1.0, 0.01, 0.0, 0.10, 0.01, 1.0, (0.10 + common).tolist())
    theirs = tempered.Point(1.0, 0.01, 0.0, 0.11, 0.01, 1.0, (0.11 + common + own).tolist())
    difference, error = tempered.paired(theirs, ours)
    assert difference == pytest.approx(0.01)
    assert error == pytest.approx(0.001, rel=0.1)


def test_honest(load, tmp_path, capsys):
    honest = load("honest")
    honest.main(["--smoke", "--out", str(tmp_path)])
    assert set(cells_of(tmp_path / "honest.json")) == {"choose"}  # no test image before --final
    assert "svhn" not in capsys.readouterr().out
    honest.main(["--smoke", "--final", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "honest.json")
    assert set(cells) == {"choose", "cifar", "scores", "digits", "mnist"}
    ours = cells["cifar"]["stages, learned, 0.04"]
    assert ours["shifted ece ratio"] < 0.7  # noise that grows is seen
    assert ours["behind"] == ours["behind se"] == 0
    assert all(np.isfinite(value) for cell in cells["cifar"].values() for value in cell.values())
    assert (tmp_path / "frontier.png").is_file()


def test_calibration_errors_of_samples_of_images(load):
    """Against the product's own measure, of the images as they are and of the first sample of them."""
    honest = load("honest")
    draw = torch.Generator().manual_seed(0)
    probs, y = torch.randn(2, 300, 4, generator=draw).mul(2).softmax(-1), torch.randint(4, (300,), generator=draw)
    found = honest.shift(list(probs), y)
    rows = np.random.default_rng(0).integers(300, size=300)
    for column, chosen in ((0, torch.arange(300)), (1, torch.from_numpy(rows))):
        for i, p in enumerate(probs):
            confidence, answer = p[chosen].double().max(dim=1)
            sums = calibration_sums(confidence, answer == y[chosen])
            assert float(found.ece[i, column]) == pytest.approx(float(calibration_error(sums)), abs=1e-9)
            nll = torch.nn.functional.nll_loss(p[chosen].double().log(), y[chosen])
            assert float(found.nll[i, column]) == pytest.approx(float(nll), rel=1e-6)


def test_differences_are_paired(load):
    defaults = load("defaults")
    found = defaults.paired([1.0, 2.0, 6.0], [0.0, 1.0, 5.0])
    assert found == (1.0, 0.0)
    assert defaults.outcome(found) == "loss"
    assert defaults.outcome(defaults.paired([1.0, 3.0], [2.0, 2.0])) == "tie"
    assert defaults.outcome(defaults.paired([1.0, 1.5], [2.0, 2.0])) == "win"
    assert defaults.outcome(defaults.paired([1.0], [2.0])) == "win"


def test_head(load, tmp_path):
    load("head").main(["--smoke", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "head.json").read_text())
    assert len(found["rows"]) == 4
    assert all(row["step / MLP"] > 0 for row in found["rows"])
    assert [row["features"] for row in found["networks"]] == [512, 960]
    assert all(row["predict / network, 1"] > 0.8 for row in found["networks"])


def test_sharing(load, tmp_path):
    load("sharing").main(["--smoke", "--out", str(tmp_path), "--heads", "TabM", "BRAINet", "shared"])
    cells = json.loads((tmp_path / "sharing.json").read_text())["cells"]
    assert list(cells) == ["digits/BRAINet/0", "digits/TabM/0", "digits/shared/0"]  # sorted
    for cell in cells.values():
        assert cell["without quarter 3/nll"] > 0
        assert 0 <= cell["8 and 9/mutual_information"] <= 100


def test_battery(load, tmp_path, capsys):
    battery = load("battery")
    (tmp_path / "tasks").mkdir()
    lines = [f"{i % 7},{'?' if i % 9 == 0 else i % 5},{'abc'[i % 3]},{'xy'[i % 2]}" for i in range(120)]
    (tmp_path / "tasks" / "toy.csv").write_text("\n".join(lines))
    toy = battery.read(tmp_path / "tasks" / "toy.csv")
    assert toy.classes
    assert toy.x.shape == (120, 3)
    assert not toy.x.isna().any().any()
    battery.main(["--smoke", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "battery.json").read_text())["cells"]
    assert {"quality/iris/BRAINet/0", "unknown/iris/0", "shift/iris", "quality/diabetes/ridge/1"} <= set(cells)
    assert "within 5 % of the best peer" in capsys.readouterr().out


def test_swap(load, tmp_path, capsys):
    load("swap").main(["--smoke", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "swap.json").read_text())["cells"]
    heads = {"network", "logistic regression", "Linear", "BRAINet", "shuffled"}
    assert heads <= {key.split("/")[2] for key in cells if key.startswith("synthetic/last/")}
    assert all(np.isfinite(cell["nll"]) for key, cell in cells.items() if "choice" not in key)
    assert "synthetic, auto layers" in capsys.readouterr().out


def test_swap_with_kinds_left_out(load, tmp_path):
    load("swap").main(["--smoke", "--unknown", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "swap.json")
    assert set(cells) == {"synthetic/last/logistic regression/0", "synthetic/auto/one call/0"}
    assert cells["synthetic/auto/one call/0"]["noise/called unknown"] > 90
    assert cells["synthetic/auto/one call/0"]["noise/stages"] > 90
    assert 0 <= cells["synthetic/last/logistic regression/0"]["noise/one_minus_max_p"] <= 100


@pytest.mark.parametrize("command", ["paper/structures.py --smoke", "coverage.py --smoke --rows 60"])
def test_commands_of_both_folders(command, tmp_path):
    script, *rest = command.split()
    words = [sys.executable, str(ROOT / "benchmarks" / script), *rest, "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "|---|" in done.stdout


# -- structure --------------------------------------------------------------------------------------------------------


@pytest.fixture
def structure(load, tmp_path, monkeypatch):
    """The benchmark of the learner with small tables, its results in a temporary folder."""
    module, relu_features = load("structure"), load("common/data").relu_features
    monkeypatch.setattr(module, "OUT", tmp_path)
    monkeypatch.setattr(module, "relu_features", lambda n, d: relu_features(min(n, 500), min(d, 32)))
    monkeypatch.setattr(module, "NETWORKS", ["asia"])
    monkeypatch.setattr(module, "SIZES", [500])
    monkeypatch.setattr(module, "GAUSSIANS", [(20, 2)])
    return module


@pytest.fixture
def chain(load, structure, monkeypatch):
    """A network of six binary variables in a row, in place of those in BIF files."""
    bif = load("bif")
    dag = np.eye(6, k=1, dtype=bool)
    tables = [([], np.array([0.5, 0.5])), *(([v], np.array([[0.9, 0.1], [0.2, 0.8]])) for v in range(5))]
    network = bif.Network([str(v) for v in range(6)], dag, tables)
    monkeypatch.setattr(structure, "read_bif", lambda path: network)


def test_scale(structure, tmp_path):
    rng = np.random.default_rng(0)
    torch.save(CifarResNet(20).state_dict(), tmp_path / "resnet20_cifar10.pth")
    np.savez(tmp_path / "cifar10_train.npz", x=rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.zeros((300, 28, 28), dtype=np.uint8)
    images[:, 10:16, 10:16] = rng.integers(0, 256, (300, 6, 6))
    (raw / "train-images-idx3-ubyte").write_bytes(bytes(16) + images.tobytes())
    structure.scale(tmp_path)
    assert len(json.loads((tmp_path / "structure.json").read_text())["scale"]) == 11


def test_accuracy_and_speed_without_peers(structure, chain, tmp_path, monkeypatch):
    monkeypatch.setattr(structure, "causal_learn_pc", lambda x: rai(x, test="g2"))
    structure.accuracy(tmp_path, 1, 60, [], ["rai"])
    structure.speed(tmp_path, repeats=1)
    found = json.loads((tmp_path / "structure.json").read_text())
    assert found["accuracy"]["cells"]["asia | 500 | 10 | rai"]["shd"] <= 2
    assert found["accuracy"]["cells"]["Gaussian, d = 20, degree 2 | 500 | 10 | rai"]["shd"] <= 10
    assert found["speed"]["loop"]["ratio"] > 1


def test_accuracy_of_peers(structure, chain, tmp_path):
    pytest.importorskip("causallearn")
    pytest.importorskip("pyagrum")
    structure.accuracy(tmp_path, 1, 60, [], [])
    cells = json.loads((tmp_path / "structure.json").read_text())["accuracy"]["cells"]
    assert cells["asia | 500 | 10 | causal-learn PC"]["shd"] <= 3


def test_posterior(load, structure, chain, tmp_path, monkeypatch):
    posterior = load("posterior")
    monkeypatch.setattr(posterior, "read_bif", structure.read_bif)
    monkeypatch.setattr(posterior, "NETWORKS", ["asia"])
    monkeypatch.setattr(posterior, "SIZES", [300, 500])
    monkeypatch.setattr(posterior, "GAUSSIANS", [(8, 2)])
    monkeypatch.setattr(posterior, "SAMPLED", 100)
    monkeypatch.setattr(posterior, "pyagrum_hill_climbing", lambda x: rai(x, test="g2"))
    monkeypatch.setattr(posterior, "causal_learn_boss", lambda x, score: rai(x))
    monkeypatch.setattr(posterior, "sumu_partitions", lambda x, seconds, seed: (rai(x).adjacency / 2, 1))
    posterior.posterior(tmp_path, 1, tmp_path)
    cells = json.loads((tmp_path / "structure_posterior.json").read_text())
    assert len(cells) == 4
    cell = cells["asia/500/40"]
    for method in ("tree", "posterior", "partition MCMC"):
        assert cell[method]["ap"] > 0.9
    assert cell["MAP less rai"] > -1e-6
    assert sum(cell["tree"]["bins"][0]) >= 4
    assert (tmp_path / "structure_posterior.png").is_file()


def test_sampler_of_partitions(structure):
    pytest.importorskip("sumu")
    dag, x = structure.linear_gaussian(8, 2, 500, 0)
    shares, steps = importlib.import_module("peers").sumu_partitions(x, 1.0, 0)
    assert steps > 100
    assert ((shares + shares.T > 0.5) == (dag | dag.T)).mean() > 0.85


def test_pairs_of_all_samples_are_binned_together(load):
    edges = importlib.import_module("common.edges")
    samples = [[[4, 0], [1.0, 0.0], [2, 0]], [[4, 2], [1.0, 2.0], [0, 2]]]
    assert edges.pooled(samples) == [[8, 2], [2.0, 2.0], [2, 2]]
    assert [edges.calibration_error(one) for one in samples] == [0.25, pytest.approx(1 / 6)]
    assert edges.calibration_error(edges.pooled(samples)) == 0.0
    # of n pairs with probability 1/2, |share - 1/2| is sqrt(1 / 2 pi n) on average
    assert edges.error_by_chance([[200], [100.0], [0]]) == pytest.approx((2 * np.pi * 200) ** -0.5, rel=0.15)


def test_measures_of_edges(load):
    measures = load("posterior").edge_measures
    true = np.array([True, True, False, False])
    assert measures(true.astype(float), true) == {
        "ap": 1.0,
        "brier": 0.0,
        "ece": 0.0,
        "bins": [[0] * 9 + [2], [0.0] * 9 + [2.0], [0.0] * 9 + [2.0]],
    }
    found = measures(np.array([0.5, 0.5, 0.5, 0.0]), true)
    assert found["brier"] == pytest.approx(3 * 0.25 / 2)
    assert found["ece"] == pytest.approx(2 / 3 - 0.5)


def test_networks_are_read(load, tmp_path):
    pytest.importorskip("pgmpy")
    text = """network small { }
variable a { type discrete [ 2 ] { yes, no }; }
variable b { type discrete [ 2 ] { yes, no }; }
probability ( a ) { table 0.25, 0.75; }
probability ( b | a ) { (yes) 0.9, 0.1; (no) 0.2, 0.8; }
"""
    (tmp_path / "small.bif").write_text(text)
    network = load("bif").read_bif(tmp_path / "small.bif")
    assert network.dag.tolist() == [[False, True], [False, False]]
    np.testing.assert_allclose(network.tables[1][1], [[0.9, 0.1], [0.2, 0.8]])


def test_drift(load, tmp_path, capsys, monkeypatch):
    drift = load("drift")
    monkeypatch.setattr(drift, "WINDOWS", (25,))
    drift.main(["--smoke", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "drift.json")
    assert {"monitor", "monitor, equal rate", "KS, features", "MMD, probabilities"} <= set(cells["digits"])
    assert all(np.isfinite(value) for line in cells["digits"].values() for value in line.values())
    assert "at or below the best peer" in capsys.readouterr().out


def test_peers_of_the_drift_alarm_have_the_statistics_of_their_libraries(load):
    """By scipy, column by column, and by the plain sums of a kernel."""
    drift = load("drift")
    rng = np.random.default_rng(0)
    held, inputs = np.maximum(rng.normal(size=(80, 5)), -0.5), np.maximum(rng.normal(0.3, size=(40, 5)), -0.5)
    last = inputs[10:]
    found = drift.ecdf_statistic(held, inputs, 30, squared=False)
    assert found[-1] == pytest.approx(max(ks_2samp(held[:, k], last[:, k]).statistic for k in range(5)))
    among = ((held[:, None] - held) ** 2).sum(axis=2)
    width = np.median(among[np.triu_indices(80, 1)])

    def mean(x, y, same):
        kernel = np.exp(-((x[:, None] - y) ** 2).sum(axis=2) / width)
        return (kernel.sum() - len(x)) / (len(x) * (len(x) - 1)) if same else kernel.mean()

    expected = mean(held, held, True) + mean(last, last, True) - 2 * mean(held, last, False)
    assert drift.mmd_statistic(held, inputs, 30)[-1] == pytest.approx(expected)
    centers, rest, found = held[:40], held[40:], drift.lsdd_statistic(held, inputs, 30)[-1]

    def kernels(x, factor=1.0):
        return np.exp(-((x[:, None] - centers) ** 2).sum(axis=2) / (factor * width))

    apart, overlap = kernels(rest).mean(axis=0) - kernels(last).mean(axis=0), kernels(centers, 2.0)
    fits = [np.linalg.solve(overlap + 10.0**-power * np.eye(40), apart) for power in range(8)]
    squares = [2 * fit @ apart - fit @ overlap @ fit for fit in fits]
    assert found == pytest.approx(min(squares, key=lambda value: abs(value - found)))  # at one of these λ


def test_costs(load, tmp_path, capsys):
    load("costs").main(["--smoke", "--out", str(tmp_path)])
    cells = cells_of(tmp_path / "costs.json")
    assert len(cells) == 12
    assert all(cell["seconds"] > 0 and cell["ratio"] > 0 for cell in cells.values())
    assert "| swap, 1,300 photographs |" in capsys.readouterr().out
