"""What people have is predicted like the tensors that it stands for; what can't be predicted is said in a sentence."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms

from brainet_pl import swap_head
from brainet_pl.backbones.batches import Sample
from brainet_pl.network import Linear
from brainet_pl.prediction import inputs
from brainet_pl.prediction.inputs import InputReader
from brainet_pl.serving.images import ImageSteps

PREPARE = transforms.Compose(
    [
        transforms.Resize(12),
        transforms.CenterCrop(12),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.25] * 3),
    ]
)


def picture(seed):
    """A small photograph: pixels (16, 20, 3), brighter for every other seed."""
    pixels = np.random.default_rng(seed).integers(0, 120, (16, 20, 3), dtype=np.uint8)
    return Image.fromarray(pixels + np.uint8(seed % 2 * 100))


class Photographs(Dataset):
    """Images with labels, prepared by a transform as torchvision's data sets are."""

    transform = PREPARE

    def __init__(self, seeds):
        self.seeds = list(seeds)

    def __len__(self):
        return len(self.seeds)

    def __getitem__(self, index):
        return PREPARE(picture(self.seeds[index])), self.seeds[index] % 2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    swapped = swap_head(net, Photographs(range(80)), held=Photographs(range(80, 140)), head=Linear(), progress=False)
    return swapped.fit(max_epochs=2, progress=False, scores=())


def answers(model, x):
    return model.predict(x)["probabilities"]


def test_everything_people_have_is_predicted_as_the_tensor_it_stands_for(model, tmp_path):
    images = [picture(seed) for seed in range(200, 206)]
    x = torch.stack([PREPARE(image) for image in images])
    expected = answers(model, x)
    assert expected.shape == (6, 2)
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    pixels = np.stack([np.asarray(image) for image in images])
    given = {
        "array": x.numpy(),
        "64 bits": x.numpy().astype(np.float64),
        "images": images,
        "paths": paths,
        "texts": [str(path) for path in paths],
        "pixels": pixels,
        "list of pixels": list(pixels),
        "channels first": pixels.transpose(0, 3, 1, 2),
        "list of tensors": list(x),
        "list of arrays": list(x.numpy()),
        "dataset": TensorDataset(x, torch.zeros(6)),
        "loader": DataLoader(TensorDataset(x), batch_size=4),
        "photographs": Photographs(range(200, 206)),
    }
    for name, one in given.items():
        torch.testing.assert_close(answers(model, one), expected, rtol=1e-3, atol=1e-4, msg=name)
    for name, one in {
        "tensor": x[0],
        "array": x[0].numpy(),
        "image": images[0],
        "path": paths[0],
        "pixels": pixels[0],
    }.items():
        torch.testing.assert_close(answers(model, one), expected[:1], rtol=1e-3, atol=1e-4, msg=name)


def test_many_inputs_are_predicted_batch_by_batch(model, monkeypatch):
    x = torch.stack([PREPARE(picture(seed)) for seed in range(30)])
    expected = model.predict(x)
    seen = []
    monkeypatch.setattr(inputs, "BATCH", 8)
    handle = model.backbone.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    found = model.predict(x)
    handle.remove()
    assert max(seen) == 8
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: x[:, :1],
            r"expected images of 3 channels, \(N, 3, 12, 12\), got \(4, 1, 12, 12\) with 1: repeat it",
        ),
        (lambda x: x[:, :2], r"expected images of 3 channels, .*got \(4, 2, 12, 12\): convert"),
        (lambda x: x[0, 0], r"expected images of 3 channels, .*got the shape \(12, 12\)"),
        (lambda x: x.permute(0, 2, 3, 1), "expected images with channels first"),
        (lambda x: x.byte(), r"expected float32 inputs, scaled as in training, got uint8: .*x.float\(\) / 255"),
        (lambda x: x[:0], "expected at least one input, got an empty batch"),
        (lambda x: [], "expected at least one input, got an empty list"),
        (lambda x: DataLoader([]), "expected at least one input, got an empty data set"),
        (lambda x: [x[0], x[0, :, :8]], "expected inputs of one shape"),
        (lambda x: np.array(["a"]), "expected an array of numbers, got <U1"),
        (lambda x: object(), "expected inputs as a tensor, an array, an image"),
        (lambda x: None, "expected inputs as a tensor, an array, an image"),
    ],
)
def test_what_can_not_be_predicted_is_said_in_a_sentence(model, make, message):
    with pytest.raises(ValueError, match=message):
        model.predict(make(torch.stack([PREPARE(picture(seed)) for seed in range(4)])))


def test_images_of_a_size_that_a_network_can_not_take():
    body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.rand(60, 3, 8, 8), torch.arange(60) % 2
    swapped = swap_head(body, (x, y), 2, layers=None, progress=False)
    with pytest.raises(ValueError, match=r"got a batch of shape \(2, 3, 9, 9\) .* as in training, \(N, 3, 8, 8\)"):
        swapped.predict(torch.rand(2, 3, 9, 9))


def test_a_path_without_a_file_and_images_without_steps():
    sample = {"": Sample((3, 12, 12), "float32")}
    with pytest.raises(FileNotFoundError, match=r"expected the path of an image, got nowhere\.png"):
        list(InputReader(sample, ImageSteps(12, 12)).batches("nowhere.png"))
    for image in (picture(0), "nowhere.png"):
        with pytest.raises(ValueError, match="does not know how its images were prepared"):
            list(InputReader(sample).batches(image))


def test_rows_grey_images_tokens_and_tables():
    row = InputReader({"": Sample((3,), "float32")})
    assert [batch.tolist() for batch in row.batches(torch.tensor([1, 2, 3]))] == [[[1.0, 2.0, 3.0]]]
    with pytest.raises(ValueError, match=r"expected rows of 3 columns, \(N, 3\), got the shape \(2, 4\)"):
        list(row.batches(torch.zeros(2, 4)))
    grey = InputReader({"": Sample((1, 5, 5), "float32")})
    for shape in ((5, 5), (1, 5, 5), (2, 5, 5), (2, 1, 5, 5)):
        (batch,) = grey.batches(torch.zeros(shape))
        assert batch.shape == (2 if shape[0] == 2 else 1, 1, 5, 5)
    tokens = InputReader({"": Sample((7,), "int64")})
    (batch,) = tokens.batches(torch.zeros(2, 9, dtype=torch.long))
    assert batch.shape == (2, 9)
    pandas = pytest.importorskip("pandas")
    (batch,) = row.batches(pandas.DataFrame({"a": [1, 2], "b": [0.5, 1], "c": [True, False]}))
    assert batch.tolist() == [[1.0, 0.5, 1.0], [2.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="got text or dates in b"):
        list(row.batches(pandas.DataFrame({"a": [1], "b": ["x"], "c": [2]})))
    named = InputReader({"a": Sample((2,), "float32"), "b": Sample((2,), "float32")})
    (batch,) = named.batches({"a": np.zeros((3, 2)), "b": torch.zeros(3, 2)})
    assert set(batch) == {"a", "b"}
