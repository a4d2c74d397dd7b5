"""The packed linear equals torch's, follows the weight, and stays out of where it does not belong."""

from __future__ import annotations

import pytest
import torch

from fastcollab.linear import FEWEST, MOST, SMALLEST, SkinnyLinear, is_packable

torch.manual_seed(0)
LAYER = torch.nn.Linear(130, 8193)  # odd widths, just above SMALLEST
pytestmark = pytest.mark.skipif(not is_packable(LAYER.weight), reason="this torch has no packed oneDNN linear")


def exact(layer, x):
    return (x.double() @ layer.weight.double().T + layer.bias.double()).detach()


@pytest.mark.parametrize("rows", [0, 1, FEWEST, 5, 13, MOST, MOST + 1])
def test_equals_torch_within_its_own_error(rows):
    x = torch.randn(rows, 130)
    with torch.inference_mode():
        got, plain = SkinnyLinear(LAYER)(x), torch.nn.functional.linear(x, LAYER.weight, LAYER.bias)
    want = exact(LAYER, x)
    assert got.shape == plain.shape
    if rows:
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-6
        assert torch.equal(got, plain) or FEWEST <= rows <= MOST


def test_follows_every_change_of_the_weight():
    layer = torch.nn.Linear(130, 8193)
    skinny, x = SkinnyLinear(layer), torch.randn(4, 130)

    def gap(version=0):
        with torch.inference_mode():
            return (skinny(x, version) - exact(layer, x)).abs().max()

    assert gap() < 1e-4
    with torch.no_grad():
        layer.weight.mul_(2)  # counted by torch
    assert gap() < 1e-4
    layer.weight.data = layer.weight.data * 3  # another tensor
    assert gap() < 1e-4
    layer.weight.data.copy_(layer.weight.data * 2)  # counted by nobody: the version says it
    assert gap(version=0) > 1e-2 and gap(version=1) < 1e-4


def test_only_large_fp32_weights_on_a_cpu():
    assert not is_packable(torch.zeros(SMALLEST - 1))
    assert not is_packable(torch.zeros(SMALLEST, dtype=torch.bfloat16))
    assert not is_packable(torch.zeros(SMALLEST, device="meta"))
