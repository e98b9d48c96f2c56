"""What only a GPU can show: flash attention and the fused forms against plain torch in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

from eagle3.training import attention, ttt

pytestmark = pytest.mark.gpu
SPANS = [(0, 40, 200), (200, 260, 500), (500, 501, 700)]
FEW = 0.004  # of a vector: what rounding to bf16 once leaves is 0.0017


@pytest.fixture(scope="module")
def products(fused):
    from eagle3.training import products

    return products


@pytest.fixture(scope="module")
def fused():
    assert ttt._kernels(), "Triton does not work here"
    return ttt._kernels()


def random(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def compare(fused, plain, given, limit=FEW):
    """Compare outputs and gradients of two functions of bf16 tensors; the plain one gets them in float64."""
    torch.manual_seed(0)
    found, gradients = [], None
    for function, dtype in ((plain, torch.float64), (fused, None)):
        inputs = [tensor.to(dtype or tensor.dtype).clone().requires_grad_() for tensor in given]
        outs = function(*(tensor * 1 for tensor in inputs))  # what is worked on in place is no leaf
        outs = outs if isinstance(outs, tuple) else (outs,)
        gradients = gradients or [random(*out.shape) for out in outs]
        kept = [out.detach().double().clone() for out in outs]
        torch.autograd.backward(outs, [gradient.to(out.dtype) for gradient, out in zip(gradients, outs, strict=True)])
        found.append([*kept, *(tensor.grad.double() for tensor in inputs)])
    for exact, other in zip(*found, strict=True):
        assert (exact - other).norm() / exact.norm() < limit


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (64, 64, 112), (40, 20, 128)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_flash_attention_has_outputs_and_gradients_of_plain_attention(fused, heads, kv_heads, size, steps, triton):
    rows = sum(stop - first for _, first, stop in SPANS)
    shapes = [(rows, heads, size), *[(700, kv_heads, size)] * 2, *[(rows, kv_heads, size)] * (2 * steps)]
    given = [random(*shape) for shape in shapes]
    given[0] *= size**-0.5
    layout = attention.Layout.of(SPANS, torch.device("cuda"))

    def plain(*inputs):
        return ttt.attend(*inputs[:3], list(zip(inputs[3::2], inputs[4::2], strict=True)), SPANS)

    def flash(query, keys, values, *drafted):
        return attention.flash(query, keys[layout.tokens], values[layout.tokens],
                               list(zip(drafted[::2], drafted[1::2], strict=True)), layout,
                               fused.attention_kernels if triton else None)

    compare(flash, plain, given, limit=0.01)


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def module(weight):
    return SimpleNamespace(weight=weight, variance_epsilon=1e-5)


def weights(hidden):
    return 1 + torch.rand(hidden, device="cuda") / 100  # float32, as they are trained


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (1000, 576), (777, 7168)])
def test_norm(fused, rows, hidden):
    x, weight = random(rows, hidden) * 3, weights(hidden)
    exact = rms(x.double(), weight.double())
    assert (fused.norm(x, module(weight)) - exact).norm() / exact.norm() < FEW


@pytest.mark.parametrize("judged", [None, [0, 3, 4, 9]])
@pytest.mark.parametrize("hidden", [128, 7168])
def test_a_sum_and_its_norm(fused, hidden, judged):
    rows = None if judged is None else torch.tensor(judged, device="cuda")

    def plain(residual, delta, weight):
        total = residual + delta
        return total, rms(total if rows is None else total[rows], weight)

    compare(lambda residual, delta, weight: tuple(fused._add_norm(
        residual, delta, module(weight), random(len(rows) if judged else 11, hidden), rows=rows,
        gives=lambda: random(11, hidden))), plain,
            [random(11, hidden), random(11, hidden), weights(hidden)], limit=0.006)  # the sum is rounded first


def test_a_norm_beside_the_residual(fused):
    def plain(hidden, weight):
        return rms(hidden, weight), hidden * 1

    compare(lambda hidden, weight: tuple(fused._norm(hidden, module(weight), random(300, 576))), plain,
            [random(300, 576), weights(576)])


@pytest.mark.parametrize(("heads", "size"), [(9, 64), (64, 112)])
def test_what_a_layer_reads_at_each_step(products, heads, size):
    """Embeddings of the rows further on beside hidden states, in heads, under RoPE; what rows past the end read, and
    their gradient, is left out."""
    angles = torch.rand(50, size // 2, device="cuda").repeat(1, 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    table, ids, steps, scales = random(90, 64), torch.randint(90, (50,), device="cuda"), 3, (0.3, 1.0, None)

    def plain(hidden, norm, *weights):
        normed, outs = rms(table[ids].to(hidden.dtype), norm), []
        for step in range(steps):
            inputs = torch.cat([normed[step:], hidden[step * 50 : (step + 1) * 50 - step]], 1)
            parts = [(inputs @ weight.T).unflatten(1, (-1, size)) for weight in weights]
            at = slice(0, 50 - step)
            outs += [part if scale is None else ttt._rotate(part, cos[at, None], sin[at, None], scale)
                     for part, scale in zip(parts, scales, strict=True)]
        return tuple(outs)

    def ours(hidden, norm, *weights):
        model = SimpleNamespace(layers=[SimpleNamespace(input_layernorm=module(norm))],
                                embed_tokens=SimpleNamespace(weight=table))
        modules = [module(weight) for weight in weights]
        reader = products.Reader(modules, products.in_half(*weights), [50] * steps, model, ids)
        outs = [part[: 50 - step] for step in range(steps)
                for part in reader.heads(hidden[step * 50 : (step + 1) * 50], step, (cos, sin), scales)]
        return tuple(outs)

    compare(ours, plain, [random(150, 64), weights(64), *(random(heads * size, 128) for _ in range(3))], limit=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_product_is_that_of_all_its_steps(products, dtype):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(random(size, 32).to(dtype)) for size in (48, 16)]
    inputs, gradients = [random(rows, 32) for rows in (20, 7)], [random(rows, 64) for rows in (20, 7)]
    for number in range(2):  # a second batch adds to the gradient
        product = products.Product([module(weight) for weight in weights], [20, 7])
        outs = [product(x.requires_grad_(), step, in_place=bool(number)) for step, x in enumerate(inputs)]
        assert all(torch.allclose(out, x @ torch.cat(weights).bfloat16().T, rtol=0.01, atol=0.01)
                   for out, x in zip(outs, inputs, strict=True))
        torch.autograd.backward(outs, gradients)
    exact = sum(2 * given.double().T @ x.detach().double() for given, x in zip(gradients, inputs, strict=True))
    found = torch.cat([weight.grad for weight in weights])
    assert found.dtype == dtype and (found - exact).norm() / exact.norm() < FEW
    for given, x in zip(gradients, inputs, strict=True):
        expected = 2 * given.double() @ torch.cat(weights).double()
        assert (x.grad - expected).norm() / expected.norm() < 2 * FEW


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (300, 576), (77, 36864)])
def test_rows_in_float8_are_those_of_a_cpu(products, rows, columns):
    from eagle3.training import float8

    x = torch.cat([random(rows, columns) * torch.logspace(-3, 3, rows, device="cuda")[:, None].bfloat16(),
                   torch.zeros(1, columns, device="cuda").bfloat16()])
    both = torch.cat([x, x], 1)[:, columns:]  # rows that do not lie one behind the other
    (found, scales), (expected, theirs) = float8.by_rows(both), float8.by_rows(x.cpu())
    assert torch.allclose(scales.cpu(), theirs, rtol=1e-6)
    same = found.cpu().view(torch.uint8) == expected.view(torch.uint8)
    assert same.float().mean() > 0.999  # a quotient between two values may be rounded to either
    for value in (math.nan, math.inf):
        x[0, 3] = value
        assert float8.by_rows(x)[0][0].float().isnan().any() and not float8.by_rows(x)[0][1:].float().isnan().any()


def test_products_in_float8_and_their_gradients(products):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, 128, device="cuda")) for size in (96, 160)]
    x = random(70, 128).requires_grad_()
    for in_place in (False, True):
        product = products.Product([module(weight) for weight in weights], [70], fp8=True)
        out, given = product(x, 0, in_place=in_place), random(70, 256)
        exact, kept = x.detach().double() @ torch.cat(weights).double().T, out.detach().double().clone()
        assert (kept - exact).norm() / exact.norm() < 0.05
        x.grad = None
        out.backward(given)
        exact = given.double() @ torch.cat(weights).detach().double()
        assert (x.grad - exact).norm() / exact.norm() < 0.05
    assert all(weight.grad.dtype == torch.float32 for weight in weights)


@pytest.mark.parametrize("width", [96, 18432])
def test_swiglu(fused, width):
    def plain(x):
        gate, up = x.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    compare(lambda x: fused._SwiGLU.apply(x, random(77, width)), plain, [random(77, 2 * width)])


@pytest.mark.parametrize("vocab", [512, 32000, 163840])
def test_divergence(fused, vocab):
    targets, places = random(60, vocab) * 4, torch.arange(3, 43, device="cuda")

    def plain(logits):
        p = targets[places].double().softmax(-1)
        return torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)

    compare(lambda logits: fused.divergence(logits, targets, places), plain, [random(40, vocab) * 4])


def test_a_copy_in_bf16_follows_its_weights(products):
    first, second = (torch.nn.Parameter(torch.randn(8, 16, device="cuda")) for _ in range(2))
    assert torch.equal(products.in_half(first, second), torch.cat([first, second]).bfloat16())
    with torch.no_grad():
        second.mul_(2)
    assert products.copy_of(second) is None and products.copy_of(first) is not None
    assert torch.equal(products.in_half(first, second), torch.cat([first, second]).bfloat16())


def test_adamw_is_torchs_and_skips_what_is_not_finite_or_a_spike(products):
    from eagle3.common.options import TrainSection
    from eagle3.training.optimizer import make_optimizer

    torch.manual_seed(0)
    start = [torch.randn(300, 70, device="cuda"), torch.randn(70, device="cuda")]
    models = [torch.nn.ParameterList([torch.nn.Parameter(tensor.clone()) for tensor in start]) for _ in range(2)]
    ours, theirs = (make_optimizer(model, TrainSection(lr=1e-2), fused=kind)
                    for model, kind in zip(models, (True, False), strict=True))
    one = torch.ones((), device="cuda")
    for number in range(5):
        products.in_half(models[0][0])
        for weight in zip(*models, strict=True):
            gradient = torch.randn_like(weight[0])
            weight[0].grad, weight[1].grad = gradient, gradient.clone()
        norms = [torch.nn.utils.get_total_norm([weight.grad for weight in models[0]])]
        if number == 2:
            before = [weight.detach().clone() for weight in models[0]]
            assert math.isnan(ours.clipped_step(one * math.nan, norms, 1.0)[0])
            assert ours.clipped_step(one, norms, 1.0, limit=0.9 * float(norms[0]))[1] == float(norms[0])  # a spike
            assert all(torch.equal(*pair) for pair in zip(before, models[0], strict=True))
        loss, norm = ours.clipped_step(one, norms, 1.0)
        assert (loss, norm) == (1.0, pytest.approx(float(norms[0])))
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        theirs.step()
        assert torch.equal(products.copy_of(models[0][0]), models[0][0].bfloat16())
    for left, right in zip(*models, strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-6)


def test_fp8_states_decode_as_on_a_cpu():
    from eagle3.states import encoding

    encoded, scales = encoding.encode_fp8(random(30, 4, 128).cpu() * torch.logspace(-3, 3, 4)[:, None])
    stored = encoding.Stored(encoded, scales, torch.zeros(0))
    assert torch.equal(stored.states(torch.device("cuda")).cpu(), stored.states())


def gradients_of(prepared, tiny_model, dtype, norms=(), loss="kl_div", recompute="off", matmul="bf16"):
    """Return loss and gradients of a batch on a drafter and states of the tests."""
    from support.trainers import trainer_of

    from eagle3.common.options import TrainSection
    from eagle3.training import trainer as training

    processes = training.Processes(0, 1, torch.device("cuda", 0))
    options = TrainSection(batch_tokens=100, dtype=dtype, loss=loss, recompute=recompute, matmul=matmul)
    trainer, steps, _ = trainer_of(prepared, tiny_model, processes, options=options, norms=norms)
    trainer.model.cuda()
    batch = trainer.load_batch(steps[0][0])
    loss = trainer._losses(batch, last=True)
    loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("norms", "loss"), [
    ((), "kl_div"), ((), "lk_hybrid"), (("fc_norm", "norm_output"), "kl_div"),
    (("norm_before_fc", "norm_output"), "lk_hybrid"),
])
def test_a_step_has_the_loss_and_gradients_of_the_plain_forms(fused, prepared, tiny_model, norms, loss):
    """In float32 without the fused forms against bf16 with them, or with those of them that know the norms."""
    exact, gradients = gradients_of(prepared, tiny_model, "float32", norms, loss)
    other, theirs = gradients_of(prepared, tiny_model, "bfloat16", norms, loss)
    assert torch.allclose(exact, other, rtol=0.01)
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() / gradient.norm() < 0.05, name


@pytest.mark.parametrize(("norms", "loss"), [((), "kl_div"), ((), "lk_hybrid"), (("fc_norm",), "kl_div")])
def test_a_recomputed_step_has_the_same_loss_and_gradients(fused, prepared, tiny_model, monkeypatch, norms, loss):
    monkeypatch.setattr(ttt, "CHUNK", 16)  # several chunks of the head
    expected, gradients = gradients_of(prepared, tiny_model, "bfloat16", norms, loss)
    found, theirs = gradients_of(prepared, tiny_model, "bfloat16", norms, loss, recompute="on")
    assert torch.allclose(expected, found, rtol=2e-3)
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() / gradient.norm() < 0.01, name


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_a_step_in_float8_is_near_the_one_in_bf16(fused, prepared, tiny_model, recompute):
    expected, gradients = gradients_of(prepared, tiny_model, "bfloat16")
    found, theirs = gradients_of(prepared, tiny_model, "bfloat16", recompute=recompute, matmul="fp8")
    assert torch.allclose(expected, found, rtol=0.02) and not torch.equal(expected, found)
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() / gradient.norm() < 0.2, name


def test_moments_in_bf16_are_rounded_alike_again_and_near_those_in_float32(products):
    from eagle3.common.options import TrainSection
    from eagle3.training.optimizer import make_optimizer

    def train(moments):
        torch.manual_seed(0)
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(300, 70, device="cuda"))])
        made = make_optimizer(model, TrainSection(lr=1e-2, moments=moments), fused=True)
        one = torch.ones((), device="cuda")
        for _ in range(20):
            model[0].grad = torch.randn_like(model[0]) / 100 + 0.01
            made.clipped_step(one, [model[0].grad.norm()], 1e9)
        return model[0].detach(), made.state[model[0]]

    (first, state), (second, _), (exact, full) = (train(moments) for moments in ("bf16", "bf16", "float32"))
    assert torch.equal(first, second) and state["exp_avg"].dtype == torch.bfloat16
    assert not torch.equal(first, exact) and (first - exact).norm() / exact.norm() < 0.001
    for name in ("exp_avg", "exp_avg_sq"):  # one rounding is off by 0.4% at most, twenty of them do not drift
        assert float(state[name].float().mean() / full[name].mean()) == pytest.approx(1, abs=0.002)


def test_a_group_of_processes_takes_the_same_steps(fused, prepared, tiny_model):
    """FSDP's weights, gathered in bf16, and its parts of them in the optimizer: in a group of one."""
    from support.trainers import trainer_of

    from eagle3.common.options import TrainSection
    from eagle3.training import optimizer, sharding
    from eagle3.training import trainer as training

    def train(divided):
        options = TrainSection(batch_tokens=100, lr=1e-3, dtype="bfloat16", accumulation=2)
        processes = training.Processes(0, 1, torch.device("cuda", 0))
        trainer, steps, _ = trainer_of(prepared, tiny_model, processes, options=options)
        trainer.model.cuda()
        if divided:
            sharding.shard(trainer._objective, torch.bfloat16)
        trainer.optimizer = optimizer.make_optimizer(trainer.model, options, fused=True)
        figures = []
        for members in (*steps, *steps):
            loaded = [trainer.load_batch(batch) for batch in members]
            figures.append(trainer.step(loaded, sum(batch.supervised for batch in loaded), 1e-3)["loss"])
        return figures, trainer.validate(steps[0][0])["loss"]

    expected, validation = train(divided=False)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found, theirs = train(divided=True)
    finally:
        torch.distributed.destroy_process_group()
    assert found == pytest.approx(expected, rel=2e-3) and expected[-1] < 0.99 * expected[0]
    assert theirs == pytest.approx(validation, rel=2e-3)


def test_equal_steps_give_equal_bits(fused, prepared, tiny_model):
    (loss, gradients), (again, others) = (gradients_of(prepared, tiny_model, "bfloat16") for _ in range(2))
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
