"""The simultaneous mode as a compiled, an exported and an ONNX graph; mixed precision."""

import shutil

import numpy as np
import pytest
import torch

from brainet_pl.network import BRAINetHead
from brainet_pl.structure import learn_structure


@pytest.fixture(scope="module")
def head():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)) @ (rng.normal(size=(4, 12)) * (rng.random((4, 12)) < 0.6)) + rng.normal(
        size=(300, 12)
    )
    ggt = learn_structure(x, test="gaussian", max_order=2, threshold=0.02, progress=False)
    torch.manual_seed(0)
    head = BRAINetHead(ggt, 3, num_params=3000)
    for _ in range(5):
        head(torch.randn(32, 12))
    return head.eval()


def test_compiles_without_graph_breaks(head):
    x = torch.randn(8, 12)
    compiled = torch.compile(head, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), head(x))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_numbers(head):
    x = torch.randn(8, 12)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(head, fullgraph=True)(x), head(x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_exports_with_a_free_batch_size(head):
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(head, (torch.randn(4, 12),), dynamic_shapes=({0: batch},))
    x = torch.randn(9, 12)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), head(x), rtol=1e-5, atol=1e-5)


def test_onnx_runtime_agrees(head, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "head.onnx"
    torch.onnx.export(
        head,
        (torch.randn(4, 12),),
        path,
        dynamo=True,
        input_names=["features"],
        dynamic_shapes=({0: "batch"},),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(7, 12)
    (got,) = session.run(None, {"features": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, head(x).numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_what_a_linear_layer_gives(head, dtype):
    """Matrix products in bf16 crash some CPUs, so a tiny one is tried first in a process of its own."""
    import subprocess
    import sys

    probe = f"import torch; a = torch.randn(64, 64, dtype={dtype}); (a @ a).sum().item()"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        pytest.skip(f"this CPU has no {dtype} matrix product")
    x = torch.randn(8, 12)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        out = head(x)
        assert out.dtype is dtype
        assert head.stochastic(x, 2).logits.dtype is dtype
    with torch.no_grad():
        torch.testing.assert_close(out.float(), head(x), rtol=0.1, atol=0.1)
    assert all(p.dtype is torch.float32 for p in head.parameters())
