"""Everything that runs in a step, on CUDA tensors that are pretended: nothing on the wrong device, nothing that waits.

A pretended tensor has a shape, a type and a device, and no numbers: what mixes devices is an error, and so is what asks
for a number (`if`, `item`, a mask as an index), which would make a real GPU wait. Backward passes need a real one.
"""

import collections
import contextlib
import copy
import traceback

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brainet_pl import swap_layer
from brainet_pl._utils.framework import TrainerFn
from brainet_pl._utils.parts import part_classes
from brainet_pl.backbones import Backbone
from brainet_pl.calibration import Calibrator, Conformal
from brainet_pl.callbacks import StructureLearning
from brainet_pl.datamodules import Digits
from brainet_pl.features.extraction import extract
from brainet_pl.lightning.module import BRAINet
from brainet_pl.metrics.labels import clamped, out_of_range
from brainet_pl.metrics.measures import classification_measures
from brainet_pl.network import HeadSettings, Tree
from brainet_pl.scores import GEN, KNN, RMDS, Generative, KLMatching, Mahalanobis, Score, ScoreContext
from brainet_pl.scores.base import LastLayer
from brainet_pl.scores.fitting import fit_score
from brainet_pl.structure import learn_structure
from brainet_pl.tasks import Classification
from brainet_pl.tasks.passes import Passes

HEADS, CALIBRATORS = (  # not those of other tests
    {name: cls for name, cls in part_classes(kind).items() if cls.__module__.startswith("brainet_pl.")}
    for kind in (HeadSettings, Calibrator)
)
WHOLE = ("Combined", "Own", "KLMatching")  # they need a whole model, `fitted`
SCORES = {
    name: cls
    for name, cls in part_classes(Score).items()
    if cls.__module__.startswith("brainet_pl.") and name not in WHOLE
}
CLASSES = {name: cls for name, cls in CALIBRATORS.items() if Classification in cls.tasks}


def pretend(module, mode):
    """Replace every parameter and buffer by one on a GPU that is not there."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(mode.from_tensor(p.detach()).to("cuda"), p.requires_grad)
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = mode.from_tensor(b).to("cuda")
    return module


@contextlib.contextmanager
def pretended():
    """The mode in which tensors are pretended, and a function that brings a tensor or a module there."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        yield lambda x: pretend(x, mode) if isinstance(x, nn.Module) else mode.from_tensor(x).to("cuda")


@contextlib.contextmanager
def autocast(dtype):
    """Mixed precision for the GPU that is not there, where `torch.autocast` would switch itself off; None is none."""
    if dtype is None:
        yield
        return
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_mixed_precision_is_on():
    with pretended() as cuda, autocast(torch.bfloat16):
        assert (cuda(torch.ones(2, 2)) @ cuda(torch.ones(2, 2))).dtype == torch.bfloat16


def devices(answer):
    return {value.device.type for value in answer.values()}


@pytest.fixture(scope="module")
def features():
    torch.manual_seed(0)
    return torch.randn(300, 12).cumsum(1)


@pytest.fixture(scope="module")
def ggt(features):
    return learn_structure(features, progress=False)


@pytest.fixture(scope="module")
def fitted(quiet_trainer, tmp_path_factory):
    """A model of digits with every kind of score, calibrated, with conformal sets and a verdict."""
    scores = [KNN(), Mahalanobis(), Generative(progress=False), RMDS(), GEN(), KLMatching()]
    given = {"scores": scores, "calibration": "DensityScaling", "conformal": "Conformal", "lr": 0.01}
    model = BRAINet(8, head=Tree(num_params=6000), **given)
    learn = StructureLearning(threshold=0.1, progress=False, cache="")
    quiet_trainer(tmp_path_factory.mktemp("devices"), learn).fit(model, datamodule=Digits())
    return model.eval()


# -- the pretence is worth something ----------------------------------------------------------------------------------


def test_a_buffer_on_the_cpu_is_found(features, ggt):
    head = Tree(num_params=2000).build(12, 5, ggt)
    with pretended() as cuda:
        x = cuda(features[:8])
        cuda(head).eval()(x)
        head.skip.running_mean = torch.zeros(12)
        with pytest.raises(RuntimeError, match="device"):
            head(x)


def test_a_read_of_the_device_is_found():
    with pretended() as cuda, pytest.raises(DataDependentOutputException):
        bool(cuda(torch.ones(3)).sum() > 1)


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, precision, features, ggt):
    head, task = HEADS[name]().build(12, 5, ggt), Classification(5)
    with pretended() as cuda, autocast(precision):
        x = cuda(features[:64])
        outputs = cuda(head).train()(x)
        passes = head.eval().passes(x, 15)
        found = {"predicted": cuda(task).predictive(*passes), **task.scores(*passes)}
    assert outputs.device.type == passes.values.device.type == "cuda"
    assert {values.dtype for values in found.values()} == {torch.float32}
    assert devices(found) == {"cuda"}


@pytest.mark.parametrize("mode", ["simultaneous", "enumerated", "held", "chosen"])
def test_ways_to_run_a_tree(mode, features, ggt):
    head = Tree(num_params=2000, inference="enumerated" if mode == "enumerated" else "simultaneous").build(12, 5, ggt)
    if mode == "held":
        head.inference = "stochastic"
        head.hold(ggt.sample(4, 1.0, 0))
    with pretended() as cuda:
        x = cuda(features[:64])
        cuda(head).eval()
        out = head.on_choices(x, head.layers.draw_posterior(7)) if mode == "chosen" else head.passes(x, 15).values
    assert out.device.type == "cuda"


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, precision, features, ggt):
    """Each score on its own, those included that read the network's own classification layer."""
    torch.manual_seed(0)
    y, layer = torch.arange(300) % 5, LastLayer(torch.randn(5, 12), torch.randn(5))
    moments = torch.zeros(12), torch.ones(12)
    score = SCORES[name]()
    score.set_context(ScoreContext(5, ggt=ggt, widths=(5, 7), moments=moments, last_layer=layer))
    logits = torch.randn(3, 300, 5)
    if score.needs_fit:
        fit_score(score, features, y)
    with pretended() as cuda, autocast(precision):
        parts = [cuda(part[..., :16, :]) for part in (logits, features, logits.mean(0).softmax(-1))]
        passes = Passes(parts[0], None, *parts[1:])
        answer = cuda(score)(passes)
    assert answer
    assert devices(answer) == {"cuda"}
    assert {values.dtype for values in answer.values()} == {torch.float32}


@pytest.mark.parametrize("name", CLASSES)
def test_calibrators(name):
    torch.manual_seed(0)
    calibrator, y = CLASSES[name](), torch.arange(200) % 4
    probs = (2 * nn.functional.one_hot(y, 4) + torch.randn(200, 4)).softmax(1)
    calibrator.check(Classification(4))
    scores = {} if calibrator.score_name is None else {calibrator.score_name: torch.rand(200)}
    twin = copy.deepcopy(calibrator)
    calibrator.observe(probs, y, scores)
    learned = calibrator.finalize()
    moved = twin.fit_on_cpu(probs, y, scores.get(calibrator.score_name))  # the road of a GPU
    assert {k: float(v) for k, v in moved.items()} == pytest.approx({k: float(v) for k, v in learned.items()})
    assert torch.allclose(twin(probs, scores), calibrator(probs, scores))
    with pretended() as cuda:
        there = cuda(calibrator)(cuda(probs[:16]), {k: cuda(v[:16]) for k, v in scores.items()})
    assert there.device.type == "cuda"
    assert there.dtype == torch.float32


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_conformal_sets(method):
    torch.manual_seed(0)
    y = torch.arange(200) % 4
    probs = (2 * nn.functional.one_hot(y, 4) + torch.randn(200, 4)).softmax(1)
    sets = Conformal(method).fit(probs, y)
    with pretended() as cuda:
        answer = cuda(sets)(cuda(probs[:16]))
    assert devices(answer) == {"cuda"}


def test_metrics():
    measures = classification_measures(4)
    with pretended() as cuda:
        target, wrong = clamped(cuda(torch.arange(12) % 4), 4)
        for measure in measures:
            for name in measure._defaults:  # states of metrics move with the module, as in Lightning
                state = getattr(measure, name)
                setattr(measure, name, cuda(state) if torch.is_tensor(state) else state)
            measure.update(cuda(torch.rand(12, 4)), target)
    assert wrong.device.type == "cuda"


def test_labels_are_looked_at_once():
    labels = torch.tensor([0, 3, 2])
    assert out_of_range(labels, 4) is None
    labels += 1
    assert out_of_range(labels, 4) == (1, 4)  # changed in place since
    assert out_of_range(labels, 5) is None
    assert out_of_range(labels, 4) == (1, 4)
    safe, wrong = clamped(labels, 4)
    assert safe.tolist() == [1, 3, 3]
    assert bool(wrong)


# -- the whole road ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_predict(precision, fitted):
    predictor = copy.deepcopy(fitted.predictor)
    predictor.head.hold(predictor.ggt.sample(5, 1.0, 0))  # which sub-networks is drawn on the host
    with pretended() as cuda, autocast(precision):
        answer = cuda(predictor).predict(cuda(torch.rand(16, 64)))
    scores = {"knn", "generative", "joint", "kl_matching", "gen", "rmds"}
    assert {"class", "probabilities", "set", "known", "known_p", *scores} <= set(answer), set(answer)
    assert devices(answer) == {"cuda"}
    floats = {name: value.dtype for name, value in answer.items() if value.is_floating_point()}
    assert set(floats.values()) == {torch.float32}, floats


def test_a_backbone_with_taps_and_base_logits():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    extractor = Backbone(net, layers=["2"], pool="mean").build()
    found = extract(extractor, [(torch.rand(8, 3, 8, 8), torch.zeros(8))], progress=False)
    extractor.set_scale([found.output])
    with pretended() as cuda:
        there = cuda(extractor)(cuda(torch.rand(8, 3, 8, 8)), more=True)
    assert there.features.device.type == there.base_logits.device.type == "cuda"
    assert there.features.shape == (8, 4)


@pytest.mark.parametrize("training", [True, False])
def test_a_swapped_layer(training, features):
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5))
    swap_layer(model, (features, torch.arange(300) % 5), "2", head=Tree(num_params=2000), progress=False)
    for precision in (torch.bfloat16, torch.float16):
        twin = copy.deepcopy(model).train(training)
        with pretended() as cuda, autocast(precision):
            out = cuda(twin)(cuda(features[:16]))
        assert out.device.type == "cuda"
        assert out.dtype == torch.float32


# -- reads of the device ----------------------------------------------------------------------------------------------

READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount", "is_nonzero"}


def estimates():
    """Whether what runs is asked for the estimate of what will be noticed, of 2,000 samples at the most."""
    return any(f.filename.endswith("fitting/left_out.py") for f in traceback.extract_stack())


class Reads(TorchDispatchMode):
    """Counts what a GPU would wait for, by the lines of the package that ask."""

    def __init__(self):
        super().__init__()
        self.found = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        masks = name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple)
        masked = masks and any(torch.is_tensor(i) and i.dtype == torch.bool for i in args[1])
        if name in READS or masked:
            if estimates():
                return func(*args, **kwargs or {})
            lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "brainet_pl" in f.filename]
            self.found[f"{name} {lines[-1] if lines else ''}"] += 1
        return func(*args, **kwargs or {})


def test_a_step_looks_at_the_device_once_and_a_prediction_never(fitted, quiet_trainer, tmp_path, monkeypatch):
    """`tolist` reads without asking torch's dispatcher, so that it is counted by itself."""
    model, found = copy.deepcopy(fitted), {}
    lists = collections.Counter()
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda self: lists.update(["tolist"] * (not estimates())) or tolist(self)
    )

    def counted(name):
        step = getattr(model, name)

        def run(*args, **kwargs):
            with Reads() as reads:
                lists.clear()
                out = step(*args, **kwargs)
                if not model.trainer.sanity_checking:
                    found.setdefault(name, []).append(dict(reads.found + lists))
            return out

        monkeypatch.setattr(model, name, run)

    for name in ("training_step", "validation_step", "predict_step"):
        counted(name)
    model.head.hold(model.ggt.sample(5, 1.0, 0))
    trainer = quiet_trainer(tmp_path, limit_train_batches=3, limit_val_batches=3, limit_predict_batches=3)
    trainer.fit(model, datamodule=Digits())
    assert trainer.state.fn == TrainerFn.FITTING
    trainer.predict(model, datamodule=Digits())
    for name, most in (("training_step", 1), ("validation_step", 1), ("predict_step", 0)):
        assert len(found[name]) >= 3
        assert max(sum(reads.values()) for reads in found[name]) == most, found[name]


def test_wrong_labels_still_stop_a_fit_with_their_own_error(quiet_trainer, tmp_path):
    data = torch.utils.data.TensorDataset(torch.rand(40, 6), torch.arange(40) % 5)
    model = BRAINet(4, head="MLP")
    with pytest.raises(ValueError, match="expected labels from 0 to 3, got 0 to 4"):
        quiet_trainer(tmp_path).fit(model, torch.utils.data.DataLoader(data, batch_size=10))


def test_weights_of_16_bits_that_break_are_said_to(quiet_trainer, tmp_path):
    model = BRAINet(8, head=Tree(num_params=6000), lr=0.01)
    learn = StructureLearning(threshold=0.1, progress=False, cache="")
    with pytest.raises(ValueError, match="train with precision 16-mixed, bf16-mixed or 32-true: weights of 16 bits"):
        quiet_trainer(tmp_path, learn, precision="16-true", epochs=2).fit(model, datamodule=Digits())


def test_mixed_precision_leaves_probabilities_and_scores_32_bits(fitted):
    x = torch.rand(16, 64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        answer = fitted.predictor.predict(x)
    floats = {name: value.dtype for name, value in answer.items() if value.is_floating_point()}
    assert set(floats.values()) == {torch.float32}, floats
    assert torch.allclose(answer["probabilities"].sum(1), torch.ones(16), atol=1e-5)
