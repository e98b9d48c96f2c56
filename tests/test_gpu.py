"""What only a GPU can show: flash attention with merged diagonals against plain attention in float64."""

import pytest
import torch

from eagle3 import ttt

pytestmark = pytest.mark.gpu
SPANS = [(0, 40, 200), (200, 260, 500), (500, 501, 700)]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (64, 64, 128)])
@pytest.mark.parametrize("steps", [0, 2])
def test_flash_attention_gives_the_outputs_and_gradients_of_plain_attention(heads, kv_heads, size, steps):
    torch.manual_seed(0)
    rows = sum(stop - first for _, first, stop in SPANS)
    shapes = [(rows, heads, size), *[(700, kv_heads, size)] * 2, *[(rows, kv_heads, size)] * (2 * steps)]
    given = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    given[0] *= size**-0.5
    gradient = torch.randn(rows, heads, size, device="cuda").bfloat16()
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in given]
        out = ttt.attend(*inputs[:3], list(zip(inputs[3::2], inputs[4::2], strict=True)), SPANS)
        out.backward(gradient.to(dtype))
        found.append([out.detach().double(), *(tensor.grad.double() for tensor in inputs)])
    for exact, flash in zip(*found, strict=True):
        assert (exact - flash).norm() / exact.norm() < 0.01
