"""Image files of strangers: the pixels are those of training; time and memory are bounded whatever the file says."""

import io
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image
from torchvision.transforms import InterpolationMode, v2

from brainet_pl.serving.images import FORMATS, MOST_PIXELS, ImageSteps, opened

ROOT = Path(__file__).parents[2]


def file_of(image, kind="PNG", **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def peak_of(function, *args):
    """Bytes at the most, and bytes that stay, while it runs."""
    tracemalloc.start()
    try:
        function(*args)
        stay, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return most, stay


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    side=st.integers(1, 40) | st.tuples(st.integers(1, 40), st.integers(1, 40)),
    crop=st.integers(1, 50),
    how=st.sampled_from(["nearest", "bilinear", "bicubic"]),
    seed=st.integers(0, 99),
)
def test_the_middle_alone_has_the_pixels_of_training(width, height, side, crop, how, seed):
    """torchvision makes the whole image and cuts it; here only what is kept is computed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = v2.Resize(side, InterpolationMode(how), antialias=True)(torch.tensor(pixels).permute(2, 0, 1))
    expected = v2.functional.to_dtype(v2.CenterCrop(crop)(expected), torch.float32, scale=True)
    found = ImageSteps(side, crop, interpolation=how)(file_of(Image.fromarray(pixels)))
    np.testing.assert_array_equal(np.rint(255 * found), np.rint(255 * expected.numpy()))


@pytest.mark.parametrize("size", [(500, 1), (1, 500)])
def test_a_thin_image_costs_no_more_than_its_middle(size):
    pixels = np.random.default_rng(0).integers(0, 256, size[::-1], dtype=np.uint8)
    file, steps = file_of(Image.fromarray(pixels)), ImageSteps(224, 224, channels=1)
    most, stay = peak_of(steps, file)
    assert most < 30e6  # it was 430 MB, most of which stayed
    assert stay < 1e6
    expected = v2.CenterCrop(224)(v2.Resize(224, antialias=True)(torch.tensor(pixels)[None]))
    np.testing.assert_array_equal(np.rint(255 * steps(file)), expected.numpy())


def test_an_image_too_thin_or_too_long_is_refused_before_it_is_resized():
    steps = ImageSteps(224, 224)
    for size in ((65_535, 1), (1, 65_535), (1, 1_200)):
        with pytest.raises(ValueError, match=r"once its shorter side has 224, got one of .* which is too thin: cut it"):
            steps(file_of(Image.new("L", size)))
    with pytest.raises(ValueError, match="65,535 a side, got 70000 × 1: make it smaller"):
        ImageSteps((8, 8), 8)(file_of(Image.new("L", (70_000, 1))))


def test_photographs_of_many_sizes_leave_nothing_behind():
    steps = ImageSteps(64, 64)
    files = [file_of(Image.new("RGB", (900 + 7 * i, 700)), "JPEG") for i in range(12)]
    steps(files[0])
    _, stay = peak_of(lambda: [steps(file).sum() for file in files])
    assert stay < 200_000  # weights of 460 KB for each width used to


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_that_are_taken(kind):
    assert opened(file_of(Image.new("RGB", (5, 3)), kind)).size == (5, 3)


def test_no_decoder_that_starts_programs_is_tried(monkeypatch):
    def started(*args, **more):
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    for file in (postscript, file_of(Image.new("RGB", (5, 3)), "PPM"), file_of(Image.new("RGB", (16, 16)), "ICO")):
        with pytest.raises(ValueError, match=r"expected an image \(JPEG, PNG, .*\(of another format\): send another"):
            ImageSteps(4, 4)(file)


def test_a_decoder_may_fail_in_any_way(monkeypatch):
    """Pillow's decoders end hostile files with errors of many kinds: each is an image that can't be read."""
    file = file_of(Image.new("RGB", (5, 3)))

    def broken(self):
        raise KeyError(3)

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load_prepare", broken)
    with pytest.raises(ValueError, match="got bytes that can't be read as one"):
        ImageSteps(4, 4)(file)


def test_webp_may_be_half_as_large():
    """Its decoder holds twice the bytes for each pixel."""
    with pytest.raises(ValueError, match="at most 25,000,000 pixels"):
        opened(file_of(Image.new("L", (5_100, 5_000)), "WEBP", lossless=True, method=0))


PEAK = """
import resource, sys
from PIL import Image
from brainet_pl.serving.images import ImageSteps
Image.init()
file = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ImageSteps(256, 224)(file)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of the peak is another elsewhere")
@pytest.mark.parametrize("mode", ["P", "RGBA"])
def test_fifty_megapixels_in_a_small_file(tmp_path, mode):
    """All in one colour they are a small file; decoded they were 1.8 GB."""
    assert MOST_PIXELS >= 8_160 * 6_120
    Image.new(mode, (8_160, 6_120)).save(tmp_path / "large.png")
    assert (tmp_path / "large.png").stat().st_size < 300_000
    words = [sys.executable, "-c", PEAK, str(tmp_path / "large.png")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert int(done.stdout) < 450_000  # kilobytes
