"""The layer of power attention against a twin that sums weights token by token, and its states against whole sequences."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sonde.nn
from helpers.devices import OneDevice
from helpers.refusals import assert_refused
from sonde.nn import power_attention
from sonde.power import PowerState

DIM, B, T = 12, 2, 9


def attention(**options) -> sonde.nn.PowerAttention:
    return sonde.nn.PowerAttention(**{**dict(embed_dim=DIM, num_heads=4, num_kv_heads=2, head_dim=4), **options})


def filled(layer: nn.Module) -> nn.Module:
    """Random parameters, so that gates depend on the input and no zero hides a mistake."""
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.double()


def tokens(T: int = T, dtype=torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(B, T, DIM, dtype=dtype)


def twin(layer: sonde.nn.PowerAttention, x: Tensor) -> Tensor:
    """The formula of the layer's docstring, one query and one head at a time."""
    p = dict(layer.named_parameters())

    def project(name: str, x: Tensor) -> Tensor:
        out = x @ p[f"{name}.weight"].T
        return out + p[f"{name}.bias"] if f"{name}.bias" in p else out

    d, groups = layer.head_dim, layer.num_heads // layer.num_kv_heads
    q, k, v = (project(f"{name}_proj", x) for name in "qkv")
    kept = project("g_proj", x).sigmoid() if "g_proj.weight" in p else torch.ones_like(k[..., : layer.num_kv_heads])
    rows = []
    for i in range(x.shape[1]):
        seen = []
        for head in range(layer.num_heads):
            h = head // groups
            query, mine, kv = q[:, i, head * d : (head + 1) * d], slice(0, i + 1), slice(h * d, (h + 1) * d)
            passed = torch.stack([kept[:, j + 1 : i + 1, h].prod(1) for j in range(i + 1)], 1)
            weights = torch.einsum("bd,bjd->bj", query, k[:, mine, kv]) ** layer.power * passed
            seen.append(torch.einsum("bj,bje->be", weights, v[:, mine, kv]) / weights.sum(1, keepdim=True))
        rows.append(torch.cat(seen, -1))
    return project("o_proj", torch.stack(rows, 1))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_kv_heads=None, head_dim=None, num_heads=3),
        dict(gates=False, bias=False),
        dict(power=4, bias=False),
        dict(chunk_size=4),
        dict(num_kv_heads=1, head_dim=5, chunk_size=1),
    ],
    ids=str,
)
def test_equals_twin(options):
    """Values and the gradients of the input and of every parameter."""
    layer, x = filled(attention(**options)), tokens().requires_grad_()
    wanted = [x, *layer.parameters()]
    found = []
    for out in (layer(x), twin(layer, x)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append([out, *torch.autograd.grad(out, wanted, weight)])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
        assert want.abs().max() > 1e-6, "tested by zeros"


@pytest.mark.parametrize("options", [dict(), dict(power=4), dict(gates=False), dict(chunk_size=3)], ids=str)
def test_prompt_and_tokens_continue_a_sequence(options):
    """A prompt followed by single tokens, or uneven pieces, give the same results and state as the whole sequence."""
    layer, x = filled(attention(**options)), tokens()
    want, last = layer(x, return_state=True)
    torch.testing.assert_close(layer(x), want)
    for sizes in ([5, 1, 1, 1, 1], [1] * T, [4, 0, 5], [0, 2, 7]):
        state, found = None, []
        for piece in x.split(sizes, 1):
            out, state = layer(piece, state, return_state=True)
            found.append(out)
        torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(layer(piece, state), layer(piece, last), rtol=1e-9, atol=1e-11)
        assert isinstance(state, PowerState)
        for got, expected in zip(state, last):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_gradients_flow_through_the_state():
    layer, x = filled(attention()), tokens().requires_grad_()
    out, state = layer(x[:, :4], return_state=True)
    pieces = torch.cat([out, layer(x[:, 4:], state)], 1)
    for got, want in zip(*(torch.autograd.grad(o.sin().sum(), [x, *layer.parameters()]) for o in (pieces, layer(x)))):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    alone = layer(x[:, 4:], PowerState(*(t.detach() for t in state)))
    (grad,) = torch.autograd.grad(alone.sin().sum(), x)
    assert not grad[:, :4].any()
    assert grad[:, 4:].any()


def test_the_initial_state_is_that_of_no_tokens():
    layer, x = filled(attention()), tokens()
    zeros = layer.initial_state(B)
    assert [(t.shape, t.dtype) for t in zeros] == [(t.shape, t.dtype) for t in layer(x, return_state=True)[1]]
    torch.testing.assert_close(layer(x, zeros), layer(x))
    assert not any(t.any() for t in layer(x[:, :0], return_state=True)[1])
    assert {t.dtype for t in attention().bfloat16().initial_state(1)} == {torch.float32}
    assert layer.initial_state(0, device="meta", dtype=torch.float32).S.shape == (0, 2, 16, 4)


def test_rows_of_a_state_are_sequences():
    layer, x = filled(attention()), tokens()
    _, state = layer(x[:, :6], return_state=True)
    rows = torch.tensor([1, 1, 0])
    got = layer(x[rows, 6:], PowerState(*(t[rows] for t in state)))
    torch.testing.assert_close(got, layer(x)[rows, 6:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0), (1, 1)], ids=str)
def test_empty_and_short(shape):
    layer = attention()
    x = torch.randn(*shape, DIM, requires_grad=True)
    out, state = layer(x, return_state=True)
    assert out.shape == x.shape
    assert state.S.shape[0] == shape[0]
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_gates_begin_with_a_long_memory():
    """The gates are 1 − 2^−12 … 1 − 2^−7, whatever the input; a single head has the longest memory."""
    for heads in (1, 2, 6):
        layer = sonde.nn.PowerAttention(DIM, 6, heads)
        exponents = [12 - 5 * i / max(1, heads - 1) for i in range(heads)]
        want = torch.tensor([math.log1p(-(2.0**-n)) for n in exponents])
        gates = layer._log_gates(100 * torch.randn(B, T, DIM))
        torch.testing.assert_close(gates, want.expand(B, T, heads), rtol=1e-5, atol=0)
        assert not any(x.bias.any() for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj))


def test_reset_parameters():
    """The same seed gives the same parameters, whatever they were before."""
    layers = [attention(), filled(attention()).float()]
    for layer in layers:
        torch.manual_seed(3)
        layer.reset_parameters()
    for (name, got), want in zip(layers[1].named_parameters(), layers[0].parameters()):
        assert torch.equal(got, want), name


def spy(monkeypatch) -> list[tuple]:
    """Records the tensors that the layer hands to the operator."""
    seen, real = [], power_attention.power_attention
    monkeypatch.setattr(power_attention, "power_attention", lambda *args, **more: seen.append(args) or real(*args, **more))
    return seen


@pytest.mark.parametrize("cast", [False, True], ids=["float32 input", "bfloat16 input"])
def test_gates_stay_float32_under_autocast(cast, monkeypatch):
    seen, layer, x = spy(monkeypatch), filled(attention()).float(), tokens(dtype=torch.float32)
    x = x.bfloat16() if cast else x
    with torch.autocast("cpu", torch.bfloat16):
        out, state = layer(x, return_state=True)
        out.float().sum().backward()
    q, _, _, log_gate = seen[0]
    assert (out.dtype, q.dtype, log_gate.dtype, state.S.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(log_gate, F.logsigmoid(F.linear(x.float(), layer.g_proj.weight, layer.g_proj.bias)))
    torch.testing.assert_close(out.float(), layer(x.float()), rtol=0.1, atol=0.1)
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_x", [torch.bfloat16, torch.float32], ids=str)
def test_parameters_of_any_dtype_under_autocast(dtype, of_x):
    layer, x = attention(dtype=dtype), tokens(dtype=of_x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    want = layer.float()(x.float())
    assert (out.float() - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, monkeypatch):
    seen, layer = spy(monkeypatch), attention(dtype=dtype)
    out, state = layer(tokens(dtype=dtype), return_state=True)
    assert (out.dtype, seen[0][3].dtype, state.S.dtype) == (dtype, torch.float32, torch.float32)
    assert layer(tokens(dtype=dtype)[:, :1], state).isfinite().all()


def test_state_dict():
    names = dict(q_proj=16, k_proj=8, v_proj=8, o_proj=DIM, g_proj=2)
    shapes = {name: tuple(x.shape) for name, x in attention().state_dict().items()}
    assert {n: s for n, s in shapes.items() if n.endswith("weight")} == {
        f"{n}.weight": (rows, 16 if n == "o_proj" else DIM) for n, rows in names.items()
    }
    assert {n: s for n, s in shapes.items() if n.endswith("bias")} == {f"{n}.bias": (rows,) for n, rows in names.items()}
    assert [n for n in attention(bias=False).state_dict() if n.endswith("bias")] == ["g_proj.bias"]
    assert not any("g_proj" in n for n in attention(gates=False).state_dict())
    layer, x = filled(attention()), tokens()
    other = attention().double()
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_copies_nothing_from_the_host(monkeypatch):
    """Neither do the constructor and `initial_state`; the operator is a stub here, since its own tests cover it."""
    monkeypatch.setattr(power_attention, "power_attention", lambda q, k, v, log_gate, state, **_: (q + log_gate.sum(), state))
    with OneDevice():
        layer = attention(device="meta", dtype=torch.float64)
        assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}
        state = layer.initial_state(B)
        out, _ = layer(torch.zeros(B, T, DIM, device="meta", dtype=torch.float64), state, return_state=True)
    assert (out.shape, state.S.dtype) == ((B, T, DIM), torch.float64)


@pytest.mark.gpu
def test_never_waits_for_the_device():
    layer, x = attention().cuda(), torch.randn(B, T, DIM).cuda()

    def run():
        state = layer(x, layer.initial_state(B), return_state=True)[1]
        layer(x[:, :1], state).sum().backward()

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_frozen():
    layer, x = filled(attention()).requires_grad_(False), tokens()
    out, state = layer(x, return_state=True)
    assert not out.requires_grad
    assert not any(t.requires_grad for t in state)
    x.requires_grad_()
    assert torch.autograd.grad(layer(x).sum(), x)[0].any()


def test_is_one_graph():
    """The layer, its state and its gradients compile to one graph for any number of tokens, and one for a single token."""
    torch._dynamo.reset()
    layer = filled(attention())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    state = layer.initial_state(B)
    for length, stance in ((7, "default"), (5, "fail_on_recompile"), (1, "default"), (1, "fail_on_recompile")):
        x = tokens(length).requires_grad_()
        if length > 1:
            torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance(stance):
            got, after = compiled(x, state, return_state=True)
        want, state_wanted = layer(x, state, return_state=True)
        for a, b in zip((got, *after), (want, *state_wanted)):
            torch.testing.assert_close(a, b)
        wanted = [x, *layer.parameters()]
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), wanted) for out in (got, want))):
            torch.testing.assert_close(a, b)
        state = PowerState(*(t.detach() for t in after))
    torch._dynamo.reset()


def test_one_graph_under_autocast():
    torch._dynamo.reset()
    layer, x = attention(), tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    torch._dynamo.reset()


def test_exports():
    layer, x = filled(attention()), tokens()
    exported = torch.export.export(layer, (x, layer.initial_state(B)), dict(return_state=True))
    for got, want in zip(*(torch.utils._pytree.tree_leaves(f(x, layer.initial_state(B), return_state=True))
                           for f in (exported.module(), layer))):  # fmt: skip
        torch.testing.assert_close(got, want)


def test_is_shown_with_its_sizes():
    assert "(embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=4, power=2, gates=True" in repr(attention()).replace("\n  ", "")
    assert "chunk_size=64" in repr(attention(chunk_size=64))
    assert "g_proj" not in repr(attention(gates=False))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(embed_dim=0), ValueError, "embed_dim must be an integer >= 1"),
        (dict(num_heads=2.0), TypeError, "num_heads must be an integer >= 1"),
        (dict(num_kv_heads=3), ValueError, "num_heads must be a multiple of num_kv_heads; got 4 and 3"),
        (dict(num_kv_heads=0), ValueError, "num_kv_heads must be an integer >= 1"),
        (dict(head_dim=None, num_heads=5, num_kv_heads=5), ValueError, "embed_dim must be a multiple of num_heads; got 12 and 5"),
        (dict(head_dim=257), ValueError, "head_dim must be at most 256; got 257"),
        (dict(head_dim=True), TypeError, "head_dim must be an integer >= 1"),
        (dict(power=3), ValueError, "power must be 2 or 4; got 3"),
        (dict(gates="yes"), TypeError, "gates must be True or False; got"),
        (dict(bias=None), TypeError, "bias must be True or False; got"),
        (dict(chunk_size=0), ValueError, "chunk_size must be an integer >= 1; got 0"),
    ],
    ids=str,
)
def test_no_such_layer(wrong, error, text):
    with pytest.raises(error) as found:
        attention(**wrong)
    assert f"PowerAttention: {text}" in str(found.value)


X, ZEROS = torch.zeros(B, T, DIM), attention().initial_state(B)
REFUSES = {
    "x_list": (dict(x=[1.0]), TypeError, "x must be a tensor [B, T, 12]"),
    "x_rank": (dict(x=X[0]), ValueError, "x must have 3 dimensions"),
    "x_channels": (dict(x=X[..., :5]), ValueError, "x must be [B, T, 12]"),
    "x_integers": (dict(x=X.long()), TypeError, "x must be float16"),
    "flag": (dict(return_state=1), TypeError, "return_state must be True or False"),
    "state_tensor": (dict(state=X), TypeError, "state must be a PowerState, as returned by an earlier call"),
    "state_short": (dict(state=ZEROS[:2]), TypeError, "state must be a PowerState"),
    "state_entry": (dict(state=ZEROS._replace(z=None)), TypeError, "state.z must be a tensor [B, 2, 16]"),
    "state_batch": (dict(state=attention().initial_state(3)), ValueError, "state.S must be [B, 2, 16, 4] with B=2 (from x)"),
    "state_sizes": (dict(state=attention(head_dim=8).initial_state(B)), ValueError, "state.S must be [B, 2, 16, 4]"),
    "state_device": (dict(state=attention(device="meta").initial_state(B)), ValueError, "state.S must be on cpu, where x is"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name):
    wrong, error, text = REFUSES[name]
    assert_refused(error, f"PowerAttention: {text}", attention(), **{"x": X, **wrong})


def test_no_state_of_a_wide_fourth_power():
    layer = attention(power=4, head_dim=33)
    text = "PowerAttention: with power=4 there is a state only up to head_dim=32; got head_dim=33"
    assert_refused(ValueError, text, layer, X, return_state=True)
    assert_refused(ValueError, text, layer, X, ZEROS)
    assert_refused(ValueError, text, layer.initial_state, 1)
    assert layer(X).shape == X.shape
