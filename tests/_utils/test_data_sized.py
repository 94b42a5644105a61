"""Buffers that take the shape of what is loaded, and keep 32 bits."""

import pytest
import torch

from brainet_pl._utils.data_sized import DataSizedBuffers


class Bank(DataSizedBuffers):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.empty(0))
        self.stored = None

    def before_load(self, stored):
        self.stored = set(stored)


class Optional(Bank):
    may_be_missing = True


def filled():
    bank = Bank()
    bank.rows = torch.arange(6.0).view(2, 3)
    return bank


def test_shapes_come_from_what_is_loaded():
    again = Bank()
    again.load_state_dict(filled().state_dict())
    assert torch.equal(again.rows, filled().rows)
    assert again.stored == {"rows"}


def test_what_was_made_in_inference_mode_can_be_loaded_into():
    again = Bank()
    with torch.inference_mode():
        again.rows = torch.zeros(2, 3)
    again.load_state_dict(filled().state_dict())
    assert torch.equal(again.rows, filled().rows)


def test_32_bits_stay_and_64_are_taken():
    assert filled().half().rows.dtype == filled().bfloat16().rows.dtype == torch.float32
    assert filled().double().rows.dtype == torch.float64


def test_only_an_optional_module_may_be_missing():
    both = torch.nn.ModuleDict({"bank": Optional()})
    both.load_state_dict({})
    assert both["bank"].stored == set()
    with pytest.raises(RuntimeError, match=r"Missing key.*bank\.rows"):
        torch.nn.ModuleDict({"bank": Bank()}).load_state_dict({})
