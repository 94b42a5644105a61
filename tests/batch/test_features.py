"""Features in shards: the tree of one table, sums that are added, images that can't be read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from brainet_pl.batch.features import FeatureShards, Moments, Values


def parts_of(rows, cuts):
    return [part for part in np.split(rows, sorted(cuts)) if len(part)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 99), max_size=5), st.integers(0, 10), st.sampled_from([0.0, 1e6]))
def test_moments_of_shards_are_those_of_one_pass(cuts, seed, far):
    x = np.random.default_rng(seed).normal(size=(100, 4)).cumsum(axis=1) + far
    first, *others = parts_of(x, cuts)
    total = sum((Moments.of(part) for part in others), Moments.of(first))
    assert total.count == 100
    np.testing.assert_allclose(total.mean, x.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(total.covariance, np.cov(x.T), rtol=1e-9, atol=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-5, 5, width=16)),
    st.lists(st.integers(1, 59), max_size=5),
    st.sampled_from([0.05, 0.1, 0.5]),
)
def test_thresholds_and_drift_of_shards_are_those_of_one_pass(values, cuts, level):
    from scipy.stats import ks_2samp

    first, *others = parts_of(values, cuts)
    total, whole = sum((Values.of(part) for part in others), Values.of(first)), Values.of(values)
    np.testing.assert_array_equal(total.values, whole.values)
    np.testing.assert_array_equal(total.counts, whole.counts)
    rank = int(np.ceil((1 - level) * (len(values) + 1)))
    assert total.threshold(level) == (np.sort(values)[rank - 1] if rank <= len(values) else np.inf)
    held = np.random.default_rng(0).normal(size=40).astype(np.float32)
    expected = ks_2samp(held, values).statistic
    assert total.distance(Values.of(held)) == pytest.approx(expected, abs=1e-12)


def test_a_tree_is_learned_from_the_shards_of_many_machines(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from brainet_pl.batch.shards import write_shards
    from brainet_pl.batch.sources import open_source
    from brainet_pl.structure import FeatureStream, learn_structure

    x = np.random.default_rng(0).normal(size=(700, 6)).cumsum(axis=1).astype(np.float32)
    pq.write_table(pa.table({"v": x.tolist()}), tmp_path / "in.parquet")

    def features(batch):
        bad = batch["row"] % 7 == 3
        rows = np.where(bad[:, None], np.nan, batch["v"]).astype(np.float32)
        return {"row": batch["row"], "features": rows, "error": np.where(bad, "corrupt", "").astype(object)}

    for part in ((1, 2), (0, 2)):
        if part == (0, 2):
            with pytest.raises(FileNotFoundError, match="expected a finished folder of shards"):
                FeatureShards(tmp_path / "out")
        source = open_source(tmp_path / "in.parquet")
        write_shards(source, features, tmp_path / "out", 5, part=part, batch=64, facts={})
    shards = FeatureShards(tmp_path / "out", batch=100)
    kept = x[np.arange(700) % 7 != 3]
    np.testing.assert_array_equal(np.concatenate(list(shards())), kept)
    np.testing.assert_array_equal(np.concatenate(list(shards())), kept)  # once more
    shares = [np.concatenate(list(FeatureShards(tmp_path / "out", (k, 2))())) for k in range(2)]
    assert sum(map(len, shares)) == len(kept)
    found, expected = learn_structure(FeatureStream(shards), test="cmi"), learn_structure(kept, test="cmi")
    assert found.fingerprint == expected.fingerprint


@pytest.mark.integration
def test_features_of_images(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    import torch
    from PIL import Image

    from brainet_pl.backbones.loading import Backbone
    from brainet_pl.cli import main
    from brainet_pl.serving.images import ImageSteps

    (tmp_path / "in").mkdir()
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 36, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "in" / f"{i}.png")
    (tmp_path / "in" / "2.png").write_bytes(b"no image")
    torch.manual_seed(0)
    torch.save(Backbone("cifar_resnet20").build().model.state_dict(), tmp_path / "weights.pt")
    weights = str(tmp_path / "weights.pt")
    words = ["extract", "--backbone", "cifar_resnet20", "--weights", weights, "--side", "32", "--shards", "2"]
    main([*words, "--input", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--batch_size", "2"])
    assert "2 of 2 shards finished, 5 rows, 1 can't be read" in capsys.readouterr().out
    found = np.concatenate(list(FeatureShards(tmp_path / "out")()))
    steps = ImageSteps((32, 32), 32)
    images = np.stack([steps((tmp_path / "in" / f"{i}.png").read_bytes()) for i in (0, 1, 3, 4)])
    with torch.no_grad():
        expected = Backbone("cifar_resnet20", weights, layers=None).build()(torch.from_numpy(images))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
