"""Power attention against its definition, a sum over all pairs in float64; and the edge cases that its docstring names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import sonde
from helpers.spies import spy
from sonde.jit import Pass, PickFixed
from sonde.operators import OPERATORS
from sonde.power import power_attention, sympow
from sonde.power.power_attention import api, reference
from sonde.power.power_attention.api import PowerState

F64, NAMES = torch.float64, ("out", "d_q", "d_k", "d_v", "d_log_gate", "d_S", "d_z")


def made(
    B: int, T: int, hq: int, h: int, d: int, e: int | None = None, *, gated: bool = True, seed: int = 0, dtype: torch.dtype = F64,
    device: str = "cpu", decay: float = 0.3,
) -> list[Tensor]:  # fmt: skip
    """q, k, v and gates. Keys lean towards their token's queries, so that no sum of weights is only rounding error."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, *shape, generator=g, dtype=F64) for shape in ((hq, d), (h, d), (h, e or d)))
    k = k + q[:, :, :: hq // h]
    gate = -decay * torch.rand(B, T, h, generator=g, dtype=F64)
    wide = F64 if dtype is F64 else torch.float32
    found = [x.to(device, dtype) for x in (q, k, v)] + [gate.to(device, wide)] * gated
    return [x.requires_grad_() for x in found]


def begun(B: int, h: int, d: int, e: int, power: int = 2, seed: int = 5) -> PowerState:
    """The state after five tokens."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(B, h, 5, n, generator=g, dtype=F64) for n in (d, e))
    phi = sympow(k, power)
    return PowerState((phi.mT @ v).requires_grad_(), phi.sum(2).requires_grad_(), k.norm(dim=-1).pow(power).sum(-1))


def truth(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None, *, power: int = 2, state: PowerState | None = None
) -> tuple[Tensor, PowerState]:  # fmt: skip
    """The definition, term by term, in float64."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    gate = torch.zeros_like(k[..., 0]) if log_gate is None else log_gate.double().transpose(1, 2)
    G = gate.cumsum(-1)
    decay = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
    weights = (q @ k.repeat_interleave(groups, 1).mT) ** power * decay.repeat_interleave(groups, 1)
    total, norm = weights @ v.repeat_interleave(groups, 1), weights.sum(-1, keepdim=True)
    phi, left = sympow(k, power), (gate.sum(-1, keepdim=True) - G).exp()[..., None]
    S, z, norms = phi.mT @ (v * left), (phi * left).sum(-2), (k.norm(dim=-1) ** power * left[..., 0]).sum(-1)
    if state is not None:
        seen = sympow(q, power) * G.exp().repeat_interleave(groups, 1)[..., None]
        total = total + seen @ state.S.double().repeat_interleave(groups, 1)
        norm = norm + seen @ state.z.double().repeat_interleave(groups, 1)[..., None]
        last = gate.sum(-1).exp()
        S, z, norms = S + last[..., None, None] * state.S, z + last[..., None] * state.z, norms + last * state.norms
    return (total / norm).transpose(1, 2), PowerState(S, z, norms.detach())


def gradients(out: Tensor, inputs: list[Tensor], seed: int = 9) -> tuple[Tensor, ...]:
    ct = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return torch.autograd.grad(out, inputs, ct.to(out.device, out.dtype), retain_graph=True, materialize_grads=True)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Each tensor to within `tolerance` of its largest value, and of 1 if that is smaller."""
    for name, x, y in zip(NAMES if len(got) > 3 else range(3), got, want, strict=False):
        x, y = x.detach().double().cpu(), y.detach().double().cpu()
        assert x.shape == y.shape, name
        assert x.isfinite().all(), name
        off = (x - y).abs().max().item() if x.numel() else 0.0
        assert off <= tolerance * max(1.0, y.abs().max().item() if y.numel() else 0.0), (name, off)


CHUNKS = {1: (None, 1, 16), 7: (None, 1, 3, 7), 80: (None, 1, 16, 33, 80, 100), 1000: (None, 33, 100, 256)}
ON_CPU = [("reference", T, None) for T in CHUNKS] + [("numba", T, chunk) for T, chunks in CHUNKS.items() for chunk in chunks]


@pytest.mark.parametrize(("impl", "T", "chunk"), ON_CPU)
@pytest.mark.parametrize(("sizes", "power", "gated"), [((4, 2, 8, 5), 2, True), ((2, 2, 6, 9), 2, False), ((2, 1, 4, 3), 4, True)])
def test_is_its_definition(impl, T, chunk, sizes, power, gated):
    """Lengths that are and are not multiples of the chunk, grouped heads, with gates and without, both powers."""
    inputs = made(1 if T > 100 else 2, T, *sizes, gated=gated)
    want = truth(*inputs, power=power)[0]
    out = power_attention(*inputs, power=power, chunk_size=chunk, impl=impl)
    assert_close([out], [want], 1e-10)
    assert_close([out, *gradients(out, inputs)], [want, *gradients(want, inputs)], 1e-9)


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize(("power", "gated"), [(2, True), (2, False), (4, True)])
@pytest.mark.parametrize("splits", [(0,), (1,), (16,), (21,), (49,), (50,), (16, 32), (5, 5, 40)], ids=str)
def test_any_split_is_one_call(impl, power, gated, splits):
    """Cut at the ends, between chunks and within them, also into empty parts; gradients flow back through the states."""
    T = 50
    inputs = made(2, T, 4, 2, 4, 3, gated=gated)
    want, last = truth(*inputs, power=power)
    parts, state = [], None
    for start, stop in zip((0, *splits), (*splits, T)):
        part = (x[:, start:stop] for x in inputs)
        out, state = power_attention(*part, power=power, chunk_size=16, state=state, return_state=True, impl=impl)
        parts.append(out)
    out = torch.cat(parts, 1)
    assert_close([out], [want], 1e-10)
    assert_close(state, last, 1e-10)
    assert_close([out, *gradients(out, inputs)], [want, *gradients(want, inputs)], 1e-9)


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize(("power", "chunk"), [(2, None), (2, 16), (2, 7), (4, 16)])
def test_gradients_of_and_through_states(impl, power, chunk):
    """Gradients of the given state, and through the returned one."""
    inputs, state = made(2, 37, 4, 2, 4, 3), begun(2, 2, 4, 3, power)
    leaves = [*inputs, state.S, state.z]
    want, last = truth(*inputs, power=power, state=state)
    out, found = power_attention(*inputs, power=power, state=state, chunk_size=chunk, return_state=True, impl=impl)
    assert_close([out], [want], 1e-10)
    assert_close(found, last, 1e-10)
    assert not found.norms.requires_grad
    for of, by in ((out, want), (found.S, last.S), (found.z, last.z)):
        assert_close([of, *gradients(of, leaves)], [by, *gradients(by, leaves)], 1e-9)
    both = torch.cat([x.flatten() for x in (out, found.S, found.z)]), torch.cat([x.flatten() for x in (want, last.S, last.z)])
    assert_close([both[0], *gradients(both[0], leaves)], [both[1], *gradients(both[1], leaves)], 1e-9)


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_decoding(impl):
    """A sequence, then one token at a time."""
    inputs = [x.detach() for x in made(2, 40, 4, 2, 8, 5)]
    want, last = truth(*inputs)
    out, state = power_attention(*(x[:, :30] for x in inputs), chunk_size=16, return_state=True, impl=impl)
    found = [out]
    for t in range(30, 40):
        out, state = power_attention(*(x[:, t : t + 1] for x in inputs), state=state, return_state=True, impl=impl)
        found.append(out)
    assert_close([torch.cat(found, 1)], [want], 1e-10)
    assert_close(state, last, 1e-10)


# ---- Triton ---------------------------------------------------------------------------------------------------------------


TOLERANCES = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 1e-2)}  # of results, of states


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "chunk", "power", "gated"),
    [
        ((2, 40, 4, 2, 8, 5), 16, 2, True),
        ((2, 64, 1, 1, 8, 8), 32, 2, True),
        ((1, 24, 1, 1, 8, 8), 64, 2, False),
        ((1, 40, 1, 1, 16, 16), 33, 2, False),
        ((1, 40, 2, 1, 12, 12), 33, 2, True),
        ((1, 7, 1, 1, 8, 8), 16, 2, True),
        ((1, 20, 1, 1, 4, 3), 16, 4, True),
        ((1, 20, 2, 1, 6, 3), 16, 2, True),
    ],
)
def test_kernels_agree_with_the_definition(triton_target, sizes, chunk, power, gated, dtype):
    """One chunk of each kind: the first, one in the middle, and a short last one."""
    inputs = made(*sizes, gated=gated, dtype=dtype, device=triton_target.device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want, last = truth(*exact, power=power)
    out, state = power_attention(*inputs, power=power, chunk_size=chunk, return_state=True, impl=triton_target)
    found = [out, *gradients(out, inputs)]
    of_results, of_states = TOLERANCES[dtype]
    assert_close(found, [want, *gradients(want, exact)], of_results)
    assert_close(state, last, of_states)


def test_blocks_of_queries_divide_blocks_of_keys(triton_target):
    """Else the gradients of keys count some queries twice, and read others from the next chunk."""
    from sonde.power.power_attention.gpu_configs import Config

    inputs = made(1, 64, 1, 1, 8, gated=False, device=triton_target.device)
    with sonde.jit.settings.set(PickFixed(Config(16, 32, 0, 4, 1))):
        out = power_attention(*inputs, impl=triton_target)  # its own kernel takes such blocks
        with pytest.raises(ValueError, match=r"power\.attention_keys"):
            gradients(out, inputs)


def test_kernels_continue_a_state(triton_target):
    """Two calls and two tokens equal one call, including the gradients of the states between them."""
    inputs = made(1, 40, 2, 1, 8, 5, dtype=torch.float32, device=triton_target.device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want, last = truth(*exact)
    parts, state = [], None
    for start, stop in ((0, 20), (20, 38), (38, 39), (39, 40)):
        part = (x[:, start:stop] for x in inputs)
        out, state = power_attention(*part, chunk_size=16, state=state, return_state=True, impl=triton_target)
        parts.append(out)
    out = torch.cat(parts, 1)
    assert_close([out, *gradients(out, inputs)], [want, *gradients(want, exact)], 1e-4)
    assert_close(state, last, 1e-5)
    assert_close(gradients(state.S, inputs[1:3]), gradients(last.S, exact[1:3]), 1e-4)


def test_one_chunk_of_several_heads(triton_target):
    """The state of a single chunk, by the kernels for any power, with its gradients."""
    inputs = made(1, 10, 4, 2, 6, 3, dtype=torch.float32, device=triton_target.device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    state, want = power_attention(*inputs, return_state=True, impl=triton_target)[1], truth(*exact)[1]
    assert_close(state, want, 1e-5)
    assert_close(gradients(state.S, inputs[1:]), gradients(want.S, exact[1:]), 1e-4)


@pytest.mark.parametrize(("T", "chunk", "slices"), [(200, 200, 0), (210, 130, 1)])
@pytest.mark.parametrize("shut", [(), (70, 150)], ids=["open", "shut"])
def test_gates_of_whole_blocks(triton_target, T, chunk, slices, shut):
    """Blocks of keys that all queries of a tile see read their gates from a table, even if one of these gates is shut."""
    from sonde.power.power_attention.gpu_configs import BLOCK, Config

    config = Config(64, 32, slices, 4, 1)
    assert config.block_m % BLOCK == 0
    assert BLOCK % config.block_n == 0
    inputs = made(1, T, 2, 1, 16, 16, dtype=torch.float32, device=triton_target.device, decay=0.05)
    with torch.no_grad():
        inputs[3][:, list(shut)] = -200.0
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = truth(*exact)[0]
    with sonde.jit.settings.set(PickFixed(config)):
        out = power_attention(*inputs, chunk_size=chunk, impl=triton_target)
        found = gradients(out, inputs)
    assert_close([out, *found], [want, *gradients(want, exact)], 1e-4)


# ---- edges ----------------------------------------------------------------------------------------------------------------


def leaves(*tensors: Tensor, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.detach().to(device, dtype).clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("why", ["no queries", "no keys", "disjoint", "rounding", "earlier rounding", "scale"])
def test_without_weights_there_is_nothing(impl, why, chunk):
    """Results are 0 for zero queries, zero keys, disjoint supports, sums of weights that are only rounding error, and a scale of 0.

    Also if the rounding error comes from keys in earlier chunks, which only the state remembers.
    """
    q, k, v, gate = made(1, 20, 2, 1, 8, 5, dtype=torch.float32)
    with torch.no_grad():
        if why == "no queries":
            q.zero_()
        elif why == "no keys":
            k.zero_()
        elif why == "disjoint":
            q[..., 3:], k[..., :3] = 0, 0
        elif "rounding" in why:  # keys at right angles to all queries, up to float32 rounding
            plane = torch.linalg.qr(q[0, :4, 0].double().T).Q
            plane = plane @ plane.T
            q[:], k[:] = q.double() @ plane, k.double() - k.double() @ plane
            k[:, 8 if why == "earlier rounding" else 20 :] = 0
    inputs = leaves(q, k, v, gate, device=impl.device)
    out = power_attention(*inputs, scale=0.0 if why == "scale" else None, chunk_size=chunk, impl=impl)
    assert not out.any()
    assert not any(x.any() for x in gradients(out, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("chunk", [None, 8])
def test_weights_that_fade_away(impl, chunk, dtype):
    """Padding with zeros behind a sequence: its keys fade until their weights underflow. Nothing is infinite on the way."""
    q, k, v, _ = made(1, 32, 2, 1, 8, 5, dtype=dtype)
    gate = torch.full((1, 32, 1), -3.5 if dtype is torch.float32 else -31.0, dtype=dtype)
    with torch.no_grad():
        k[:, 3:] = 0
    inputs = leaves(q, k, v, gate, device=impl.device, dtype=dtype)
    out = power_attention(*inputs, chunk_size=chunk, impl=impl)
    want = truth(q, k, v, gate)[0]
    seen = out.abs().sum((0, 2, 3)) > 0
    assert seen[:15].all()
    assert not seen[26:].any()  # the sum of weights is below 1e-31 (float64: 1e-292), the smallest normal number over eps
    torch.testing.assert_close(out[:, seen].double().cpu(), want[:, seen], rtol=1e-5, atol=1e-5)
    found = gradients(out.square(), inputs)
    assert all(x.isfinite().all() for x in found)
    assert not any(x[:, 26:].any() for x in found[:3])
    state = PowerState(*(torch.zeros_like(x, dtype=dtype, device=impl.device) for x in begun(1, 1, 8, 5)))
    for token in range(32):
        now = slice(token, token + 1)
        one, state = power_attention(*(x[:, now] for x in inputs), state=state, return_state=True, impl=impl)
        torch.testing.assert_close(one, out[:, now], rtol=1e-4, atol=1e-4)


def test_only_queries_without_weights_are_zero(impl):
    """Queries that see nothing give 0; later ones that see something do not, across chunks."""
    q, k, v, gate = made(1, 30, 1, 1, 8, 5, dtype=torch.float32)
    with torch.no_grad():
        k[:, :11] = 0
    inputs = leaves(q, k, v, gate, device=impl.device)
    out = power_attention(*inputs, chunk_size=8, impl=impl)
    assert not out[:, :11].any()
    assert_close([out[:, 11:]], [truth(*(x[:, 11:] for x in inputs))[0]], 1e-4)
    found = gradients(out, inputs)
    assert not any(x[:, :11].any() for x in found[:3])
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("level", [-torch.inf, -1001.0, -1e30])
def test_shut_gates(impl, level):
    """Nothing passes a gate of −∞, or below −1000: the sequence starts again, and the gate has no gradient."""
    inputs = made(1, 30, 2, 1, 8, 5, dtype=torch.float32)
    with torch.no_grad():
        inputs[3][:, [0, 13, 16]] = level
    inputs = leaves(*inputs, device=impl.device)
    parts = [[x.detach()[:, a:b].double().requires_grad_() for x in inputs] for a, b in ((0, 13), (13, 16), (16, 30))]
    for part in parts:
        with torch.no_grad():
            part[3][:, 0] = 0  # there is nothing before it to scale
    want = torch.cat([truth(*part)[0] for part in parts], 1)
    for chunk in (None, 8):
        out, state = power_attention(*inputs, chunk_size=chunk, return_state=True, impl=impl)
        found, wanted = gradients(out, inputs), [torch.cat(x, 1) for x in zip(*(gradients(want, part) for part in parts))]
        assert_close([out, *found], [want, *wanted], 1e-4)
        assert not found[3][:, [0, 13, 16]].any()
        assert_close(state, truth(*parts[-1])[1], 1e-5)
        begin = PowerState(*(x.detach().requires_grad_(x.is_floating_point()) for x in state))
        again = power_attention(*(x[:, 13:] for x in inputs), state=begin, chunk_size=chunk, impl=impl)
        assert_close([again], [want[:, 13:]], 1e-4)
        assert not any(x.any() for x in gradients(again, [begin.S, begin.z]))


def test_nothing_passes_a_shut_gate_backwards(impl):
    """Nothing after a shut gate reaches results and gates before it, not even a NaN."""
    inputs = made(1, 30, 1, 1, 8, dtype=torch.float32)
    with torch.no_grad():
        inputs[0][:, 27, :, 3] = torch.nan
        inputs[3][:, 13] = -torch.inf
    inputs = leaves(*inputs, device=impl.device)
    for chunk in (None, 8):
        out = power_attention(*inputs, chunk_size=chunk, impl=impl)
        assert out[:, :24].isfinite().all()
        assert gradients(out, inputs)[3][:, 13] == 0


@pytest.mark.parametrize(("power", "chunk"), [(2, None), (2, 2), (4, None), (4, 2)])
@pytest.mark.parametrize("d", [8, 5])
@pytest.mark.parametrize("sizes", [(0, 5, 4, 2), (2, 0, 4, 2), (0, 0, 4, 2)], ids=["batch", "sequence", "both"])
def test_empty(impl, sizes, d, power, chunk):
    """Without tokens, a state and its gradient pass unchanged; an empty batch gives empty results."""
    inputs, options = leaves(*made(*sizes, d, 3), device=impl.device), dict(power=power, chunk_size=chunk, impl=impl)
    state = PowerState(*leaves(*begun(sizes[0], 2, d, 3, power), device=impl.device))
    assert power_attention(*inputs, **options).shape == (*sizes[:3], 3)
    out, new = power_attention(*inputs, state=state, return_state=True, **options)
    assert out.shape == (*sizes[:3], 3)
    assert all(torch.equal(x, y) for x, y in zip(new, state))
    _, nothing = power_attention(*inputs, return_state=True, **options)
    assert not any(x.any() for x in nothing)
    found = torch.autograd.grad(new.S.sum() + 2 * new.z.sum() + out.sum(), [*inputs, state.S, state.z])
    assert [x.shape for x in found] == [x.shape for x in (*inputs, state.S, state.z)]
    assert (found[-2] == 1).all()
    assert (found[-1] == 2).all()


@pytest.mark.parametrize("chunk", [None, 2])
def test_without_queries(impl, chunk):
    """No heads of queries: an empty result, and the state of the keys."""
    inputs = leaves(*made(2, 5, 2, 1, 8, 3), device=impl.device)
    _, expected = power_attention(*inputs, chunk_size=chunk, return_state=True, impl=impl)
    inputs[0] = inputs[0].detach()[:, :, :0].requires_grad_()
    assert power_attention(*inputs, chunk_size=chunk, impl=impl).shape == (2, 5, 0, 3)
    out, state = power_attention(*inputs, chunk_size=chunk, return_state=True, impl=impl)
    assert out.shape == (2, 5, 0, 3)
    assert all(torch.equal(x, y) for x, y in zip(state, expected))
    q, *others = torch.autograd.grad(out.sum() + state.S.sum(), inputs)
    assert q.shape == (2, 5, 0, 8)
    assert all(x.any() for x in others)


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_products(impl, dtype, power):
    """|q·k| up to 1e4: weights reach 1e16, sums of them more, and nothing overflows."""
    inputs = made(1, 24, 1, 1, 4, 5, device=impl.device)
    with torch.no_grad():
        largest = (inputs[0].transpose(1, 2) @ inputs[1].transpose(1, 2).mT).abs().max()
        inputs = [x.detach() * (1e4 / largest) ** (0.5 if n < 2 else 0) for n, x in enumerate(inputs)]
    inputs = [x.to(dtype if n < 3 else torch.float32).requires_grad_() for n, x in enumerate(inputs)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = truth(*exact, power=power)[0]
    for chunk in (None, 16):
        out = power_attention(*inputs, power=power, chunk_size=chunk, impl=impl)
        assert_close([out, *gradients(out, inputs)], [want, *gradients(want, exact)], 3e-2)


def test_scale_cancels():
    inputs = [x.detach() for x in made(1, 30, 2, 1, 8)]
    want = power_attention(*inputs)
    for scale in (1.0, -3.0, 1e-30, 1e30):
        for chunk in (None, 16):
            torch.testing.assert_close(power_attention(*inputs, scale=scale, chunk_size=chunk), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
@pytest.mark.usefixtures("numba_target")
def test_scale_cancels_in_second_derivatives(scale):
    """They come from the reference, where a power of the scale would not be finite."""
    inputs = made(1, 6, 1, 1, 4)
    for impl in ("reference", "numba"):
        firsts = [torch.autograd.grad(power_attention(*inputs, scale=s, impl=impl).square().sum(), inputs, create_graph=True)
                  for s in (scale, 1.0)]  # fmt: skip
        seconds = [gradients(sum(x.square().sum() for x in first), inputs) for first in firsts]
        torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.usefixtures("numba_target")
def test_long_sums(gated):
    """20 000 tokens in float32, with the gradients of gates, each a sum over all tokens before and after it."""
    inputs = made(1, 20_000, 1, 1, 8, gated=gated, decay=0.004, dtype=torch.float32)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = power_attention(*exact, chunk_size=200)
    out = power_attention(*inputs)
    assert_close([out], [want], 1e-5)
    assert_close([out, *gradients(out, inputs)], [want, *gradients(want, exact)], 1e-4)


def test_any_strides_and_mixed_dtypes(impl):
    """Heads-first layouts, non-contiguous rows, keys shared by all heads; a single wide operand widens sums and states."""
    q, k, v, gate = (x.detach() for x in made(2, 20, 4, 2, 8, 5, dtype=torch.float32, device=impl.device))
    k = k[:, :, :1].expand(-1, -1, 2, -1)
    want = power_attention(q, k.contiguous(), v, gate, chunk_size=16, impl=impl)
    heads_first, columns = q.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT
    gates = torch.stack([gate, gate], -1)[..., 0]
    assert torch.equal(power_attention(heads_first, k, columns, gates, chunk_size=16, impl=impl), want)
    half = [x[..., ::2] for x in (q, k)]
    want = power_attention(*(x.contiguous() for x in half), v, gate, chunk_size=16, impl=impl)
    assert torch.equal(power_attention(*half, v, gate, chunk_size=16, impl=impl), want)
    out, state = power_attention(q.bfloat16(), k, v.half(), gate.double(), chunk_size=16, return_state=True, impl=impl)
    assert out.dtype is torch.bfloat16
    assert all(x.dtype is F64 for x in state)
    exact, last = truth(q.bfloat16(), k, v.half(), gate.double())
    assert_close([out], [exact], 1e-2)
    assert_close(state, last, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wide", ["q", "k", "v", "log_gate", "state"])
@pytest.mark.parametrize("d", [8, 6])  # by kernels of its own, and by those of symmetric powers
def test_one_float64_operand(target, dtype, wide, d):
    """Whichever it is, sums are float64, and every gradient has its operand's dtype."""
    inputs = dict(zip(("q", "k", "v", "log_gate"), made(1, 7, 2, 1, d)))
    given = {name: x.detach().to(target.device, F64 if name == wide else dtype).requires_grad_() for name, x in inputs.items()}
    S, z, norms = (x.detach().to(target.device, F64 if wide == "state" else torch.float32) for x in begun(1, 1, d, d))
    state = PowerState(S.requires_grad_(), z.requires_grad_(), norms)
    leaves = [*given.values(), S, z]
    out, last = power_attention(*given.values(), state=state, chunk_size=3, return_state=True, impl=target)
    assert out.dtype is given["q"].dtype
    assert last.S.dtype is F64
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    want, want_last = truth(*exact[:4], state=PowerState(*exact[4:], norms.cpu().double()))
    assert_close(last, want_last, 1e-9)
    found = gradients(out, leaves)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    assert_close([out, *found], [want, *gradients(want, exact)], 2e-3 if dtype is torch.float16 else 1e-6)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_within_its_chunk(target, which, value):
    """Earlier chunks keep their bits; if it is a query that is not finite, so do later chunks and all their gradients."""
    inputs = made(1, 40, 1, 1, 8, dtype=torch.float32)
    clean = leaves(*inputs, device=target.device)
    with torch.no_grad():
        inputs["qkv".index(which)][:, 20, :, 3] = value
    bad = leaves(*inputs, device=target.device)
    outs = [power_attention(*x, chunk_size=16, impl=target) for x in (clean, bad)]
    assert torch.equal(outs[0][:, :16], outs[1][:, :16])
    assert not outs[1][:, 20].isfinite().all()
    if which == "q":
        assert torch.equal(outs[0][:, 32:], outs[1][:, 32:])
        for x, y in zip(*(gradients(out, x) for out, x in zip(outs, (clean, bad)))):
            assert torch.equal(x[:, 32:], y[:, 32:])


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("chunk", [None, 16])
def test_gates_after_a_query_that_is_not_finite(impl, chunk):
    """A gate after such a query scales none of its weights, so the gate's gradient does not change."""
    inputs = made(1, 600, 1, 1, 8)
    clean = gradients(power_attention(*inputs, chunk_size=chunk, impl=impl), inputs)
    with torch.no_grad():
        inputs[0][:, 300, :, 3] = torch.inf
    bad = gradients(power_attention(*inputs, chunk_size=chunk, impl=impl), inputs)
    assert_close([bad[3][:, 301:]], [clean[3][:, 301:]], 1e-12)
    assert bad[3][:, :301].isnan().all()


def test_fourth_powers_of_long_rows_have_one_chunk():
    """A state for d = 33 … 256 would have up to 10⁸ rows, so no state is kept between chunks."""
    assert reference.rows_of_chunk(500, 40, 40, 4, 16) == 500
    assert reference.rows_of_chunk(100_000, 33, 1, 4, None) == 100_000
    assert reference.rows_of_chunk(500, 32, 32, 4, 16) == reference.rows_of_chunk(500, 40, 40, 2, 16) == 16
    inputs = made(1, 50, 2, 1, 40, 3)
    want = truth(*inputs, power=4)[0]
    out = power_attention(*inputs, power=4, chunk_size=8)
    assert_close([out, *gradients(out, inputs)], [want, *gradients(want, inputs)], 1e-9)
    results = api._power_attention(*api.arguments(*(x.detach() for x in inputs), power=4, chunk_size=8), impl="auto")
    assert sum(x.numel() for x in results) <= 3 * out.numel()


# ---- errors ---------------------------------------------------------------------------------------------------------------

Q, K, V, GATE = (2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 3), (2, 5, 2)


def zeros(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    return [torch.zeros(shape, device=device) for shape in shapes]


STATE = zeros((2, 2, 64, 3), (2, 2, 64), (2, 2))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (zeros(Q, K, V), dict(power=3), ("power must be 2 or 4", "got 3", "odd power has negative weights")),
        (zeros(Q, K, V), dict(power=1), ("power must be 2 or 4", "got 1")),
        (zeros(Q, K, V), dict(power=0), ("power must be an integer >= 1", "0")),
        (zeros(Q, K, V), dict(power=-2), ("power must be an integer >= 1", "-2")),
        (zeros(Q, K, V), dict(power=6), ("power must be 2 or 4; got 6",)),
        (zeros(Q, K, V), dict(power=2.0), ("power must be an integer", "2.0")),
        (zeros(Q, K, V), dict(power=True), ("power must be an integer", "True")),
        (zeros(Q, K, V), dict(scale="1"), ("scale must be a number",)),
        (zeros(Q, K, V), dict(scale=float("nan")), ("scale must be finite",)),
        (zeros(Q, K, V), dict(chunk_size=0), ("chunk_size must be an integer >= 1", "0")),
        (zeros(Q, K, V), dict(chunk_size=-16), ("chunk_size must be an integer >= 1", "-16")),
        (zeros(Q, K, V), dict(chunk_size=16.0), ("chunk_size must be an integer", "16.0")),
        (zeros(Q, K, V), dict(return_state=1), ("return_state must be True or False",)),
        (zeros((2, 5, 2, 300), (2, 5, 2, 300), V), {}, ("q must have rows of 1 to 256 numbers", "300")),
        (zeros(Q, K, (2, 5, 2, 257)), {}, ("v must have rows of 1 to 256 numbers", "257")),
        (zeros((2, 5, 3, 8), K, V), {}, ("q must have a multiple of the heads of k and v, 2", "[2, 5, 3, 8]")),
        (zeros((2, 5, 4, 9), K, V), {}, ("k must be [B, T, h, d]", "d=9 (from q)", "[2, 5, 2, 8]")),
        (zeros(Q, (2, 6, 2, 8), V), {}, ("k must be", "T=5 (from q)", "[2, 6, 2, 8]")),
        (zeros(Q, K, (2, 5, 1, 3)), {}, ("v must be", "h=2 (from k)", "[2, 5, 1, 3]")),
        (zeros(Q[1:], K, V), {}, ("q must have 4 dimensions [B, T, hq, d]", "got 3: [5, 4, 8]")),
        (zeros(Q, K[1:], V), {}, ("k must have 4 dimensions", "got 3")),
        (zeros(Q, K, V, (*GATE, 1)), {}, ("log_gate must have 3 dimensions [B, T, h]", "got 4")),
        (zeros(Q, K, V, (2, 5, 4)), {}, ("log_gate must be [B, T, h]", "h=2", "[2, 5, 4]")),
        ([*zeros(Q, K, V), torch.ones(GATE, dtype=torch.int64)], {}, ("log_gate must be float16", "torch.int64")),
        ([*zeros(Q, K, V), -0.5], {}, ("log_gate must be a tensor", "float")),
        (zeros(Q) + zeros(K, V, device="meta"), {}, ("k must be on cpu", "meta", "k.to(q.device)")),
        (zeros(Q, K, V) + zeros(GATE, device="meta"), {}, ("log_gate must be on cpu", "meta")),
        (zeros(Q, K, V), dict(state=(*zeros((2, 2, 36, 3)), *STATE[1:])), ("state.S must be [B, h, D, e]", "D=64", "2, 36, 3]")),
        (zeros(Q, K, V), dict(state=(STATE[0], *zeros((2, 4, 64)), STATE[2])), ("state.z must be [B, h, D]", "h=2", "[2, 4, 64]")),
        (zeros(Q, K, V), dict(state=(*STATE[:2], *zeros((2, 4)))), ("state.norms must be [B, h]", "h=2", "[2, 4]")),
        (zeros(Q, K, V), dict(state=(*STATE[:2], *zeros((2, 2, 1)))), ("state.norms must be [B, h]", "h=2", "[2, 2, 1]")),
        (zeros(Q, K, V), dict(power=4, state=tuple(STATE)), ("state.S must be", "D=4096", "power=4", "[2, 2, 64, 3]")),
        (zeros(Q, K, V), dict(state=tuple(STATE[:2])), ("state must be a PowerState", "tuple")),
        (zeros(Q, K, V), dict(state=STATE[0]), ("state must be a PowerState", "a tensor [2, 2, 64, 3]")),
        (zeros(Q, K, V), dict(state=(STATE[0], None, STATE[2])), ("a state has S, z and norms; got no z",)),
        (zeros(Q, K, V), dict(state=(None, *STATE[1:])), ("a state has S, z and norms; got no S",)),
        (zeros(Q, K, V), dict(state=(*STATE[:2], None)), ("a state has S, z and norms; got no norms",)),
        (zeros(Q, K, V), dict(state=(*STATE[:2], 1.0)), ("state.norms must be a tensor", "float")),
        (zeros(Q, K, V), dict(state=(STATE[0].to("meta"), *STATE[1:])), ("state.S must be on cpu", "meta")),
        (zeros((1, 3, 1, 33), (1, 3, 1, 33), (1, 3, 1, 4)), dict(power=4, return_state=True), ("up to d=32", "d=33", "D=58905")),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("numba_target")
def test_bad_input(arguments, options, words, monkeypatch):
    calls = spy(monkeypatch, OPERATORS["power_attention"], "numba")
    with pytest.raises((ValueError, TypeError)) as caught:
        power_attention(*arguments, **options)
    assert all(word in str(caught.value) for word in ("power_attention", *words)), caught.value
    assert not calls


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_positive_gates_on_cpus(impl):
    gate = torch.zeros(GATE)
    gate[1, 2, 1] = 0.25
    with pytest.raises(ValueError, match=r"power_attention: log_gate must be at most 0; got 0\.25\. Use .*logsigmoid"):
        power_attention(*zeros(Q, K, V), gate, impl=impl)


# ---- torch ----------------------------------------------------------------------------------------------------------------


def test_compiled_decoding():
    """A sequence that returns a state, and tokens that continue it, compile to one graph each."""

    def call(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: PowerState | None) -> tuple[Tensor, PowerState]:
        return power_attention(q, k, v, gate, state=state, return_state=True, chunk_size=16)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = [x.detach() for x in made(1, 24, 2, 1, 4)]
    want, last = truth(*inputs)
    out, state = compiled(*(x[:, :20] for x in inputs), None)
    assert type(state) is PowerState
    found = [out]
    for t in range(20, 24):
        out, state = compiled(*(x[:, t : t + 1] for x in inputs), state)
        found.append(out)
    assert_close([torch.cat(found, 1)], [want], 1e-10)
    assert_close(state, last, 1e-10)


def test_transforms_of_states():
    """``vmap`` and ``grad`` work with given and returned states."""
    inputs, state = [x.detach() for x in made(3, 6, 2, 1, 4)], PowerState(*(x.detach() for x in begun(3, 1, 4, 4)))

    def loss(S: Tensor, z: Tensor, norms: Tensor, *inputs: Tensor) -> Tensor:
        given = (x[None] for x in (S, z, norms))
        out, new = power_attention(*(x[None] for x in inputs), state=PowerState(*given), return_state=True)
        return out.square().sum() + new.S.square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(*state, *inputs)
    begin = [x.requires_grad_() for x in state[:2]]
    out, new = truth(*inputs, state=state)
    want = torch.autograd.grad(out.square().sum() + new.S.square().sum(), begin)
    assert_close(got, want, 1e-9)


def test_a_state_can_be_saved(tmp_path):
    state = begun(1, 1, 4, 4)
    torch.save(state, tmp_path / "state")
    found = torch.load(tmp_path / "state")
    assert isinstance(found, PowerState)
    assert_close(found, state, 0)


@pytest.mark.parametrize(("chunk", "low", "high"), [(128, 2, 128), (128, 129, 4096), (4096, 2, 64)])
def test_exported_for_lengths_on_one_side_of_a_chunk(chunk, low, high):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return power_attention(q, k, v, chunk_size=chunk)

    def inputs(T):
        return tuple(x.detach() for x in made(1, T, 2, 2, 4, gated=False, dtype=torch.float32))

    length = torch.export.Dim("T", min=low, max=high)
    program = torch.export.export(Model(), inputs(low + 1), dynamic_shapes=({1: length},) * 3).module()
    for T in (low, min(high, 300)):
        torch.testing.assert_close(program(*inputs(T)), Model()(*inputs(T)))


def test_states_of_a_gpu_that_is_not_here(triton_target, monkeypatch):
    """A release build compiles on CPU tensors what a GPU will run: bfloat16 states."""
    gpu, plan = (import_module(f"sonde.{name}") for name in ("power.power_attention.gpu", "op.plan"))
    x = torch.empty(1, 9, 2, 8, dtype=torch.bfloat16)
    p = Pass(x.device, torch.float32, dict(q=x))
    assert gpu._kept(x, x, x, 2, p) == torch.float32
    monkeypatch.setattr(plan, "only_compiled", True)
    assert gpu._kept(x, x, x, 2, p) == torch.bfloat16
    assert gpu._kept(x, x, x.half(), 2, p) == gpu._kept(x, x, x, 4, p) == torch.float32
