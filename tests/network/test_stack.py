"""Heads trained as one batched network, beside the same heads one by one."""

import pytest
import torch

from brainet_pl.network import Tree
from brainet_pl.network.stack import HeadStack
from brainet_pl.structure import learn_structure

MEMBERS, SAMPLES, OUTPUTS = 3, 32, 3


def untrained(s, columns, **settings):
    """Heads of one tree whose every weight counts, and features of each."""
    torch.manual_seed(0)
    x = torch.randn(400, columns).cumsum(1)
    x = x / x.std(0)
    tree = learn_structure(x, s=s, max_order=2, progress=False)
    heads = [Tree(**settings).build(columns, OUTPUTS, tree) for _ in range(MEMBERS)]
    for head in heads:
        torch.nn.init.normal_(head.output.weight)
        torch.nn.init.normal_(head.layers.bias)
        if head.skip is not None:
            torch.nn.init.normal_(head.skip.weight)
    return heads, x[torch.randint(0, 400, (MEMBERS, SAMPLES))]


# Branches of the root alone, of several levels, of fewer draws than branches, and fields as one product or many.
@pytest.mark.parametrize(
    ("s", "columns", "settings"),
    [((4, 1), 7, {}), ((2, 3), 6, {}), (2, 9, {"draws": 3}), ((4, 1), 200, {}), ((4, 1), 7, {"norm": None})],
)
def test_a_step_of_all_is_the_step_of_each(s, columns, settings):
    heads, x = untrained(s, columns, **settings)
    stack = HeadStack(heads).train()
    choices = stack.draw(SAMPLES)
    outputs = stack(x, choices)
    outputs.square().mean(dim=(0, 2, 3)).sum().backward()
    for number, head in enumerate(heads):
        alone = head.train().train_on(x[number], choices)
        alone = alone if alone.dim() == 3 else alone.unsqueeze(0)
        torch.testing.assert_close(outputs[:, number], alone, rtol=1e-4, atol=1e-4)
        alone.square().mean().backward()
        pairs = [
            (stack.weight.grad[number], head.layers.weight.grad[0]),
            (stack.bias.grad[number], head.layers.bias.grad),
            (stack.out_weight.grad[number], head.output.weight.grad),
            (stack.out_bias.grad[number], head.output.bias.grad),
        ]
        if head.skip is not None:
            pairs.append((stack.skip_weight.grad[number], head.skip.weight.grad))
        for together, by_itself in pairs:
            torch.testing.assert_close(together, by_itself, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("s", "columns", "count"), [((4, 1), 7, 8), ((2, 3), 6, 8), ((4, 2), 9, 5), ((4, 1), 200, 8)])
def test_heads_have_what_was_trained_and_say_the_same(s, columns, count):
    heads, x = untrained(s, columns)
    stack = HeadStack(heads).train()
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        stack(x, stack.draw(SAMPLES)).square().mean().backward()
        optimizer.step()
    values, weights = stack.eval().passes(x, count)
    stack.write()
    values = values.unflatten(1, (MEMBERS, SAMPLES)).detach()
    for number, head in enumerate(heads):
        tree = head.ggt
        if tree.num_subnetworks > count:
            alone = head.at(x[number], tree.sample(count, head.temperature, 0))
            assert weights is None
        else:
            alone, shares = head.passes(x[number], count)
            torch.testing.assert_close(weights, shares)
        torch.testing.assert_close(values[:, number], alone.detach(), rtol=1e-4, atol=1e-4)


def test_heads_of_other_wiring_or_with_dropout_are_refused():
    heads, _ = untrained((4, 1), 7)
    other, _ = untrained((4, 1), 8)
    with pytest.raises(ValueError, match="expected heads of one tree and equal settings, got several"):
        HeadStack([*heads, *other])
    dropped, _ = untrained((4, 1), 7, dropout=0.1)
    with pytest.raises(ValueError, match="expected heads without dropout"):
        HeadStack(dropped)
