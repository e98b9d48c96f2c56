"""What only a GPU can show: flash attention and the fused kernels against plain torch in float64."""

import pytest
import torch

from eagle3.training import ttt

pytestmark = pytest.mark.gpu
SPANS = [(0, 40, 200), (200, 260, 500), (500, 501, 700)]
FEW = 0.004  # of a vector: what rounding to bf16 once leaves is 0.0017


@pytest.fixture(scope="module")
def kernels():
    assert ttt._kernels(), "Triton does not work here"
    return ttt._kernels()


def random(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def compare(fused, plain, given, limit=FEW):
    """Compare outputs and gradients of two functions of bf16 tensors; the plain one gets them in float64."""
    torch.manual_seed(0)
    found, gradient = [], None
    for function, dtype in ((plain, torch.float64), (fused, None)):
        inputs = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in given]
        out = function(*inputs)
        gradient = random(*out.shape) if gradient is None else gradient
        out.backward(gradient.to(out.dtype))
        found.append([out.detach().double(), *(tensor.grad.double() for tensor in inputs)])
    for exact, other in zip(*found, strict=True):
        assert (exact - other).norm() / exact.norm() < limit


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (64, 64, 112), (40, 20, 128)])
@pytest.mark.parametrize("steps", [0, 2])
def test_flash_attention_gives_the_outputs_and_gradients_of_plain_attention(heads, kv_heads, size, steps):
    rows = sum(stop - first for _, first, stop in SPANS)
    shapes = [(rows, heads, size), *[(700, kv_heads, size)] * 2, *[(rows, kv_heads, size)] * (2 * steps)]
    given = [random(*shape) for shape in shapes]
    given[0] *= size**-0.5

    def attend(*inputs):
        return ttt.attend(*inputs[:3], list(zip(inputs[3::2], inputs[4::2], strict=True)), SPANS)

    compare(attend, attend, given, limit=0.01)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (1000, 576), (777, 7168)])
def test_norm(kernels, rows, hidden):
    def plain(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    weight = 1 + torch.rand(hidden, device="cuda") / 100  # float32, as it is trained
    compare(lambda x, weight: kernels.norm(x, weight, 1e-5), plain, [random(rows, hidden) * 3, weight])


@pytest.mark.parametrize(("heads", "size"), [(9, 64), (64, 112)])
def test_rotation(kernels, heads, size):
    angles = torch.rand(50, size // 2, device="cuda").repeat(1, 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    compare(lambda x: kernels.rotate(x, cos, sin, 0.3),
            lambda x: ttt._rotate(x, cos[:, None], sin[:, None], 0.3), [random(50, heads, size)])


@pytest.mark.parametrize("vocab", [512, 32000, 163840])
def test_divergence(kernels, vocab):
    targets, places = random(60, vocab) * 4, torch.arange(3, 43, device="cuda")

    def plain(logits):
        p = targets[places].double().softmax(-1)
        return torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)

    compare(lambda logits: kernels.divergence(logits, targets, places), plain, [random(40, vocab) * 4])


def test_fp8_states_decode_as_on_a_cpu():
    from eagle3.states import store

    encoded, scales = store.encode_fp8(random(30, 4, 128).cpu() * torch.logspace(-3, 3, 4)[:, None])
    stored = store.Stored(encoded, scales, torch.zeros(0))
    assert torch.equal(stored.states(torch.device("cuda")).cpu(), stored.states())


def test_a_step_has_the_loss_and_gradients_of_the_plain_forms(kernels, prepared, tiny_model, monkeypatch):
    """In float32 without the kernels against bf16 with them, on a drafter and states of the tests."""
    from support.trainers import trainer_of

    from eagle3.common.options import TrainSection
    from eagle3.training import trainer as training

    found = []
    for dtype in ("float32", "bfloat16"):
        processes = training.Processes(0, 1, torch.device("cuda", 0))
        options = TrainSection(batch_tokens=100, dtype=dtype)
        trainer, steps, _ = trainer_of(prepared, tiny_model, processes, options=options)
        trainer.model.cuda()
        batch = trainer.load_batch(steps[0][0])
        loss = trainer._losses(batch, last=True)
        loss.sum().backward()
        gradients = {name: p.grad.double() for name, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((loss.detach().double(), gradients))
    (exact, gradients), (other, theirs) = found
    assert torch.allclose(exact, other, rtol=0.01)
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() / gradient.norm() < 0.05, name
