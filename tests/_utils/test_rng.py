"""Random numbers that leave no trace."""

import torch

from brainet_pl._utils.rng import isolated_cpu_rng


def test_a_gpu_is_neither_woken_nor_seeded(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: seeded.append("read"))
    torch.default_generator.manual_seed(1)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(1)
    with isolated_cpu_rng(7):
        drawn = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert seeded == []
