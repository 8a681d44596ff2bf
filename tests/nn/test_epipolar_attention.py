"""Epipolar attention against a plain twin that stores the sampled features, projects them to keys and values and takes a
softmax."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sonde.nn
from helpers.devices import OneDevice
from helpers.refusals import assert_refused
from sonde.nn import epipolar_attention

B, V, DIM, H, W = 2, 3, 12, 4, 5
NEAR, FAR = 1.0, 20.0


class Twin(nn.Module):
    """A plain version with the same parameters; it loops over views, sources and octaves."""

    def __init__(self, dim: int, heads: int, d_head: int, num_samples: int, num_octaves: int) -> None:
        super().__init__()
        self.sizes = heads, d_head, num_samples, num_octaves
        self.to_q = nn.Linear(dim, heads * d_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * d_head, bias=False)
        self.to_out = nn.Linear(heads * d_head, dim)
        if num_octaves:
            self.depth_encoding = nn.Conv2d(dim, 2 * num_octaves, 1)

    def forward(self, features: Tensor, intrinsics: Tensor, extrinsics: Tensor, near, far, sources=None) -> Tensor:
        sources = features if sources is None else sources
        views = range(features.shape[1])
        return torch.stack(
            [self.of_view(v, features[:, v], sources, intrinsics, extrinsics, near[:, v], far[:, v]) for v in views], 1
        )

    def of_view(self, v: int, features: Tensor, sources: Tensor, intrinsics, extrinsics, near: Tensor, far: Tensor) -> Tensor:
        heads, d_head, D, octaves = self.sizes
        B, _, H, W = features.shape
        points = sonde.nn.pixel_centres(H, W, dtype=features.dtype).expand(B, -1, -1)
        keys, values, encoded, masks = [], [], [], []
        for other in range(sources.shape[1]):
            if other == v:
                continue
            cameras = intrinsics[:, v], extrinsics[:, v], intrinsics[:, other, None], extrinsics[:, other, None]
            samples, depths, mask = (x[:, 0] for x in sonde.nn.epipolar_samples(points, *cameras, near, far, D))
            seen = F.grid_sample(sources[:, other], samples, align_corners=False).permute(0, 2, 3, 1)  # [B, Q, D, C]
            key, value = self.to_kv(seen).unflatten(-1, (2, heads, d_head)).unbind(-3)
            keys.append(key)
            values.append(value)
            masks.append(mask)
            bias = torch.zeros_like(depths)
            if octaves:
                t = (1 / near[:, None, None] - 1 / depths) / (1 / near - 1 / far)[:, None, None]
                channels = F.grid_sample(self.depth_encoding(sources[:, other]), samples, align_corners=False)
                for octave in range(octaves):
                    phase = 2 * math.pi * 2**octave * t
                    bias = bias + channels[:, 2 * octave] * phase.sin() + channels[:, 2 * octave + 1] * phase.cos()
            encoded.append(bias)
        key, value, bias, mask = (torch.cat(x, 2) for x in (keys, values, encoded, masks))
        query = self.to_q(features.flatten(2).transpose(1, 2)).unflatten(-1, (heads, d_head))
        logits = (torch.einsum("bqhc,bqdhc->bqhd", query, key) + bias[:, :, None]) / d_head**0.5
        weights = logits.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).nan_to_num(0)
        out = self.to_out(torch.einsum("bqhd,bqdhc->bqhc", weights, value).flatten(2))
        return out.transpose(1, 2).unflatten(2, (H, W))


def attention(cls=sonde.nn.EpipolarAttention, **options):
    return cls(**{**dict(dim=DIM, heads=2, d_head=5, num_samples=6, num_octaves=2), **options})


def rig(views: int = V, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Cameras in a row that look ahead at slightly different angles; the third sees little of what the others see."""
    extrinsics = torch.eye(4, dtype=dtype).repeat(B, views, 1, 1)
    for v in range(views):
        angle = 0.15 * (v - 1)
        extrinsics[:, v, 0, 0] = extrinsics[:, v, 2, 2] = math.cos(angle)
        extrinsics[:, v, 0, 2], extrinsics[:, v, 2, 0] = -math.sin(angle), math.sin(angle)
        extrinsics[:, v, :3, 3] = torch.tensor([0.8 * v, 0.1 * v, -0.2 * v])
    extrinsics[1, :, 0, 3] *= 3
    intrinsics = torch.tensor([[0.9, 0, 0.5], [0, 1.1, 0.5], [0, 0, 1]], dtype=dtype).repeat(B, views, 1, 1)
    return intrinsics, extrinsics


def inputs(views: int = V, dtype=torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, views, DIM, H, W, dtype=dtype), *rig(views, dtype)]


def filled(layer: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.double()


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("num_octaves", [0, 2])
@pytest.mark.parametrize("sources", [False, True], ids=["", "sources"])
def test_equals_twin(views, num_octaves, sources):
    """Values and the gradients of features, cameras, depth range and all parameters equal the twin's."""
    layer = filled(attention(num_octaves=num_octaves))
    twin = attention(Twin, num_octaves=num_octaves).double()
    twin.load_state_dict(layer.state_dict(), strict=True)
    near = torch.rand(B, views, dtype=torch.float64) + 0.5
    given = [*inputs(views), near, near + 20]
    if sources:
        given.append(torch.randn(B, views, DIM, 7, 3, dtype=torch.float64))
    given = [x.requires_grad_() for x in given]
    found = []
    for module in (layer, twin):
        out = module(*given)
        wanted = [*given, *module.parameters()]
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append([out, *torch.autograd.grad(out, wanted, weight)])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
        assert want.abs().max() > 1e-6, "tested by zeros"


def test_every_view_is_alike():
    """Permuting the views permutes the result."""
    layer, (features, intrinsics, extrinsics), order = filled(attention()), inputs(), [2, 0, 1]
    want = layer(features, intrinsics, extrinsics, NEAR, FAR)[:, order]
    got = layer(*(x[:, order] for x in (features, intrinsics, extrinsics)), NEAR, FAR)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_what_no_other_view_sees_has_the_bias():
    """With cameras back to back, or without a baseline, every query gets only the output layer's bias."""
    layer, (features, intrinsics, extrinsics) = filled(attention()), inputs(2)
    back = extrinsics.clone()
    back[:, 1, :3, :3] = back[:, 0, :3, :3] @ torch.diag(torch.tensor([-1.0, 1.0, -1.0])).double()
    for poses in (back, extrinsics[:, :1].expand(-1, 2, -1, -1)):
        features = features.detach().requires_grad_()
        out = layer(features, intrinsics, poses, NEAR, FAR)
        torch.testing.assert_close(out, layer.to_out.bias[:, None, None].expand_as(out))
        out.sum().backward()
        assert not features.grad.any()


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_coordinates_stay_float32(how, monkeypatch):
    """Coordinates are not cast under autocast: in half precision they would be pixels off."""
    seen, real = [], epipolar_attention.sample_attention
    monkeypatch.setattr(
        epipolar_attention, "sample_attention", lambda *args, **options: seen.append(args) or real(*args, **options)
    )
    layer, given = attention(), inputs(dtype=torch.float32)
    exact = layer(*given, NEAR, FAR)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(*given, NEAR, FAR)
    else:
        out = layer.bfloat16()(given[0].bfloat16(), *given[1:], NEAR, FAR)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=0.1, atol=0.03)
    _, samples, _, depths, _ = seen[1]
    assert (samples.dtype, depths.dtype) == (torch.float32, torch.float32)
    assert samples.equal(seen[0][1])
    assert depths.equal(seen[0][3])


@pytest.mark.parametrize("num_octaves", [0, 2])
def test_one_graph(num_octaves):
    """The layer and its gradients compile to one graph."""
    layer, given = filled(attention(num_octaves=num_octaves)), inputs()
    given[0].requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = [module(*given, NEAR, FAR) for module in (compiled, layer)]
    torch.testing.assert_close(*found)
    grads = [torch.autograd.grad(out.square().sum(), [given[0], *layer.parameters()]) for out in found]
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want)


def test_traced_by_torch_jit():
    """The trace records sizes as tensors; it serves other sizes of the features, too."""
    layer, (features, *cameras) = filled(attention()).requires_grad_(False), inputs()
    traced = torch.jit.trace(lambda *given: layer(*given, NEAR, FAR), (features, *cameras), check_trace=False)
    for given in (features, features[..., :-1]):
        torch.testing.assert_close(traced(given, *cameras), layer(given, *cameras, NEAR, FAR))


def test_other_sizes_of_a_compiled_layer():
    """Sizes that change become symbolic, which Inductor must be able to compile."""
    layer = filled(attention())
    features, *cameras = inputs()
    compiled = torch.compile(layer, fullgraph=True)
    for height, width in ((5, 4), (6, 7), (4, 9)):
        given = torch.nn.functional.interpolate(features.flatten(0, 1), (height, width)).unflatten(0, features.shape[:2])
        out = compiled(given, *cameras, NEAR, FAR)
        torch.testing.assert_close(out, layer(given, *cameras, NEAR, FAR))
        out.sum().backward()


def test_state_dict():
    """Names of queries, keys and values match pixelSplat's attention; heads need not divide the channels."""
    layer = sonde.nn.EpipolarAttention(128, heads=4, d_head=64)
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "to_q.weight": (256, 128),
        "to_kv.weight": (512, 128),
        "to_out.weight": (128, 256),
        "to_out.bias": (128,),
        "depth_encoding.weight": (20, 128, 1, 1),
        "depth_encoding.bias": (20,),
    }
    assert sonde.nn.EpipolarAttention(128).d_head == 32
    assert repr(attention()).splitlines()[1].strip() == "dim=12, heads=2, d_head=5, num_samples=6, num_octaves=2"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(dim=0), ValueError, "dim must be an integer >= 1"),
        (dict(heads=True), TypeError, "heads must be an integer >= 1"),
        (dict(d_head=0), ValueError, "d_head must be an integer >= 1"),
        (dict(num_samples=2.0), TypeError, "num_samples must be an integer >= 1"),
        (dict(num_octaves=-1), ValueError, "num_octaves must be an integer >= 0"),
        (dict(heads=5, d_head=None), ValueError, "dim must be a multiple of heads; got 12 and 5"),
    ],
    ids=str,
)
def test_no_such_sizes(wrong, error, text):
    with pytest.raises(error, match=f"EpipolarAttention: {text}"):
        attention(**wrong)


REFUSED = {
    "features_list": (dict(features=[1.0]), TypeError, "features must be a tensor [B, V, 12, H, W]"),
    "features_rank": (dict(features=torch.zeros(3, 12, 4, 5)), ValueError, "features must have 5 dimensions"),
    "features_channels": (dict(features=torch.zeros(2, 3, 11, 4, 5)), ValueError, "features must be [B, V, 12, H, W]"),
    "one_view": (
        dict(features=torch.zeros(2, 1, 12, 4, 5), intrinsics=torch.zeros(2, 1, 3, 3), extrinsics=torch.zeros(2, 1, 4, 4)),
        ValueError,
        "features must have at least 2 views",
    ),
    "swapped": (
        dict(intrinsics=torch.zeros(2, 3, 4, 4), extrinsics=torch.zeros(2, 3, 3, 3)),
        ValueError,
        "intrinsics must be [B, V, 3, 3]",
    ),
    "sources_list": (dict(sources=[1.0]), TypeError, "sources must be a tensor [B, V, 12, H', W']"),
    "sources_views": (dict(sources=torch.zeros(2, 2, 12, 4, 5)), ValueError, "sources must be [B, V, 12, H', W'] with B=2"),
    "poses": (dict(extrinsics=torch.zeros(2, 2, 4, 4)), ValueError, "extrinsics must be [B, V, 4, 4] with B=2"),
    "device": (dict(extrinsics=torch.zeros(2, 3, 4, 4, device="meta")), ValueError, "extrinsics must be on cpu"),
    "integers": (dict(intrinsics=torch.zeros(2, 3, 3, 3).long()), TypeError, "intrinsics must be float16"),
    "near": (dict(near=-1.0), ValueError, "near must be a finite number > 0"),
    "near_shape": (dict(near=torch.ones(2)), ValueError, "near must be [B, V] with B=2, V=3"),
    "range": (dict(near=30.0), ValueError, "near must be no more than far; got 30.0 and 20.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    wrong, error, text = REFUSED[name]
    right = dict(features=torch.zeros(2, 3, 12, 4, 5), intrinsics=torch.zeros(2, 3, 3, 3), extrinsics=torch.zeros(2, 3, 4, 4))
    assert_refused(error, f"EpipolarAttention: {text}", attention(), **{**right, "near": NEAR, "far": FAR, **wrong})


def test_copies_nothing_from_the_host(monkeypatch):
    """The operator is replaced by a stub here; its own tests cover it."""
    monkeypatch.setattr(
        epipolar_attention, "sample_attention", lambda x, samples, queries, *_, **__: x.new_empty(*queries.shape[:3], DIM)
    )
    layer, given = attention().to("meta"), [x.float().to("meta") for x in inputs()]
    with OneDevice():
        assert layer(*given, NEAR, FAR).shape == (B, V, DIM, H, W)


@pytest.mark.gpu
def test_never_waits_for_the_device():
    layer, given = attention().cuda(), [x.float().cuda() for x in inputs()]
    layer(*given, NEAR, FAR).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(*given, NEAR, FAR).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
