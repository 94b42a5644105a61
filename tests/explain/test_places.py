"""Where an image is strange: parts that add up, a pasted patch that is found, and what is said without a map."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from brainet_pl import load_swapped, swap_head
from brainet_pl.backbones.taps import Tap
from brainet_pl.explain.places import as_map
from brainet_pl.scores.cells import CellDensity, StageMaps, coarse, rows_of
from brainet_pl.scores.density import TreeDensity
from brainet_pl.structure import learn_structure

SIDE = 24


def textures(count, seed):
    """Images of smooth noise in two classes, whose channels depend on each other."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    noise = F.avg_pool2d(torch.randn(count, 1, SIDE + 4, SIDE + 4, generator=draw), 5, 1)
    grain = 0.1 * torch.randn(count, 3, SIDE, SIDE, generator=draw)
    return 3 * noise * torch.tensor([1.0, 0.5, -0.5])[:, None, None] + grain + 0.5 * y[:, None, None, None], y


def network():
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)]
    second = [nn.Conv2d(8, 12, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        nn.Sequential(*first), nn.Sequential(*second), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 2)
    )


@pytest.fixture(scope="module")
def model():
    train, held = textures(240, 1), textures(200, 2)
    return swap_head(network(), train, held=held, progress=False).fit(max_epochs=3, progress=False)


def pasted(count=16):
    """Known images with a square of stripes in the upper left quarter."""
    x, _ = textures(count, 5)
    x[:, :, :7, :7] = 2.0 * (torch.arange(7) % 2)[:, None] - 1.0
    return x


def test_parts_of_channels_add_up_to_the_density_of_a_cell_as_a_slow_twin_has_it():
    cells = (
        torch.randn(900, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0)) @ torch.randn(5, 7).double()
    )
    cells = torch.cat([cells, torch.ones(900, 1)], dim=1)  # and a channel that never varies
    density = CellDensity().fit(cells)
    tree = learn_structure(
        (x := (cells - cells.mean(0)) / cells.std(0, correction=0).where(cells.std(0) > 1e-6, torch.tensor(1.0))),
        test="gaussian",
        threshold=6 / 900,
        bins=4,
        s=1,
        max_order=1,
        progress=False,
    )
    twin = TreeDensity(tree, 1, normalize=False, max_parents=16).double().fit(x, torch.zeros(900, dtype=torch.long))
    expected = torch.stack([-twin(row[None])[0, 0] for row in x[:40]])
    parts = density.parts(cells[:40])
    torch.testing.assert_close(parts.sum(dim=1).double(), expected, rtol=1e-3, atol=1e-2)
    maps = cells[:40].reshape(2, 4, 5, 8).permute(0, 3, 1, 2)
    torch.testing.assert_close(density(maps).flatten(), parts.sum(dim=1), rtol=1e-4, atol=1e-4)
    assert float(density.weight.count_nonzero()) > len(density.weight)  # channels have parents


def test_the_map_is_the_smoothed_sum_of_the_surprises_of_stages(model):
    score = next(part for part in model.scores if type(part).__name__ == "Stages")
    maps = [torch.randn(3, 8, SIDE, SIDE), torch.randn(3, 12, SIDE // 2, SIDE // 2)]
    found = score.maps(maps)
    first, second = (density.surprise(part) for density, part in zip(score.maps.stages, maps, strict=True))
    both = first + F.interpolate(second[:, None], size=(SIDE, SIDE), mode="bilinear")[:, 0]
    for row in range(0, SIDE, 7):
        for column in range(0, SIDE, 5):
            near = both[:, max(0, row - 1) : row + 2, max(0, column - 1) : column + 2]
            torch.testing.assert_close(found.surprise[:, row, column], near.mean(dim=(1, 2)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.stages.sum(dim=1), found.surprise.flatten(1).amax(dim=1))
    share = (1 + (score.maps.held[None] >= found.surprise[0].flatten()[:, None]).sum(1)) / (1 + len(score.maps.held))
    torch.testing.assert_close(found.p[0].flatten(), share)


def test_a_pasted_patch_is_where_the_map_is_strange(model):
    known, odd = model.explain(textures(60, 7)[0]), model.explain(pasted())
    place = odd.places.surprise.flatten(1).argmax(dim=1)
    inside = (place // SIDE < 8) & (place % SIDE < 8)
    assert float(inside.float().mean()) >= 0.9
    assert float(odd.places.anywhere_p.median()) < 0.1 < float(known.places.anywhere_p.median())
    assert sum("at the top left" in sentence for sentence in odd.sentences) >= 12
    assert all("calibration images" in sentence for sentence in odd.sentences)


def test_places_of_known_images_have_uniform_p_values(model):
    p = model.explain(textures(80, 8)[0]).places.p.flatten()
    for level in (0.1, 0.3, 0.6):
        assert abs(float((p <= level).float().mean()) - level) < 0.1  # 21 images were compared with


def test_the_prediction_and_the_parts_of_the_verdict_are_those_of_predict(model):
    x = pasted(8)
    found, expected = model.explain(x), model.predict(x)
    for name, values in expected.items():
        torch.testing.assert_close(found.prediction[name], values, rtol=0, atol=0)
    torch.testing.assert_close(sum(found.shares.values()), expected[found.score])
    assert found.resembled.numbers.shape == (8, 3)
    assert int(found.resembled.numbers.max()) < 240


def test_a_training_image_resembles_itself(model):
    x, _ = textures(240, 1)
    score = next(part for part in model.scores if type(part).__name__ == "Stages")
    numbers = model.scores.known.numbers[:20]
    assert score.maps.ready
    assert torch.equal(model.explain(x[numbers]).resembled.numbers[:, 0], numbers)


def test_a_file_keeps_it_and_pictures_have_the_size_of_the_images(model, tmp_path):
    model.save(tmp_path / "model.pt")
    again, x = load_swapped(tmp_path / "model.pt", network()), pasted(4)
    assert again.explain(x).sentences == model.explain(x).sentences
    pictures = again.explain(x).overlay(x)
    assert [picture.shape for picture in pictures] == [(SIDE, SIDE, 3)] * 4
    plain = model.explain(textures(4, 9)[0])
    assert float(plain.intensity().mean()) < float(again.explain(x).intensity().mean())


def test_images_of_another_size_and_smaller_than_the_grid_have_a_map(model):
    assert model.explain(torch.randn(2, 3, 40, 31)).places.surprise.shape == (2, 40, 31)
    tiny = model.explain(torch.randn(2, 3, 2, 2))
    assert tiny.places.surprise.shape == (2, 2, 2)
    assert len(tiny.sentences) == 2


def test_a_network_without_stages_has_a_sentence_and_no_picture():
    train = (torch.randn(200, 6, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2)
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    model = swap_head(body, train, progress=False).fit(max_epochs=2, progress=False)
    found = model.explain(train[0][:3])
    assert found.places is None
    assert found.overlay(train[0][:3]) is None
    assert "the network has no stages of maps" in found.sentences[0]


def test_few_images_have_a_sentence_and_no_picture():
    x, y = textures(100, 1)
    model = swap_head(network(), (x, y), held=textures(60, 2), progress=False).fit(max_epochs=2, progress=False)
    next(part for part in model.scores if type(part).__name__ == "Stages").maps.forget()
    found = model.explain(x[:2])
    assert found.places is None
    assert "too few images" in found.sentences[0]


def test_nan_is_the_strangest_and_has_a_sentence(model):
    x = pasted(2)
    x[0, :, 5] = math.nan
    found = model.explain(x)
    assert float(found.prediction["known_p"][0]) == 0
    assert len(found.sentences) == 2
    assert found.overlay(x)[0].shape == (SIDE, SIDE, 3)


def test_tokens_are_a_square_behind_the_one_for_the_class():
    tokens = torch.arange(10.0).repeat(2, 1)[:, :, None].expand(-1, -1, 4)
    found = as_map(tokens, Tap("block", "mean", (10, 4), -1))
    assert found.shape == (2, 4, 3, 3)
    assert found[0, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert rows_of(found).shape == (18, 4)


def test_large_maps_are_means_of_whole_squares():
    maps = torch.arange(128.0 * 96).reshape(1, 1, 128, 96)
    found = coarse(maps)
    assert found.shape == (1, 1, 64, 48)
    torch.testing.assert_close(found[0, 0, 3, 5], maps[0, 0, 6:8, 10:12].mean())


def test_maps_that_were_never_fitted_load_into_maps_that_were(model):
    score = next(part for part in model.scores if type(part).__name__ == "Stages")
    empty = StageMaps()
    empty.load_state_dict(score.maps.state_dict())
    assert empty.ready
    empty.load_state_dict(StageMaps().state_dict())
    assert not empty.ready
