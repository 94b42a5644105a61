"""What a data set tells: names of its classes, and how its images are prepared."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torchvision import models, transforms
from torchvision.transforms import InterpolationMode, v2

from brainet_pl.prediction.transforms import class_names_of, image_steps_of, read_transform
from brainet_pl.serving.images import ImageSteps

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOAT = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]


class Pictures(Dataset):
    def __init__(self, classes, transform=None, target_transform=None):
        self.classes, self.transform, self.target_transform = classes, transform, target_transform

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.rand(3, 8, 8), i % 2


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (models.ResNet18_Weights.DEFAULT.transforms(), ImageSteps(256, 224, MEAN, STD)),
        (models.EfficientNet_B0_Weights.DEFAULT.transforms(), ImageSteps(256, 224, MEAN, STD, "bicubic")),
        (transforms.Compose([transforms.Resize((32, 32)), *FLOAT]), ImageSteps((32, 32), 32, MEAN, STD)),
        (
            v2.Compose([v2.ToImage(), v2.Resize(40), v2.CenterCrop(32), v2.ToDtype(torch.float32, scale=True)]),
            ImageSteps(40, 32),
        ),
        (
            transforms.Compose([transforms.Grayscale(), transforms.Resize((28, 28)), transforms.ToTensor()]),
            ImageSteps((28, 28), 28, channels=1),
        ),
    ],
)
def test_transforms_that_are_read(transform, expected):
    state = torch.get_rng_state()
    assert read_transform(transform) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "transform",
    [
        transforms.Compose([transforms.RandomResizedCrop(32), *FLOAT]),
        transforms.Compose([transforms.Resize((32, 32)), transforms.RandomHorizontalFlip(), *FLOAT]),
        transforms.Compose([transforms.Resize((32, 32)), *FLOAT, lambda x: x.flip(0)]),
        transforms.Compose([transforms.Resize((32, 32)), *FLOAT, lambda x: 1 / 0]),
        transforms.Compose([transforms.Resize((32, 48)), *FLOAT]),
        transforms.Compose([transforms.Resize((32, 32), InterpolationMode.NEAREST), *FLOAT]),
        v2.Compose([v2.ToImage(), v2.Resize((32, 32), antialias=False), v2.ToDtype(torch.float32, scale=True)]),
        transforms.ToTensor(),
        np.asarray,
    ],
)
def test_transforms_that_do_something_else_are_not(transform):
    assert read_transform(transform) is None


def test_both_sides_are_resized_as_torchvision_does():
    image = torch.randint(0, 256, (3, 30, 50), dtype=torch.uint8)
    steps = ImageSteps((24, 16), 16)
    from brainet_pl.serving.images import resized

    expected = v2.Resize((24, 16), antialias=True)(image).numpy()
    np.testing.assert_array_equal(resized(image.numpy(), steps.resize, "bilinear"), expected)


def test_names_and_steps_of_data_sets_and_their_loaders():
    steps = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    data = Pictures(["cat", "dog"], steps)
    for one in (data, Subset(data, [0, 1]), DataLoader(Subset(Subset(data, [0, 1, 2]), [1, 2]))):
        assert class_names_of(one, 2) == ("cat", "dog")
        assert image_steps_of(one) == ImageSteps((8, 8), 8)
    assert class_names_of(data, 3) is None  # of other classes
    assert class_names_of(Pictures([0, 1]), 2) is None
    assert class_names_of(Pictures(["cat", "cat"]), 2) is None
    assert class_names_of(Pictures(["cat", "dog"], target_transform=lambda y: 1 - y), 2) is None
    mixes = DataLoader(data, collate_fn=lambda samples: default_collate(samples[::-1]))
    assert class_names_of(mixes, 2) is None
    assert image_steps_of(mixes) is None
    assert image_steps_of(Pictures(["cat", "dog"])) is None
    assert class_names_of((torch.rand(2, 3), torch.tensor([0, 1])), 2) is None
