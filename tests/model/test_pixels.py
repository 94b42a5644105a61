"""A head for every pixel: maps are what the model of single cells says, folded back; bad masks are told."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from brainet_pl import ExportedModel, export_folder, load_pixels, swap_pixels
from brainet_pl.backbones.maps import FeatureMaps
from brainet_pl.metrics.pixels import PixelSums

SIZE, VOID = (24, 32), 255


def scenes(count, seed):
    """Noisy squares of three classes, whose first rows are void."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count, 3, 4), generator=draw).repeat_interleave(8, 1).repeat_interleave(8, 2)
    x = F.one_hot(y, 3).permute(0, 3, 1, 2).float() + torch.randn(count, 3, *SIZE, generator=draw)
    y[:, :2] = VOID
    return x, y


def classifier():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
    deep = [nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, *deep, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class Segmenter(nn.Module):
    """Ends as those of torchvision do: a 1×1 convolution whose output is resized, and another one beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(0.5))
        self.classifier, self.aux = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        maps = self.body(x)
        both = {"out": self.classifier(maps), "aux": self.aux(maps)}
        return {name: F.interpolate(one, x.shape[2:], mode="bilinear") for name, one in both.items()}


def fitted(network, **settings):
    return swap_pixels(network, scenes(24, 1), progress=False, **settings).fit(
        pixels=2400, max_epochs=4, progress=False
    )


@pytest.fixture(scope="module")
def model():
    return fitted(classifier())


def test_features_are_maps_of_the_stages_side_by_side():
    network, x = classifier(), scenes(2, 2)[0]
    maps = FeatureMaps(network)
    found = maps(x)
    network.eval()
    first, second = network[:6](x), network[:10](x)
    expected = [F.interpolate(one, (6, 8), mode="bilinear") for one in (first, second)]
    assert [layer.name for layer in maps.read] == ["4", "9"]
    torch.testing.assert_close(found[:, 6:], expected[1])
    assert found.shape == (2, 14, 6, 8)


def test_the_last_convolution_of_a_network_for_segmentation_is_found_and_gives_its_logits():
    network, x = Segmenter().eval(), scenes(2, 2)[0]
    maps = FeatureMaps(network)
    cells = maps(x)
    assert (maps.classifier, tuple(cells.shape)) == ("classifier", (2, 8, 12, 16))
    logits = maps.row_network()(cells.movedim(1, -1).flatten(0, 2)).view(2, 12, 16, 3).movedim(-1, 1)
    torch.testing.assert_close(F.interpolate(logits, SIZE, mode="bilinear"), network(x)["out"])


def test_maps_are_the_answers_to_single_cells(model):
    """The slow twin: every cell by itself, and each pixel between four of them."""
    x = scenes(1, 3)[0]
    cells = model.maps(x)[0]
    rows = torch.stack([cells[:, i, j] for i in range(6) for j in range(8)])
    alone = torch.cat([model.rows.predict(row[None])["probabilities"] for row in rows])
    grid, found = alone.reshape(6, 8, 3), model.predict(x)
    for i, j in ((0, 0), (5, 9), (11, 30), (23, 31)):
        top, left = max((i + 0.5) / 4 - 0.5, 0), max((j + 0.5) / 4 - 0.5, 0)
        a, b = int(top), int(left)
        down, right = top - a, left - b
        corners = [grid[min(a + p, 5), min(b + q, 7)] for p in (0, 1) for q in (0, 1)]
        weights = [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
        expected = sum(weight * corner for weight, corner in zip(weights, corners, strict=True))
        torch.testing.assert_close(found["probabilities"][0, :, i, j], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found["class"], found["probabilities"].argmax(dim=1))
    p = found["probabilities"]
    torch.testing.assert_close(found["entropy"], -torch.special.xlogy(p, p).sum(dim=1), rtol=1e-4, atol=1e-5)


def test_answers_do_not_depend_on_chunks_batches_or_modes(model, monkeypatch):
    x = scenes(5, 3)[0]
    expected = model.predict(x)
    model.train()
    monkeypatch.setattr("brainet_pl.swap.pixels.CELLS", 1000)
    monkeypatch.setattr("brainet_pl.swap.pixels.ROWS", 7)
    found = model.predict(DataLoader(TensorDataset(x), 2))
    assert model.rows.training
    model.eval()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-4)


def test_memory_is_bounded_by_chunks_of_cells(model, monkeypatch):
    monkeypatch.setattr("brainet_pl.swap.pixels.ROWS", 50)
    seen, passes = [], model.rows.passes
    monkeypatch.setattr(model.rows, "passes", lambda part: seen.append(len(part)) or passes(part))
    model.predict(torch.rand(3, 3, 100, 100))
    assert max(seen) == 50
    assert sum(seen) == 3 * 25 * 25


def test_a_fit_learns_the_scenes_and_a_file_keeps_every_bit(model, tmp_path):
    x, y = scenes(8, 4)
    found = model.evaluate((x, y))
    assert found["accuracy"] > 0.8
    assert found["NLL"] < 0.7
    model.save(tmp_path / "model.pt")
    again = load_pixels(tmp_path / "model.pt", classifier())
    for name, values in model.predict(x).items():
        assert torch.equal(again.predict(x)[name], values), name
    with pytest.raises(ValueError, match="expected a network of the class Sequential, got Segmenter"):
        load_pixels(tmp_path / "model.pt", Segmenter())


def test_whole_images_are_held_out():
    model = swap_pixels(classifier(), progress=False)
    cells = model.sample_cells([scenes(10, 1)], "train", 300, 0)
    assert torch.bincount(cells.image).tolist() == [30] * 10
    assert not (cells.labels == VOID).any()
    some = cells.of(torch.tensor([3, 5]))
    assert set(some.image.tolist()) == {3, 5}


def test_measures_are_those_of_all_pixels_at_once():
    draw = torch.Generator().manual_seed(0)
    sums = PixelSums(4, VOID, unknown=(9,))
    probs, masks, odds = [], [], []
    for _ in range(3):
        p = torch.rand(4, 5, 7, generator=draw).softmax(dim=0)
        odd = torch.rand(5, 7, generator=draw) < 0.2
        mask = torch.randint(0, 3, (5, 7), generator=draw).masked_fill(odd, VOID)
        mask[0] = VOID
        answer = {"probabilities": p, "entropy": -(p * p.log()).sum(dim=0), "known_p": p[0]}
        sums.update(answer, mask, odd)
        probs.append(p.flatten(1).t()), masks.append(mask.flatten()), odds.append(odd.flatten())
    p, mask, odd = torch.cat(probs).numpy(), torch.cat(masks).numpy(), torch.cat(odds).numpy()
    known, found = mask != VOID, sums.compute()
    label, target = p.argmax(axis=1)[known], mask[known]
    iou = []
    for c in range(4):
        both, either = ((label == c) & (target == c)).sum(), ((label == c) | (target == c)).sum()
        iou.append(both / either if either else math.nan)
    assert found["mIoU"] == pytest.approx(np.nanmean(iou))
    assert found["accuracy"] == pytest.approx((label == target).mean())
    assert found["NLL"] == pytest.approx(-np.log(p[known][np.arange(len(target)), target]).mean(), rel=1e-5)
    counted = known | odd
    entropy = -(p * np.log(p)).sum(axis=1)
    assert found["entropy/AUROC"] == pytest.approx(roc_auc_score(odd[counted], entropy[counted]), rel=1e-5)
    assert found["unlike/AUROC"] == pytest.approx(roc_auc_score(odd[counted], -p[counted, 0]), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y[:, ::2, ::2], r"a class for each pixel of the images, \(8, 24, 32\), got the shape \(8, 12, 16\)"),
        (lambda y: y.float(), "whole numbers of classes, got torch.float32: give masks.long()"),
        (lambda y: y == 1, "whole numbers of classes, got torch.bool"),
        (lambda y: y.masked_fill(y == 2, 7), "expected classes from 0 to 2 and 255 for void .* got 7: renumber"),
        (lambda y: y.masked_fill(y == 2, -1), "got -1"),
        (lambda y: torch.full_like(y, VOID), "got 8 masks that are void \\(255\\) alone"),
        (lambda y: y.masked_fill(y == 2, VOID), "none of 2"),
    ],
)
def test_masks_that_are_wrong_are_refused(change, message):
    x, y = scenes(8, 1)
    with pytest.raises(ValueError, match=message):
        swap_pixels(classifier(), (x, change(y)), 3, progress=False).fit(pixels=400, progress=False)


def test_images_that_are_void_are_told_of_and_images_of_8_bits_refused():
    x, y = scenes(8, 1)
    y[2] = VOID
    with pytest.warns(UserWarning, match="left out 1 of 8 images of train: all of their pixels are void"):
        swap_pixels(classifier(), progress=False).sample_cells([(x, y)], "train", 300, 0)
    with pytest.raises(ValueError, match=r"expected images of real numbers.*got torch.uint8"):
        swap_pixels(classifier(), ((x * 99).byte(), y), progress=False).fit(progress=False)
    with pytest.raises(ValueError, match="expected a fitted model"):
        swap_pixels(classifier()).predict(x)


def test_pixels_of_unknown_objects_count_in_detection_alone(model):
    x, y = scenes(6, 5)
    odd = y.masked_fill(y == 2, 9)
    found = model.evaluate((x, odd), unknown=[9])
    assert found["pixels"] == float(((y != VOID) & (y != 2)).sum())
    assert 0 <= found["entropy/AUROC"] <= 1
    with pytest.raises(ValueError, match=r"unknown objects \[9\]"):
        model.evaluate((x, y), unknown=[9])


def test_a_page_and_a_picture_are_written(model, tmp_path):
    x, y = scenes(4, 6)
    model.report(tmp_path / "page.html", (x, y))
    model.report(tmp_path / "page.png", (x, y), images=2)
    assert "mIoU" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
def test_the_exported_model_and_its_server_give_maps(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from fastapi.testclient import TestClient

    from brainet_pl.serving.app import make_app

    model, x = fitted(Segmenter()), scenes(3, 7)[0]
    exported = ExportedModel(export_folder(model, tmp_path / "model", class_names=["road", "sky", "tree"]))
    expected = model.predict(x)
    found = exported.predict(x.numpy())
    for name, values in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), values, rtol=1e-3, atol=1e-3, check_dtype=False)
    client = TestClient(make_app(exported), base_url="http://localhost")
    answer = client.post("/predict", json={"inputs": x.tolist()})
    assert answer.status_code == 200, answer.text
    first = json.loads(answer.text)["answers"][0]
    assert first["class"] == expected["class"][0].tolist()
    np.testing.assert_allclose(first["probabilities"]["sky"], expected["probabilities"][0, 1], atol=1e-3)
    assert np.shape(first["scores"]["entropy"]) == SIZE
    schema = client.get("/openapi.json").json()["components"]["schemas"]["Answers"]
    pytest.importorskip("jsonschema").validate(answer.json(), schema)
    assert client.get("/drift").json() == {"watched": False}
