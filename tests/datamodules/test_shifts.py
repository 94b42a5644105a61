"""Corruptions against what they are said to do, and sets of shifts: on the fly, of files, of rows."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.utils.data import Subset

from brainet_pl.datamodules import Arrays, Digits, Shifts, Table
from brainet_pl.datamodules import corruptions as c
from brainet_pl.datamodules.base import Samples


@pytest.fixture(scope="module")
def photo():
    """A smooth uint8 image (3, 32, 32), neither dark nor bright."""
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.normal(size=(3, 32, 32)), (0, 3, 3))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    return torch.from_numpy((40 + 170 * smooth).round().astype(np.uint8))


def distance(a, b):
    return float((a.double() - b.double()).abs().mean())


@pytest.mark.parametrize("name", c.IMAGES)
class TestImages:
    def test_keeps_shape_and_type_and_repeats(self, photo, name):
        for x in (photo, photo.float() / 255):
            for severity in (1, 5):
                found = c.corrupt_image(x, name, severity, number=3)
                assert (found.shape, found.dtype) == (x.shape, x.dtype)
                assert torch.equal(found, c.corrupt_image(x, name, severity, number=3))
                assert 0 <= found.min() <= found.max() <= (255 if x is photo else 1)
                assert not torch.equal(found, x)

    def test_is_worse_at_severity_five(self, photo, name):
        mild, hard = ([distance(photo, c.corrupt_image(photo, name, s, k)) for k in range(8)] for s in (1, 5))
        if name not in ("elastic_transform", "saturate"):  # there the severities change kind as well as strength
            assert np.mean(hard) > 1.1 * np.mean(mild)
        else:
            assert min(np.mean(mild), np.mean(hard)) > 0.5

    def test_grey_small_and_oblong_images(self, name):
        rng = torch.Generator().manual_seed(0)
        for shape in ((1, 8, 8), (1, 28, 28), (3, 40, 24)):
            x = torch.rand(shape, generator=rng)
            if name == "saturate" and shape[0] == 1:
                with pytest.raises(ValueError, match="three channels for saturate, got 1"):
                    c.corrupt_image(x, name, 3)
            else:
                assert c.corrupt_image(x, name, 3).isfinite().all()


def test_noise_has_the_published_strength():
    """On a grey image, far from 0 and 1, against the formulas of CIFAR-10-C."""
    x = torch.full((3, 64, 64), 0.5)
    found = {name: c.corrupt_image(x, name, 3) - x for name in (*c.FIFTEEN[:3], "speckle_noise")}
    assert float(found["gaussian_noise"].std()) == pytest.approx(0.08, rel=0.05)
    assert float(found["shot_noise"].std()) == pytest.approx(np.sqrt(0.5 / 100), rel=0.05)
    assert float((found["impulse_noise"] != 0).float().mean()) == pytest.approx(0.03, rel=0.2)
    assert float(found["speckle_noise"].std()) == pytest.approx(0.5 * 0.12, rel=0.05)
    assert all(abs(float(noise.mean())) < 0.01 for noise in found.values())


def test_what_needs_no_draw_against_other_means(photo):
    x = photo.double() / 255
    mean = x.mean(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(c.corrupt_image(x, "contrast", 4), (x - mean) * 0.3 + mean)
    turned = c.corrupt_image(x, "rotation", 5)
    assert any(torch.allclose(turned, torch.rot90(x, k, (1, 2)), atol=1e-9) for k in (1, 3))
    value = (x.amax(0) + 0.15).clamp(max=1) / x.amax(0)  # brightness: the value of HSV is the largest channel
    torch.testing.assert_close(c.corrupt_image(x, "brightness", 3), x * value)
    for name in ("defocus_blur", "gaussian_blur", "motion_blur", "glass_blur"):
        flat = torch.full((3, 32, 32), 0.4, dtype=torch.float64)
        torch.testing.assert_close(c.corrupt_image(flat, name, 5), flat)  # nothing to blur


def test_refuses_what_is_no_image(photo):
    with pytest.raises(ValueError, match=r"numbers from 0 to 1 to corrupt, got .*before images are normalised"):
        c.corrupt_image(3 * torch.randn(3, 8, 8), "fog", 1)
    with pytest.raises(ValueError, match=r"image \(C, H, W\).*got \(64,\).*image_shape"):
        c.corrupt_image(torch.rand(64), "fog", 1)


def test_rows():
    rng = np.random.default_rng(0)
    others = rng.normal(3.0, [1.0, 10.0], (500, 2))
    rows = torch.from_numpy(others)
    changed = {name: torch.stack([c.corrupt_row(r, name, 5, others, i) for i, r in enumerate(rows)]) for name in c.ROWS}
    np.testing.assert_allclose((changed["noise"] - rows).std(dim=0), 2 * others.std(axis=0), rtol=0.1)
    lost = changed["missing"] != rows
    assert float(lost.double().mean()) == pytest.approx(0.5, abs=0.06)
    np.testing.assert_allclose(changed["missing"][lost[:, 0], 0], others[:, 0].mean())
    assert np.isin(changed["swap"][:, 1], others[:, 1]).all()
    assert float((changed["swap"] != rows).double().mean()) == pytest.approx(0.5, abs=0.06)


# -- sets -------------------------------------------------------------------------------------------------------------


def test_sets_of_digits():
    data = Digits(shifts=Shifts(["rotation", "gaussian_noise"], severities=(2, 5), limit=40, image_shape=(8, 8)))
    data.setup("test")
    loaders = data.test_dataloader()
    assert list(loaders) == ["test", "held_out", "shift"]
    every = loaders["shift"].dataset
    assert every.parts == {f"shift/{name}/{s}": 40 for name in ("rotation", "gaussian_noise") for s in (2, 5)}
    assert len(every) == 160
    x, y = (torch.stack([torch.as_tensor(every[i][k]) for i in range(40, 80)]) for k in (0, 1))
    places = [i * 433 // 40 for i in range(40)]
    labels = [data.test_set[i][1] for i in places]
    assert y.tolist() == labels
    clean = torch.stack([data.test_set[i][0] for i in places])
    turned = [torch.rot90(clean.view(-1, 8, 8), k, (1, 2)).reshape(-1, 64) for k in (1, 3)]
    assert all(any(torch.allclose(x[i], way[i], atol=1e-6) for way in turned) for i in range(40))


def test_all_and_flat_vectors():
    data = Digits(images=True, shifts={"severities": [3]})
    data.setup("test")
    assert [name.split("/")[1] for name in data.test_dataloader()["shift"].dataset.parts] == list(c.FIFTEEN)
    rows = Digits(shifts=Shifts(severities=(3,)))
    rows.setup("test")
    assert [name.split("/")[1] for name in rows.test_dataloader()["shift"].dataset.parts] == list(c.ROWS)
    wrong = Digits(shifts=Shifts("fog"))
    wrong.setup("test")
    with pytest.raises(ValueError, match=r"corruptions of rows of .*noise, missing, swap.*got fog.*image_shape"):
        wrong.test_dataloader()


def test_uint8_images_are_corrupted_before_they_are_normalised(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (30, 12, 12, 3), dtype=np.uint8), rng.integers(0, 3, 30)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    file = str(tmp_path / "a.npz")
    data = Arrays(file, file, mean=(0.5,) * 3, std=(0.25,) * 3, shifts=Shifts(["contrast"], severities=(5,)))
    data.setup("test")
    (found, _), *_ = data.test_dataloader()["shift"]
    raw = c.corrupt_image(torch.from_numpy(x[4]).permute(2, 0, 1), "contrast", 5)
    torch.testing.assert_close(found[4], (raw.float() / 255 - 0.5) / 0.25)


def test_files_in_the_form_of_cifar10_c(tmp_path):
    rng = np.random.default_rng(0)
    stored, labels = rng.integers(0, 256, (100, 6, 6, 3), dtype=np.uint8), rng.integers(0, 4, 20)
    np.save(tmp_path / "fog.npy", stored)
    np.save(tmp_path / "labels.npy", labels)
    clean = Samples(torch.zeros(20, 3, 6, 6, dtype=torch.uint8), torch.from_numpy(labels), lambda x: x.float() / 255)
    for stacked in (labels, np.tile(labels, 5)):
        np.save(tmp_path / "labels.npy", stacked)
        sets = Shifts(folder=str(tmp_path), severities=(1, 4), limit=10).sets(clean)
        assert list(sets) == ["shift/fog/1", "shift/fog/4"]
        x, y = sets["shift/fog/4"][3]
        np.testing.assert_allclose(x, stored[60 + 6].transpose(2, 0, 1) / 255, rtol=1e-6)
        assert (y, len(sets["shift/fog/4"])) == (labels[6], 10)
    with pytest.raises(FileNotFoundError, match=r"fog without snow: check folder"):
        Shifts(["snow"], folder=str(tmp_path)).sets(clean)
    np.save(tmp_path / "labels.npy", labels[:7])
    with pytest.raises(ValueError, match=r"images \(5·N, H, W, C\).*got \(100, 6, 6, 3\) and \(7,\)"):
        Shifts(folder=str(tmp_path)).sets(clean)


def test_subsets_and_other_sets():
    samples = Samples(torch.rand(10, 4), torch.arange(10))
    sets = Shifts(["noise"], severities=(1,)).sets(Subset(samples, [7, 2]))
    assert [label for _, label in (sets["shift/noise/1"][i] for i in range(2))] == [7, 2]
    with pytest.raises(
        ValueError, match=r"expected a test set of Samples or ImageFiles.*got TensorDataset.*shift/<corruption>"
    ):
        Shifts().sets(torch.utils.data.TensorDataset(torch.rand(3, 4)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corruptions": ["rain"]}, "corruptions of shifts to be one of 'gaussian_noise'.*got 'rain'"),
        ({"severities": (0,)}, "severities of shifts of at least 1 and at most 5, got 0"),
        ({"severities": ()}, "expected different severities"),
        ({"severities": (2, 2)}, "expected different severities"),
        ({"limit": 0}, "limit of shifts of at least 1, got 0"),
        ({"image_shape": (8,)}, r"image_shape to be \(C, H, W\) or \(H, W\), got \(8,\)"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        Shifts(**settings)


def test_a_table(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["a,b,y", *(f"{a:.3f},{b:.3f},{a + b:.3f}" for a, b in rng.normal(size=(60, 2)))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    data = Table(str(tmp_path / "t.csv"), "y", shifts=Shifts("missing", severities=(5,)))
    data.setup("test")
    (x, y), *_ = data.test_dataloader()["shift"]
    assert x.shape == (6, 2)
    assert y.is_floating_point()
