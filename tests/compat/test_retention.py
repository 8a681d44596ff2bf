"""retention's names and signatures against sums over keys in float64, one query at a time."""

import inspect

import pytest
import torch
from torch import Tensor

import sonde
from helpers.refusals import assert_refused
from sonde.compat import retention
from sonde.compat.retention import power_retention, power_retention_inference

B, T, HQ, H, D, E = 2, 23, 4, 2, 6, 5


def sequence(T: int = T, dtype=torch.float64) -> list[Tensor]:
    """Queries, keys, values and gates."""
    g = torch.Generator().manual_seed(0)
    shapes = (B, T, HQ, D), (B, T, H, D), (B, T, H, E)
    q, k, v = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    return [q, k, v, -0.4 * torch.rand(B, T, H, generator=g, dtype=torch.float64)]


def truth(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, deg: int = 2, scale: float = 1.0) -> Tensor:
    """Each weight computed by itself: (scale · q·k)^deg, times one factor for each gate between key and query."""
    gates = torch.ones_like(k[..., 0]) if log_g is None else log_g.exp()
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b in range(q.shape[0]):
        for head in range(q.shape[2]):
            h = head // (q.shape[2] // k.shape[2])
            for i in range(q.shape[1]):
                weights, total = 0.0, 0.0
                for j in range(i + 1):
                    weight = (scale * q[b, i, head].dot(k[b, j, h])) ** deg * gates[b, j + 1 : i + 1, h].prod()
                    weights, total = weights + weight, total + weight * v[b, j, h]
                out[b, i, head] = total / weights
    return out


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_signatures():
    """Callable by position and by the original's keywords; others are refused."""
    names = ["Q", "K", "V", "log_G", "initial_state", "sum_of_keys"]
    whole, last = (inspect.signature(f).parameters for f in (power_retention, power_retention_inference))
    assert list(whole) == [*names, "return_final_state", "deg", "scale", "chunk_size", "switch_over_seq_len"]
    assert list(last) == [*names, "deg", "scale", "switch_over_seq_len"]
    assert [whole[n].default for n in list(whole)[3:]] == [None, None, None, False, 2, None, None, None]
    assert [last[n].default for n in list(last)[3:]] == [None, None, None, 2, None, 512]
    assert sonde.compat.retention is retention
    with pytest.raises(TypeError, match="chunksize"):
        power_retention(*sequence()[:3], chunksize=4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("deg", [2, 4])
@pytest.mark.parametrize(
    "options", [dict(), dict(chunk_size=4), dict(chunk_size=4, switch_over_seq_len=64), dict(scale=-3.0)], ids=str
)
def test_sequence(gated, deg, options):
    """Values and gradients, also for lengths that are not multiples of the chunk."""
    leaves = [x.requires_grad_() for x in sequence(11)[: 3 + gated]]
    log_g = leaves[3] if gated else None
    found = []
    for out in (power_retention(*leaves[:3], log_G=log_g, deg=deg, **options), truth(*leaves[:3], log_g, deg)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append([out, *torch.autograd.grad(out, leaves, weight)])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


def test_final_state_is_that_of_power_attention():
    """Also in pieces, each starting with the previous piece's state."""
    given = sequence()
    want = truth(*given)
    out, S, z = power_retention(*given, return_final_state=True, chunk_size=8)
    close(out, want)
    _, state = sonde.power.power_attention(*given, return_state=True)
    close(S, state.S)
    close(z, state.z)
    made, found = (None, None), []
    for rows in (slice(0, 9), slice(9, 10), slice(10, T)):
        out, *made = power_retention(*(x[:, rows] for x in given), *made, True)
        found.append(out)
    close(torch.cat(found, 1), want)
    close(made[0], S)
    close(made[1], z)


def test_gradients_of_a_state():
    leaves = [x.requires_grad_() for x in sequence(11)]
    _, *state = power_retention(*(x[:, :6] for x in leaves), return_final_state=True)
    out = power_retention(*(x[:, 6:] for x in leaves), *state)
    for got, want in zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (out, truth(*leaves)[:, 6:]))):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        (dict(), False),
        (dict(switch_over_seq_len=T + 1), True),
        (dict(switch_over_seq_len=T), False),
        (dict(chunk_size=T + 1), False),
        (dict(chunk_size=4, switch_over_seq_len=T + 1), False),  # 23 tokens are six chunks, 24
        (dict(chunk_size=4, switch_over_seq_len=T + 2), True),
        (dict(chunk_size=T + 1, switch_over_seq_len=5), False),
    ],
    ids=str,
)
def test_short_sequences_have_no_state_yet(options, cached):
    """As in the original, which pads to whole chunks first: these keys are still in the cache and would be counted twice."""
    given = sequence()
    out, S, z = power_retention(*given, return_final_state=True, **options)
    close(out, truth(*given))
    assert ((S is None), (z is None)) == (cached, cached)
    _, *state = power_retention(*given, return_final_state=True)
    assert all(x is not None for x in power_retention(*given, *state, True, **options))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("prompt", "limit"), [(3, 6), (6, 6), (10, 6), (0, 4), (1, 1), (5, None), (9, 512)])
def test_decoding_with_a_cache(prompt, limit, gated):
    """A prompt, then token after token: the cache grows until it is added to the state and emptied."""
    given = sequence()
    given = given if gated else [*given[:3], None]
    want, found, state = truth(*given), [], (None, None)

    def rows(start: int, stop: int) -> list[Tensor | None]:
        return [None if x is None else x[:, start:stop] for x in given]

    begin = prompt
    if prompt:
        out, *state = power_retention(*rows(0, prompt), return_final_state=True, switch_over_seq_len=limit)
        found.append(out)
        begin = 0 if state[0] is None else prompt
    folded = 0
    for token in range(prompt, T):
        query, (_, K, V, log_G) = given[0][:, token : token + 1], rows(begin, token + 1)
        out, *after = power_retention_inference(query, K, V, log_G, *state, 2, None, limit)
        found.append(out)
        if limit is not None and token + 1 - begin >= limit:
            assert after[0] is not state[0]
            begin, folded = token + 1, folded + 1
        else:
            assert after[0] is state[0]
            assert after[1] is state[1]
        state = after
    close(torch.cat(found, 1), want)
    assert folded == (0 if limit is None else (T - (prompt if prompt >= limit else 0)) // limit)
    if state[0] is not None and begin:
        close(state[0], sonde.power.power_attention(*rows(0, begin), return_state=True)[1].S)


@pytest.mark.parametrize("deg", [2, 4])
@pytest.mark.parametrize("queries", [0, 1, 4])
def test_queries_of_a_cache(deg, queries):
    """Several queries are the last tokens; each ignores later tokens and their gates. The fourth power has only a cache."""
    given = sequence()
    want, S, z = power_retention(*given, return_final_state=True)[0] if deg == 2 else truth(*given, deg), None, None
    begin = 0
    if deg == 2:
        begin = 8
        _, S, z = power_retention(*(x[:, :begin] for x in given), return_final_state=True)
    _, K, V, log_G = (x[:, begin:] for x in given)
    out, *_ = power_retention_inference(given[0][:, T - queries :], K, V, log_G, S, z, deg, switch_over_seq_len=None)
    close(out, want[:, T - queries :])


def test_a_state_alone():
    """Queries see the state if the cache is None or has no rows."""
    Q, K, V, log_G = sequence()
    _, S, z = power_retention(Q, K, V, log_G, return_final_state=True)
    query = torch.cat([Q[:, -1:], Q[:, :2]], 1)
    want = truth(query[:, :1].expand(-1, T, -1, -1), K, V, log_G)[:, -1]
    for none in (None, K[:, :0]):
        out, *after = power_retention_inference(query, none, None if none is None else V[:, :0], None, S, z)
        assert out.shape == (B, 3, HQ, E)
        close(out[:, 0], want)
        assert after[0] is S
        assert after[1] is z
    out, *after = power_retention_inference(query, K[:, :0], V[:, :0])
    assert not out.any()
    assert after == [None, None]


def test_gradients_of_inference():
    leaves = [x.requires_grad_() for x in sequence(11)]
    _, *state = power_retention(*(x[:, :6] for x in leaves), return_final_state=True)
    Q, K, V, log_G = (x[:, 6:] for x in leaves)
    out, S, z = power_retention_inference(Q[:, -1:], K, V, log_G, *state, switch_over_seq_len=5)
    _, *want = power_retention(*leaves, return_final_state=True)
    for got, expected in (([out], [truth(*leaves)[:, -1:]]), ([S, z], want)):
        totals = (sum(x.sin().sum() for x in some) for some in (got, expected))
        for a, b in zip(*(torch.autograd.grad(t, leaves[1:], retain_graph=True) for t in totals)):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_no_scale_and_no_weights():
    """A scale of 0 does not mean the default; queries that see nothing give 0, whatever the chunks."""
    Q, K, V, log_G = sequence()
    assert not power_retention(Q, K, V, log_G, scale=0).any()
    assert not power_retention_inference(Q[:, -1:], K, V, log_G, scale=0.0)[0].any()
    _, S, z = power_retention(Q, K, V, log_G, return_final_state=True)
    for nothing in (torch.zeros_like(Q), Q):
        keys = K if nothing is not Q else torch.zeros_like(K)
        assert not power_retention(nothing, keys, V, log_G, chunk_size=3).any()
        assert not power_retention_inference(nothing[:, -1:], keys, V, log_G)[0].any()
    assert not power_retention_inference(torch.zeros_like(Q), K, V, log_G, S, z)[0].any()


@pytest.mark.parametrize("d", [5, 8])
def test_rounding_alone_is_no_result(d):
    """A query at right angles to all keys gives 0 from a state too, whose threshold is found from the sum of keys."""
    g = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q.float()
    keys = (torch.randn(1, 9, 1, d - 1, generator=g) @ axes[: d - 1]) * 30
    query, values = axes[-1].expand(1, 9, 1, d).contiguous(), torch.randn(1, 9, 1, 3, generator=g)
    _, S, z = power_retention(query, keys, values, return_final_state=True)
    assert (sonde.power.sympow(query[0, 0, 0], 2) @ z[0, 0] != 0).any()  # so the zero is not accidental
    assert not power_retention_inference(query[:, :1], None, None, None, S, z)[0].any()
    assert not power_retention(query[:, :1], keys[:, :1], values[:, :1], None, S, z).any()
    norms = retention._state("", dict(d=d, h=1, e=3), query, S, z, 2).norms
    torch.testing.assert_close(norms, keys.square().sum((1, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Results have the queries' dtype and states are float32; states rounded to that dtype are accepted, as in the original."""
    Q, K, V, log_G = sequence(dtype=dtype)
    log_G, limits = log_G.float(), dict(rtol=0.05, atol=0.05) if dtype != torch.float32 else dict(rtol=1e-4, atol=1e-4)
    want = truth(Q.double(), K.double(), V.double(), log_G.double())
    out, S, z = power_retention(Q, K, V, log_G, return_final_state=True)
    assert (out.dtype, S.dtype, z.dtype) == (dtype, torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), want, **limits)
    for kind in (torch.float32, dtype):
        _, *state = power_retention(*(x[:, :9] for x in (Q, K, V, log_G)), return_final_state=True)
        cache = (x[:, 9:] for x in (K, V, log_G))
        out, S, z = power_retention_inference(Q[:, -1:], *cache, *(x.to(kind) for x in state), switch_over_seq_len=2)
        assert (out.dtype, S.dtype, z.dtype) == (dtype, torch.float32, torch.float32)
        torch.testing.assert_close(out.double(), want[:, -1:], **limits)
    with torch.autocast("cpu", torch.bfloat16):
        again = power_retention_inference(Q[:, -1:], *(x[:, 9:] for x in (K, V, log_G)), *state)[0]
    assert torch.equal(again, power_retention_inference(Q[:, -1:], *(x[:, 9:] for x in (K, V, log_G)), *state)[0])


def test_gates_that_let_nothing_pass():
    """A gate may be −∞: nothing before it counts."""
    Q, K, V, log_G = sequence()
    log_G[:, 12] = -torch.inf
    want = truth(Q[:, 12:], K[:, 12:], V[:, 12:], log_G[:, 12:])
    close(power_retention(Q, K, V, log_G, chunk_size=5)[:, 12:], want)
    close(power_retention_inference(Q[:, -3:], K, V, log_G)[0], want[:, -3:])
    _, S, z = power_retention(*(x[:, :8] for x in (Q, K, V, log_G)), return_final_state=True)
    close(power_retention_inference(Q[:, -3:], *(x[:, 8:] for x in (K, V, log_G)), S, z)[0], want[:, -3:])


@pytest.mark.parametrize("batch", [0, 2])
def test_empty(batch):
    given = [x[:batch, :0] for x in sequence()]
    out, S, z = power_retention(*given, return_final_state=True)
    assert (out.shape, S.shape, z.shape) == ((batch, 0, HQ, E), (batch, H, 24, E), (batch, H, 24))
    assert power_retention_inference(*given, S, z)[0].shape == out.shape
    one = [x[:batch, :1] for x in sequence()]
    assert power_retention_inference(*one, S, z, switch_over_seq_len=1)[1].shape == S.shape


def test_one_graph():
    torch._dynamo.reset()
    given = sequence()

    def decode(Q, K, V, log_G, query):
        out, S, z = power_retention(Q, K, V, log_G, return_final_state=True, chunk_size=8)
        last, S, z = power_retention_inference(query, K, V, log_G, S, z, switch_over_seq_len=4)
        return out, last, S, z

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for got, want in zip(*(f(*given, given[0][:, :1]) for f in (compiled, decode))):
        close(got, want)
    torch._dynamo.reset()


Q, K, V, G = sequence()
_, S, Z = power_retention(Q, K, V, G, return_final_state=True)
REFUSES = {
    "Q_none": (dict(Q=None), TypeError, "Q must be a tensor [B, "),
    "K_width": (dict(K=K[..., :3]), ValueError, "K must be [B, T, h, d] with"),
    "V_rows": (dict(V=V[:, :3]), ValueError, "V must be [B, T, h, e] with"),
    "heads": (dict(Q=Q[:, :, :3]), ValueError, "Q must have a multiple of the heads of K and V, 2"),
    "gates": (dict(log_G=G[..., :1]), ValueError, "log_G must be [B, T, h] with"),
    "long_rows": (
        dict(Q=torch.ones(B, T, HQ, 257), K=torch.ones(B, T, H, 257)),
        ValueError,
        "Q must have rows of 1 to 256 numbers; got 257",
    ),
    "no_rows": (dict(Q=Q[..., :0], K=K[..., :0]), ValueError, "Q must have rows of 1 to 256 numbers; got 0"),
    "long_values": (dict(V=torch.ones(B, T, H, 257)), ValueError, "V must have rows of 1 to 256 numbers; got 257"),
    "deg": (dict(deg=3), ValueError, "deg must be 2 or 4; got 3"),
    "deg_6": (dict(deg=6), ValueError, "deg must be 2 or 4; got 6"),
    "switch": (dict(switch_over_seq_len=0), ValueError, "switch_over_seq_len must be an integer >= 1; got 0"),
    "scale": (dict(scale="1"), TypeError, "scale must be a number; got"),
    "half_a_state": (dict(sum_of_keys=None), TypeError, "initial_state and sum_of_keys must be given together; got no sum_of_keys"),
    "other_half": (
        dict(initial_state=None),
        TypeError,
        "initial_state and sum_of_keys must be given together; got no initial_state",
    ),
    "basis": (dict(initial_state=S.new_zeros(B, H, 40, E)), ValueError, "initial_state must have D=24 rows, since d=6; got 40"),
    "state_batch": (dict(initial_state=S[:1]), ValueError, "initial_state must be [B, 2, 24, 5] with B=2 (from Q); got [1,"),
    "state_list": (dict(initial_state=[1.0]), TypeError, "initial_state must be a tensor [B, 2, 24, 5]; got list"),
    "keys_width": (dict(sum_of_keys=Z[..., :3]), ValueError, "sum_of_keys must be [B, 2, 24]"),
    "state_device": (dict(initial_state=S.to("meta")), ValueError, "initial_state must be on cpu, where Q is; got meta"),
    "fourth": (dict(deg=4), ValueError, "there is a state for deg=2 only; got deg=4"),
}


@pytest.mark.parametrize("function", [power_retention, power_retention_inference], ids=lambda f: f.__name__)
def test_refuses_growing_gates(function):
    with pytest.raises(ValueError, match=f"{function.__name__}: log_G must be at most 0; got "):
        function(Q, K, V, G.neg())


@pytest.mark.parametrize("function", [power_retention, power_retention_inference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", REFUSES)
def test_refuses(function, name):
    wrong, error, text = REFUSES[name]
    right = dict(Q=Q, K=K, V=V, log_G=G, initial_state=S, sum_of_keys=Z)
    assert_refused(error, f"{function.__name__}: {text}", function, **{**right, **wrong})


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(K=None), TypeError, "K and V must be given together; got no K"),
        (dict(K=None, V=None), TypeError, "without K and V, there must be queries and an initial_state; got None"),
        (dict(K=None, V=None, Q=None, initial_state=S), TypeError, "Q must be a tensor [B, Tq, hq, d]; got NoneType"),
        (dict(K=None, V=None, Q=Q[0], initial_state=S), ValueError, "Q must have 4 dimensions [B, Tq, hq, d]; got 3"),
        (
            dict(K=None, V=None, Q=Q[:1], initial_state=S),
            ValueError,
            "initial_state must be [B, h, D, e] with B=1 (from Q); got [2",
        ),
        (dict(K=K[:, :2], V=V[:, :2]), ValueError, f"K must contain the keys of all {T} queries; got 2 rows"),
        (dict(deg=4, switch_over_seq_len=T), ValueError, "there is a state for deg=2 only; got deg=4"),
    ],
    ids=str,
)
def test_inference_refuses(wrong, error, text):
    assert_refused(error, f"power_retention_inference: {text}", power_retention_inference, **{**dict(Q=Q, K=K, V=V), **wrong})


def test_sequences_refuse():
    text = "power_retention: return_final_state must be True or False; got"
    assert_refused(TypeError, text, power_retention, Q, K, V, return_final_state=1)
    text = "power_retention: there is a state for deg=2 only; got deg=4"
    assert_refused(ValueError, text, power_retention, Q, K, V, return_final_state=True, deg=4)
    assert power_retention(Q, K, V, return_final_state=True, deg=4, switch_over_seq_len=T + 1)[1:] == (None, None)
    assert_refused(ValueError, "power_retention: chunk_size must be an integer >= 1; got 0", power_retention, Q, K, V, chunk_size=0)
