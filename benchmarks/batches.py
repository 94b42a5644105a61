"""Shards of a table beside plain onnxruntime, and the time of one and two processes beside what arithmetic says.

    python benchmarks/batches.py --rows 1000000 --out docs/results/batches.json

A tree on 20 columns is exported; a table of Parquet is predicted by `brainet predict --format parquet` at three sizes,
by one process and by two. Times are of processors, of all processes together, for the machine may be busy. Needs
pyarrow. `--ray` does the same with two actors of Ray Data.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = [f"x{j}" for j in range(20)]
BATCH = 1024


def make_model(folder: Path) -> None:
    """A tree with scores and a verdict, fitted to twenty columns and exported; in a process of its own, with torch."""
    code = f"""
from pytorch_lightning import Trainer, seed_everything
from sklearn.datasets import make_classification
from torch.utils.data import DataLoader, TensorDataset
import torch
from brainet_pl import BRAINet, export_folder
from brainet_pl.callbacks import StructureLearning
seed_everything(0)
x, y = make_classification(4000, 20, n_informative=12, n_classes=4, random_state=0)
data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
train, held = DataLoader(TensorDataset(*data[:3000]), 128), DataLoader(TensorDataset(*data[3000:]), 128)
model = BRAINet(4, lr=0.01)
Trainer(max_epochs=2, callbacks=[StructureLearning()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, accelerator="cpu").fit(model, train, held)
export_folder(model.eval(), {str(folder)!r})
"""
    around = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder.parent, env=around)


def write_table(path: Path, rows: int) -> np.ndarray:
    """Random numbers as a table of twenty columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = np.random.default_rng(0).normal(size=(rows, len(COLUMNS))).astype(np.float32)
    pq.write_table(pa.table({name: x[:, j] for j, name in enumerate(COLUMNS)}), path, row_group_size=65_536)
    return x


def plain(model: Path, x: np.ndarray) -> float:
    """Seconds of processor time a row, of onnxruntime alone on the same batches, the median of batches."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model / "model.onnx"), options, providers=["CPUExecutionProvider"])
    about = json.loads((model / "model.json").read_text())
    names = [one["name"] for one in about["outputs"]]
    seconds = []
    for start in range(0, min(len(x), 200 * BATCH), BATCH):
        began = time.process_time()
        session.run(names, {about["inputs"][0]["name"]: x[start : start + BATCH]})
        seconds.append((time.process_time() - began) / len(x[start : start + BATCH]))
    return float(np.median(seconds))


def predict(model: Path, table: Path, out: Path, processes: int, shards: int = 8) -> list[dict[str, Any]]:
    """What each of so many processes took for its share."""
    code = (
        "import json, sys, time; from brainet_pl.cli.commands import main; main(sys.argv[1:]); "
        "peak = open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]; "  # of this program alone
        "print(json.dumps([time.process_time(), int(peak) / 1024]))"
    )
    words = ["predict", str(model), "--format", "parquet", "--input", str(table), "--out", str(out), "--shards",
             str(shards), "--columns", ",".join(COLUMNS), "--batch_size", str(BATCH), "--threads", "1"]  # fmt: skip
    around = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", code, *words, "--part", f"{k}/{processes}"], stdout=-1, env=around)
        for k in range(processes)
    ]
    found = []
    for process in started:
        said, _ = process.communicate()
        assert process.returncode == 0
        seconds, memory = json.loads(said.splitlines()[-1])
        found.append({"processor_s": seconds, "memory_mb": memory})
    return found


def with_ray(model: Path, table: Path, out: Path) -> dict[str, Any]:
    """Rows and memory of two actors; processor time of the work alone, as the actors count it."""
    import ray

    from brainet_pl.batch import BatchPredictor

    class Counted(BatchPredictor):
        def __call__(self, batch: Any) -> Any:
            began = time.process_time()
            found = super().__call__(batch)
            size = len(found["error"])
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            found["s"] = np.full(size, (time.process_time() - began) / size)
            found["mb"], found["worker"] = np.full(size, memory), np.full(size, os.getpid())
            return found

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=500_000_000)
    data = ray.data.read_parquet(str(table)).repartition(32)
    settings = {"folder": str(model), "columns": COLUMNS}
    answers = data.map_batches(Counted, fn_constructor_kwargs=settings, batch_size=BATCH, concurrency=2)
    rows, seconds, memory = 0, 0.0, {}
    for part in answers.iter_batches(batch_size=None):
        rows, seconds = rows + len(part["s"]), seconds + float(part["s"].sum())
        for worker in np.unique(part["worker"]):
            memory.setdefault(int(worker), []).extend(part["mb"][part["worker"] == worker].tolist()[:1])
    ray.shutdown()
    return {"rows": rows, "processor_s_a_row": seconds / rows,
            "memory_mb_first_and_last": [[min(m), max(m)] for m in memory.values()]}  # fmt: skip


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", help="an exported folder of twenty numbers; without, one is made")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--out")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(words.model) if words.model else folder / "model"
        if not words.model:
            make_model(model)
        sizes = [words.rows // 20, words.rows // 4, words.rows]
        x = write_table(folder / "all.parquet", words.rows)
        result: dict[str, Any] = {"rows": words.rows, "plain_s_a_row": plain(model, x)}
        if words.ray:
            result["ray"] = with_ray(model, folder / "all.parquet", folder / "ray")
        else:
            runs = []
            for size in sizes:
                write_table(folder / f"{size}.parquet", size)
                runs.append({"rows": size, **predict(model, folder / f"{size}.parquet", folder / f"o{size}", 1)[0]})
            a_row = (runs[1]["processor_s"] - runs[0]["processor_s"]) / (sizes[1] - sizes[0])
            start = runs[0]["processor_s"] - a_row * sizes[0]
            two = predict(model, folder / "all.parquet", folder / "two", 2)
            result |= {"one": runs, "two": two, "s_a_row": a_row, "start_s": start}
            result["expected_s"] = {"one": start + a_row * words.rows, "two": start + a_row * words.rows / 2}
            result["rows_beside_plain"] = result["plain_s_a_row"] / a_row
        result["plain_again_s_a_row"] = plain(model, x)
    print(json.dumps(result, indent=1))
    if words.out:
        Path(words.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
