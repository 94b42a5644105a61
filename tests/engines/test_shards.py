"""`brainet predict --format parquet`: each row once, whatever the processes; kills, half-written files, bad rows."""

import io
import json
import signal
import tarfile
import time

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from tiny_folder import numbers, write_tiny

from brainet_pl.batch import BatchPredictor
from brainet_pl.batch.shards import read_manifest, write_parquet, write_shards
from brainet_pl.batch.sources import ParquetTables, Piece, open_source
from brainet_pl.serving import ExportedModel

COLUMNS = ",".join(f"x{j}" for j in range(20))


def words(folder, rows, out, shards=7, *more):
    return ["predict", folder, "--format", "parquet", "--input", rows, "--out", out, "--shards", shards,
            "--columns", COLUMNS, "--keep", "id", *more]  # fmt: skip


def done(process):
    said, wrong = process.communicate(timeout=120)
    assert process.returncode == 0, wrong[-3000:]
    return said


def check_rows(out, expected):
    """Each row once, with the answer that it has in one call."""
    table = ds.dataset(out, format="parquet").to_table().sort_by("row")
    assert table["row"].to_pylist() == table["id"].to_pylist() == list(range(len(expected["joint"])))
    for name in ("class", "known_p", "known", "energy", "joint"):
        np.testing.assert_array_equal(table[name].to_numpy(), expected[name], err_msg=name)
    found = np.stack(table["probabilities"].to_numpy())
    np.testing.assert_array_equal(found, expected["probabilities"])
    assert set(table["error"].to_pylist()) == {""}


def digests(out):
    return [one["sha256"] for one in read_manifest(out)["parts"]]


def test_one_process_two_and_one_that_was_killed_write_the_same(plain, rows, tmp_path, brainet):
    table, x = rows
    expected = ExportedModel(plain).predict(x)
    one = brainet(*words(plain, table, tmp_path / "one"))
    two = [brainet(*words(plain, table, tmp_path / "two", 7, "--part", f"{k}/2")) for k in range(2)]
    assert "7 of 7 shards finished, 10,007 rows" in done(one)
    assert any("7 of 7 shards finished" in done(process) for process in two)
    check_rows(tmp_path / "one", expected)
    check_rows(tmp_path / "two", expected)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    manifest = read_manifest(tmp_path / "one")
    assert (manifest["rows"], manifest["errors"]) == (10_007, 0)
    assert manifest["unknown"] == int((~expected["known"]).sum())

    out = tmp_path / "killed"
    slow = ("--batch_size", "1")  # so that there is time to kill it in the middle
    killed = brainet(*words(plain, table, out, 7, *slow))
    wait_for(lambda: len(list(out.glob("_shards/*.json"))) >= 2 and list(out.glob(".part-*.tmp")), killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert 2 <= len(before) < 7
    assert list(out.glob(".part-*.tmp"))  # half a shard, which no reader sees
    assert ds.dataset(out, format="parquet").count_rows() < 10_007
    with pytest.raises(FileNotFoundError, match="expected a finished folder of shards"):
        read_manifest(out)
    done(brainet(*words(plain, table, out)))
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    finished = [name for name in before if (out / "_shards" / f"{name[5:10]}.json").is_file()]
    assert len([name for name in finished if before[name] == after[name]]) >= 2  # not written again
    check_rows(out, expected)
    assert read_manifest(out)["rows"] == 10_007


def wait_for(ready, process, seconds=60):
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < end, "it did not get there in time"
        time.sleep(0.005)


def run(plain, rows, out, shards=3, predictor=None, **settings):
    predictor = predictor or BatchPredictor(plain, columns=COLUMNS.split(","), keep=["row"])
    return write_shards(open_source(rows), predictor, out, shards, facts={"model": "a"}, **settings)


def test_a_changed_shard_is_written_again_and_a_changed_job_refused(plain, rows, tmp_path):
    table, _ = rows
    first = run(plain, table, tmp_path / "out")
    broken = tmp_path / "out" / first[1].file
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(ValueError, match="as the manifest describes it, got another or none"):
        read_manifest(tmp_path / "out")
    assert run(plain, table, tmp_path / "out") == first
    assert read_manifest(tmp_path / "out")["rows"] == 10_007
    with pytest.raises(ValueError, match="to go on with it, got other shards: name another folder"):
        run(plain, table, tmp_path / "out", 4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.parquet").write_bytes(broken.read_bytes())
    with pytest.raises(ValueError, match=r"expected an empty folder or one with a plan, got .* with a.parquet"):
        run(plain, table, tmp_path / "full")
    manifest = tmp_path / "out" / "_manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 9}))
    with pytest.raises(ValueError, match=r"expected format 1 in .*_manifest.json, got 9"):
        read_manifest(tmp_path / "out")


@pytest.mark.parametrize("shards", [1, 2, 5, 11, 40])
def test_pieces_hold_each_row_once(rows, shards):
    source = ParquetTables(sorted(rows[0].glob("*.parquet")), ["id"])
    read = [np.concatenate([b["id"] for b in source.read(pieces, 333)]) for pieces in source.split(shards)]
    np.testing.assert_array_equal(np.concatenate(read), np.arange(10_007))
    assert max(map(len, read)) - min(map(len, read)) <= 1


def test_bad_rows_are_counted_and_types_of_columns_kept(plain, tmp_path):
    x = numbers(5)
    lists = [x[0].tolist(), [1.0], None, x[3].tolist(), x[4].tolist()]
    key = pa.array([1, None, 2**60 + 1, 4, 5], pa.int64())
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"v": lists, "key": key}), tmp_path / "in" / "a.parquet")
    predictor = BatchPredictor(plain, columns="v", keep=["key"])
    run(plain, tmp_path / "in", tmp_path / "out", 2, predictor, batch=2)
    manifest = read_manifest(tmp_path / "out")
    assert (manifest["rows"], manifest["errors"]) == (5, 2)
    found = ds.dataset(tmp_path / "out").to_table()
    assert found["key"].to_pylist() == key.to_pylist()
    assert [bool(text) for text in found["error"].to_pylist()] == [False, True, True, False, False]
    np.testing.assert_array_equal(found["joint"].to_numpy()[3:], ExportedModel(plain).predict(x[3:])["joint"])


def test_more_shards_than_rows_and_kept_columns_without_a_value(plain, tmp_path):
    x = numbers(3)
    (tmp_path / "in").mkdir()
    columns = {f"x{j}": x[:, j] for j in range(20)} | {"note": pa.array([None, None, 7], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "in" / "a.parquet")
    predictor = BatchPredictor(plain, columns=COLUMNS.split(","), keep=["row", "note"])
    run(plain, tmp_path / "in", tmp_path / "out", 5, predictor, batch=1)
    assert ds.dataset(tmp_path / "out").to_table()["note"].to_pylist() == [None, None, 7]


def test_tar_files_and_folders_of_images(tmp_path, brainet):
    from PIL import Image

    steps = {"resize": 8, "crop": 8, "mean": [0.5], "std": [0.25], "interpolation": "bilinear", "channels": 3}
    folder = write_tiny(tmp_path / "model", shape=(3, 8, 8), images=steps)
    files = {}
    for i in range(9):
        made = io.BytesIO()
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (9, 12, 3)).astype(np.uint8)).save(made, "PNG")
        files[f"{i:03d}.png"] = made.getvalue()
    files["004.png"] = files["004.png"][:50]
    (tmp_path / "tars").mkdir()
    (tmp_path / "loose" / "deep").mkdir(parents=True)
    for i in range(3):
        with tarfile.open(tmp_path / "tars" / f"{i}.tar", "w") as archive:
            for name in list(files)[3 * i : 3 * i + 3]:
                for member, content in ((name, files[name]), (name.replace("png", "cls"), b"1")):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    for name, content in files.items():
        (tmp_path / "loose" / "deep" / name).write_bytes(content)
    good = [name for name in files if name != "004.png"]
    expected = ExportedModel(folder).predict_images([files[name] for name in good])["joint"]
    for place, names in (
        ("tars", [f"{int(n[:3]) // 3}.tar/{n}" for n in files]),
        ("loose", [f"deep/{n}" for n in files]),
    ):
        out = tmp_path / f"{place}_out"
        command = ("predict", folder, "--format=parquet", "--input", tmp_path / place, "--out", out, "--shards", 2)
        assert "9 rows" in done(brainet(*command, "--batch_size", 2))
        found = ds.dataset(out).to_table().sort_by("file")
        assert found["file"].to_pylist() == names
        assert [bool(text) for text in found["error"].to_pylist()] == [name == "004.png" for name in files]
        np.testing.assert_array_equal(np.delete(found["joint"].to_numpy(), 4), expected)
    stopped = brainet(*command[:-3], tmp_path / "stop", "--shards", 2, "--on_error", "raise")
    assert "deep/004.png: expected an image" in stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 1
    with pytest.raises(ValueError, match="expected at most 3 shards of 3 tar files, got 4"):
        open_source(tmp_path / "tars").split(4)
    cut = tmp_path / "tars" / "1.tar"
    cut.write_bytes(cut.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"expected a whole tar file at .*1.tar"):
        list(open_source(cut).read([Piece(0, 0, None)], 4))


def test_a_file_that_was_not_finished_is_not_there(tmp_path):
    def broken():
        yield {"a": np.arange(3)}
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_parquet(tmp_path / "a.parquet", broken(), {})
