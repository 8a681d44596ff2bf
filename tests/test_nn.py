"""Layers: the original layers' state dicts, and the results and gradients of twins in plain PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import plain
import sonde.nn
from helpers.devices import OneDevice
from helpers.refusals import assert_refused
from sonde.compat import sparsedrive
from sonde.nn import deformable_attention, sparse_boxes

CALLED_IN = {"ms_deform_attn": deformable_attention, "deformable_aggregation": sparse_boxes}  # the module that calls the operator
LEVELS = [(6, 9), (3, 5), (2, 2)]
S = sum(h * w for h, w in LEVELS)


def filled(layer: nn.Module) -> nn.Module:
    """Fills parameters with random values, so that no zeros or equal weights hide a mistake."""
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.double()


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def assert_same(layer: nn.Module, twin: nn.Module, inputs: list[Tensor], call, call_twin=None) -> None:
    """The twin loads the layer's state dict; results and the gradients of all inputs and parameters agree."""
    twin.load_state_dict(layer.state_dict(), strict=True)
    found = []
    for module, run in ((layer, call), (twin, call_twin or call)):
        out = run(module)
        names = [f"input {i}" for i in range(len(inputs))] + [n for n, p in module.named_parameters() if p.requires_grad]
        wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append(dict(zip(["value", *names], [out, *torch.autograd.grad(out, wanted, weight)])))
    assert found[0].keys() == found[1].keys()
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
        assert want.abs().max() > 1e-6, f"{name} is tested by zeros"


# ---- GridSample ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_grid_sample(mode, padding_mode, align_corners):
    input, grid = torch.randn(2, 3, 4, 5), 3 * torch.rand(2, 6, 2, 2) - 1.5
    layer = sonde.nn.GridSample(mode, padding_mode, align_corners)
    torch.testing.assert_close(layer(input, grid), F.grid_sample(input, grid, mode, padding_mode, align_corners))
    assert repr(layer) == f"GridSample(mode='{mode}', padding_mode='{padding_mode}', align_corners={align_corners})"
    assert not layer.state_dict()


@pytest.mark.parametrize(("wrong", "error"), [(dict(mode="biliner"), ValueError), (dict(align_corners=None), TypeError)])
def test_misspelt_grid_sample(wrong, error):
    """The error is raised when the layer is constructed, not at its first call."""
    with pytest.raises(error, match=f"{next(iter(wrong))} must be"):
        sonde.nn.GridSample(**wrong)


# ---- MSDeformAttn -------------------------------------------------------------------------------------------------------


def attention(layer=sonde.nn.MSDeformAttn, **options):
    return layer(**{**dict(d_model=16, n_levels=3, n_heads=4, n_points=2), **options})


def test_state_dict_of_deformable_detr():
    """Names and shapes match Deformable-DETR's own, at its own sizes."""
    shapes = {name: tuple(x.shape) for name, x in sonde.nn.MSDeformAttn().state_dict().items()}
    assert shapes == {
        "sampling_offsets.weight": (256, 256),
        "sampling_offsets.bias": (256,),
        "attention_weights.weight": (128, 256),
        "attention_weights.bias": (128,),
        "value_proj.weight": (256, 256),
        "value_proj.bias": (256,),
        "output_proj.weight": (256, 256),
        "output_proj.bias": (256,),
    }


def test_initial_values_of_deformable_detr():
    """The eight heads point in the eight directions of a square, one pixel further with each point; seeded weights match the
    original's."""
    torch.manual_seed(7)
    layer = sonde.nn.MSDeformAttn(16, 3, 8, 4)
    bias = layer.sampling_offsets.bias.detach().view(8, 3, 4, 2)
    square = torch.tensor([[1.0, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]])
    for level in range(3):
        for point in range(4):
            torch.testing.assert_close(bias[:, level, point], (point + 1) * square)
    for name in ("sampling_offsets.weight", "attention_weights.weight"):
        assert not layer.get_parameter(name).any()
    for name in ("attention_weights", "value_proj", "output_proj"):
        assert not layer.get_parameter(f"{name}.bias").any()

    torch.manual_seed(7)
    made = [nn.Linear(16, n) for n in (8 * 3 * 4 * 2, 8 * 3 * 4, 16, 16)]
    for name, like in zip(("value_proj", "output_proj"), made[2:]):
        nn.init.xavier_uniform_(like.weight)
        assert torch.equal(layer.get_parameter(f"{name}.weight"), like.weight)


@pytest.mark.parametrize("coordinates", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_twin(coordinates, masked):
    torch.manual_seed(0)
    query, pixels = leaf(2, 7, 16), leaf(2, S, 16)
    reference = torch.rand(2, 7, 3, coordinates, dtype=torch.float64).requires_grad_()
    mask = torch.rand(2, S) < 0.3 if masked else None
    assert_same(
        filled(attention()),
        attention(plain.MSDeformAttn).double(),
        [query, pixels, reference],
        lambda layer: layer(query, reference, pixels, LEVELS, None, mask),
    )


def test_shapes_are_python_integers_or_tensors():
    """The same bits however the levels are given."""
    torch.manual_seed(0)
    layer, query, pixels = filled(attention()), leaf(1, 5, 16), leaf(1, S, 16)
    reference = torch.rand(1, 5, 3, 2, dtype=torch.float64)
    want = layer(query, reference, pixels, LEVELS)
    starts = torch.tensor([0, 54, 69])
    assert torch.equal(layer(query, reference, pixels, torch.tensor(LEVELS), starts), want)
    assert torch.equal(layer(query, reference, pixels, torch.tensor(LEVELS, dtype=torch.int32), starts.int()), want)
    assert torch.equal(layer(query, reference, pixels, tuple(LEVELS), [0, 54, 69]), want)


def assert_one_graph(layer, make) -> None:
    """The layer and its gradients compile to one graph for any number of queries; `make` gives the arguments and what to
    differentiate by."""
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for Q, stance in ((6, "default"), (9, "fail_on_recompile")):
        args, wanted = make(Q)
        for x in tree_leaves(args):
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == Q:
                torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance(stance):
            got = compiled(*args)
        want = layer(*args)
        torch.testing.assert_close(got, want)
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), wanted) for out in (got, want))):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tensors", [False, True], ids=["integers", "tensors"])
def test_attention_is_one_graph(tensors):
    levels = (torch.tensor(LEVELS), torch.tensor([0, 54, 69])) if tensors else (LEVELS, None)

    def make(Q):
        query, pixels = leaf(2, Q, 16), leaf(2, S, 16)
        return (query, torch.rand(2, Q, 3, 2, dtype=torch.float64), pixels, *levels), [query, pixels]

    assert_one_graph(filled(attention()), make)


@pytest.mark.parametrize("coordinates", [2, 4])
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_coordinates_stay_float32(how, coordinates, monkeypatch):
    """Coordinates are not cast under autocast: in half precision they would be pixels off."""
    seen = spy(monkeypatch, "ms_deform_attn")
    layer, reference = attention(), torch.rand(1, 5, 3, coordinates)
    query, pixels = torch.randn(1, 5, 16), torch.randn(1, S, 16)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(query, reference, pixels, LEVELS)
    else:
        out = layer.bfloat16()(query.bfloat16(), reference.bfloat16(), pixels.bfloat16(), LEVELS)
    assert out.dtype == torch.bfloat16
    value, _, _, locations, logits = seen[0]
    assert (value.dtype, locations.dtype, logits.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


def test_attention_refuses():
    with pytest.raises(ValueError, match="d_model must be a multiple of n_heads; got 30 and 8"):
        sonde.nn.MSDeformAttn(30)
    with pytest.raises(ValueError, match=r"reference_points must be points \[B, Q, L, 2\] or boxes .* got \[1, 5, 3, 3\]"):
        attention()(torch.randn(1, 5, 16), torch.rand(1, 5, 3, 3), torch.randn(1, S, 16), LEVELS)
    for mask in (torch.zeros(1, S), torch.zeros(1, S + 1, dtype=torch.bool), torch.zeros(S, dtype=torch.bool)):
        with pytest.raises(ValueError, match=rf"input_padding_mask must be bool \[1, {S}\], .* got torch"):
            attention()(torch.zeros(1, 5, 16), torch.zeros(1, 5, 3, 2), torch.zeros(1, S, 16), LEVELS, None, mask)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (dict(n_heads=0), ValueError),
        (dict(n_heads=-4), ValueError),
        (dict(d_model=0), ValueError),
        (dict(n_levels=0), ValueError),
        (dict(n_points=-1), ValueError),
        (dict(n_heads=True), TypeError),
        (dict(n_points=2.0), TypeError),
        (dict(d_model="16"), TypeError),
        (dict(n_levels=None), TypeError),
    ],
    ids=str,
)
def test_attention_of_no_such_sizes(wrong, error):
    with pytest.raises(error, match=rf"MSDeformAttn: {next(iter(wrong))} must be an integer >= 1; got"):
        attention(**wrong)


POINTS, WRONG_LEVELS = "reference_points must be", "input_spatial_shapes must be integers [L, 2]"
ATTENTION_REFUSES = {
    "query_list": (dict(query=[1.0]), TypeError, "query must be a tensor [B, Q, 16]"),
    "query_none": (dict(query=None), TypeError, "query must be a tensor"),
    "query_rank": (dict(query=torch.zeros(5, 16)), ValueError, "query must have 3 dimensions"),
    "query_channels": (dict(query=torch.zeros(1, 5, 8)), ValueError, "query must be [B, Q, 16]"),
    "query_integers": (dict(query=torch.zeros(1, 5, 16).long()), TypeError, "query must be float16"),
    "pixels_list": (dict(input_flatten=[torch.zeros(1, S, 16)]), TypeError, "input_flatten must be a tensor [B, S, 16]"),
    "pixels_batch": (dict(input_flatten=torch.zeros(2, S, 16)), ValueError, "input_flatten must be [B, S, 16] with B=1"),
    "pixels_device": (dict(input_flatten=torch.zeros(1, S, 16, device="meta")), ValueError, "input_flatten must be on cpu"),
    "pixels_rows": (dict(input_flatten=torch.zeros(1, S + 1, 16)), ValueError, f"input_spatial_shapes must sum to the {S + 1}"),
    "points_list": (dict(reference_points=[[0.5, 0.5]]), TypeError, f"{POINTS} a tensor"),
    "points_last": (dict(reference_points=torch.zeros(1, 5, 3, 3)), ValueError, f"{POINTS} points [B, Q, L, 2] or boxes"),
    "points_rank": (dict(reference_points=torch.zeros(5, 3, 2)), ValueError, f"{POINTS} points [B, Q, L, 2] or boxes"),
    "points_levels": (dict(reference_points=torch.zeros(1, 5, 2, 2)), ValueError, f"{POINTS} [B, Q, L, 2] with B=1, Q=5, L=3"),
    "points_queries": (dict(reference_points=torch.zeros(1, 4, 3, 4)), ValueError, f"{POINTS} [B, Q, L, 4] with B=1, Q=5, L=3"),
    "points_integers": (dict(reference_points=torch.zeros(1, 5, 3, 2).int()), TypeError, f"{POINTS} float16"),
    "points_device": (dict(reference_points=torch.zeros(1, 5, 3, 2, device="meta")), ValueError, f"{POINTS} on cpu"),
    "shapes_none": (dict(input_spatial_shapes=None), TypeError, WRONG_LEVELS),
    "shapes_text": (dict(input_spatial_shapes="x"), TypeError, WRONG_LEVELS),
    "shapes_floats": (dict(input_spatial_shapes=torch.tensor(LEVELS).float()), TypeError, "input_spatial_shapes must be an int64"),
    "shapes_bools": (dict(input_spatial_shapes=[(True, True)] * 3), TypeError, WRONG_LEVELS),
    "shapes_triples": (dict(input_spatial_shapes=[(1, 2, 3)] * 3), ValueError, WRONG_LEVELS),
    "shapes_levels": (
        dict(input_spatial_shapes=LEVELS[:2]),
        ValueError,
        "input_spatial_shapes must be [L, 2] with L=3 (from n_levels)",
    ),
    "shapes_negative": (dict(input_spatial_shapes=[(-6, -9), *LEVELS[1:]]), ValueError, "input_spatial_shapes must be (h, w)"),
    "starts_levels": (dict(input_level_start_index=[0, 54]), ValueError, "input_level_start_index must be [L] = [3]"),
    "starts_outside": (dict(input_level_start_index=[0, 54, S]), ValueError, "input_level_start_index must leave every level"),
    "starts_overlap": (
        dict(input_level_start_index=[0, 0, 0]),
        ValueError,
        "input_level_start_index must give every level rows of its own",
    ),
    "starts_text": (dict(input_level_start_index="0"), TypeError, "input_level_start_index must be integers [L]"),
    "mask_text": (dict(input_padding_mask="x"), TypeError, f"input_padding_mask must be bool [1, {S}]"),
    "mask_list": (dict(input_padding_mask=[[True] * S]), TypeError, f"input_padding_mask must be bool [1, {S}]"),
    "mask_floats": (dict(input_padding_mask=torch.zeros(1, S)), ValueError, f"input_padding_mask must be bool [1, {S}]"),
    "mask_shape": (dict(input_padding_mask=torch.zeros(1, S, 1).bool()), ValueError, f"input_padding_mask must be bool [1, {S}]"),
    "mask_device": (
        dict(input_padding_mask=torch.zeros(1, S, device="meta").bool()),
        ValueError,
        "input_padding_mask must be bool",
    ),
}


@pytest.mark.parametrize("name", ATTENTION_REFUSES)
def test_attention_refuses_arguments(name):
    wrong, error, text = ATTENTION_REFUSES[name]
    right = dict(query=torch.zeros(1, 5, 16), reference_points=torch.zeros(1, 5, 3, 2), input_flatten=torch.zeros(1, S, 16))
    assert_refused(error, f"MSDeformAttn: {text}", attention(), **{**right, "input_spatial_shapes": LEVELS, **wrong})


def test_reference_points_broadcast():
    """One reference box serves all levels, as in RT-DETR."""
    torch.manual_seed(0)
    layer, query, pixels = filled(attention()), leaf(2, 5, 16), leaf(2, S, 16)
    box = torch.rand(2, 5, 1, 4, dtype=torch.float64)
    assert torch.equal(layer(query, box, pixels, LEVELS), layer(query, box.expand(2, 5, 3, 4), pixels, LEVELS))


# ---- key points and DeformableFeatureAggregation ------------------------------------------------------------------------

FIXED = [[0.0, 0.0, 0.0], [0.45, 0.0, 0.0], [0.0, -0.45, 0.1]]


def boxes(count: int) -> Tensor:
    """Boxes in front of the cameras of `cameras`, at any yaw."""
    place = torch.rand(2, count, 3, dtype=torch.float64) * torch.tensor([6.0, 4.0, 6.0]) - torch.tensor([3.0, 2.0, -3.0])
    size, yaw = 0.3 * torch.randn(2, count, 3), 2 * math.pi * torch.rand(2, count, 1)
    return torch.cat([place, size, yaw.sin(), yaw.cos(), torch.randn(2, count, 3)], -1).double().requires_grad_()


def cameras(cams: int) -> dict[str, Tensor]:
    """Cameras side by side that look along z, with some boxes outside their images; the last looks back and sees none."""
    projection = torch.eye(4, dtype=torch.float64).repeat(2, cams, 1, 1)
    projection[:, :, 0, 0] = projection[:, :, 1, 1] = 60
    projection[:, :, 0, 2], projection[:, :, 1, 2] = 32, 24
    projection[:, :, 0, 3] = torch.arange(cams) * 20.0
    projection[:, -1, :, 2] *= -1
    return {"projection_mat": projection, "image_wh": torch.tensor([64.0, 48.0], dtype=torch.float64).expand(2, cams, 2)}


@pytest.mark.parametrize("learnable", [0, 2])
def test_key_points_equal_twin(learnable):
    torch.manual_seed(0)
    layer = sonde.nn.SparseBox3DKeyPointsGenerator(8, learnable, FIXED)
    assert layer.num_pts == 3 + learnable
    assert not layer.fix_scale.requires_grad
    assert layer.fix_scale.tolist() == torch.tensor(FIXED).tolist()
    names = {"fix_scale": (3, 3), **({"learnable_fc.weight": (6, 8), "learnable_fc.bias": (6,)} if learnable else {})}
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == names
    anchor, feature = boxes(5), leaf(2, 5, 8)
    inputs = [anchor, feature] if learnable else [anchor]
    twin = plain.SparseBox3DKeyPointsGenerator(8, learnable, FIXED).double()
    assert_same(filled(layer), twin, inputs, lambda layer: layer(anchor, feature))
    assert layer(anchor).shape == (2, 5, 3, 3)
    assert sonde.nn.SparseBox3DKeyPointsGenerator()(anchor.float())[:, :, 0].equal(anchor[..., :3].float())


def aggregation(layer=sonde.nn.DeformableFeatureAggregation, **options):
    points = dict(num_learnable_pts=2, fix_scale=FIXED)
    sizes = dict(embed_dims=16, num_groups=4, num_levels=2, num_cams=3, use_camera_embed=True, kps_generator=points)
    return layer(**{**sizes, **options})


def scene(A: int = 12) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    maps = [leaf(2, 3, 16, 6, 8), leaf(2, 3, 16, 3, 4)]
    return [leaf(2, A, 16), boxes(A), leaf(2, A, 16)], maps, cameras(3)


def test_state_dict_of_sparsedrive():
    """Names and shapes match SparseDrive's own, at its own sizes."""
    points = dict(type="SparseBox3DKeyPointsGenerator", num_learnable_pts=6, fix_scale=[[0, 0, 0]] + 6 * [[0.45, 0, 0]])
    options = dict(attn_drop=0.15, use_deformable_func=True, residual_mode="cat", kps_generator=points)
    layer = sonde.nn.DeformableFeatureAggregation(256, 8, 4, 6, use_camera_embed=True, **options)
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {
        "kps_generator.fix_scale": (7, 3),
        "kps_generator.learnable_fc.weight": (18, 256),
        "kps_generator.learnable_fc.bias": (18,),
        "output_proj.weight": (256, 256),
        "output_proj.bias": (256,),
        "camera_encoder.0.weight": (256, 12),
        "camera_encoder.0.bias": (256,),
        "camera_encoder.2.weight": (256,),
        "camera_encoder.2.bias": (256,),
        "camera_encoder.3.weight": (256, 256),
        "camera_encoder.3.bias": (256,),
        "camera_encoder.5.weight": (256,),
        "camera_encoder.5.bias": (256,),
        "weights_fc.weight": (8 * 4 * 13, 256),
        "weights_fc.bias": (8 * 4 * 13,),
    }
    assert not layer.weights_fc.weight.any()
    assert not layer.weights_fc.bias.any()
    plainer = sonde.nn.DeformableFeatureAggregation(256, 8, 4, 6, **options)
    assert tuple(plainer.weights_fc.weight.shape) == (8 * 6 * 4 * 13, 256)
    assert "camera_encoder.0.weight" not in plainer.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(use_camera_embed=False, residual_mode="cat"),
        dict(use_deformable_func=False),
        dict(attn_drop=0.4),
        dict(kps_generator=None),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_aggregation_equals_twin(options):
    (instance, anchor, embed), maps, metas = scene()

    def call(layer):
        torch.manual_seed(3)  # for the dropout
        return layer(instance, anchor, embed, maps, metas)

    layer, twin = filled(aggregation(**options)), aggregation(plain.DeformableFeatureAggregation, **options).double()
    assert_same(layer, twin, [instance, anchor, embed, *maps], call)
    if "attn_drop" in options:
        out = call(layer)
        assert not torch.equal(call(layer.eval()), out)
    if "use_deformable_func" in options:
        out, layer.use_deformable_func = call(layer), True
        assert not torch.allclose(call(layer), out)


def test_aggregation_without_image_sizes():
    """Without image sizes the projection must map to [0, 1] already."""
    inputs, maps, metas = scene()
    scaled = metas["projection_mat"].clone()
    scaled[:, :, :2] /= metas["image_wh"][..., None]
    layer = filled(aggregation(use_camera_embed=False))
    torch.testing.assert_close(layer(*inputs, maps, {"projection_mat": scaled}), layer(*inputs, maps, metas))


def test_maps_are_formatted_once_for_many_layers():
    """Maps, formatted rows with tuples and formatted rows with tensors give the same bits."""
    inputs, maps, metas = scene()
    layer = filled(aggregation())
    want = layer(*inputs, maps, metas)
    assert torch.equal(layer(*inputs, sonde.feature_maps_format(maps), metas), want)
    assert torch.equal(layer(*inputs, sparsedrive.feature_maps_format(maps), metas), want)


def test_a_generator_of_ones_own():
    """Any module with `num_pts` that makes points from anchors and features can generate the key points."""

    class Polyline(nn.Module):
        num_pts = 4

        def forward(self, anchor, instance_feature):
            return anchor.unflatten(-1, (4, 3))

    (instance, anchor, embed), maps, metas = scene()
    anchor = anchor[..., :3].detach().repeat(1, 1, 4).requires_grad_()
    layer = filled(aggregation(kps_generator=Polyline()))
    out = layer(instance, anchor, embed, maps, metas)
    out.square().sum().backward()
    assert out.shape == (2, 12, 16)
    assert anchor.grad.abs().sum() > 0


def test_aggregation_is_one_graph():
    """From maps to the result in one graph."""

    def make(A):
        inputs, maps, metas = scene(A)
        return (*inputs, maps, metas), [*inputs, *maps]

    assert_one_graph(filled(aggregation()), make)


def test_projection_stays_float32(monkeypatch):
    """The projection is not cast under autocast: half-precision products would move points by pixels."""
    seen = spy(monkeypatch, "deformable_aggregation")
    inputs, maps, metas = scene()
    inputs, maps, metas = [x.float() for x in inputs], [x.float() for x in maps], {k: x.float() for k, x in metas.items()}
    layer = filled(aggregation(kps_generator=dict(fix_scale=FIXED))).float()
    layer(*inputs, maps, metas)
    with torch.autocast("cpu", torch.bfloat16):
        layer(*inputs, maps, metas)
    full, cast = (args[3] for args in seen)
    assert full.dtype == cast.dtype == torch.float32
    torch.testing.assert_close(cast, full, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_with_exact_cameras(dtype):
    """A layer in half precision takes anchors and cameras in float32, in which alone they are exact enough."""
    inputs, maps, metas = scene()
    feature, anchor, embed = inputs
    layer = filled(aggregation(use_camera_embed=True))
    want = layer(*inputs, maps, metas)
    metas = {k: x.float() for k, x in metas.items()}
    out = layer.to(dtype)(feature.to(dtype), anchor.float(), embed.to(dtype), [x.to(dtype) for x in maps], metas)
    assert out.dtype == dtype
    torch.testing.assert_close(out.to(want.dtype), want, rtol=0.1, atol=0.1)


def test_aggregation_refuses():
    with pytest.raises(ValueError, match="embed_dims must be a multiple of num_groups; got 16 and 3"):
        aggregation(num_groups=3)
    with pytest.raises(ValueError, match="residual_mode must be 'add', 'cat' or None; got 'sum'"):
        aggregation(residual_mode="sum")
    with pytest.raises(ValueError, match=r"temporal_fusion_module must be None, .* got 'x'"):
        aggregation(temporal_fusion_module="x")
    aggregation(temporal_fusion_module=None)
    with pytest.raises(ValueError, match="'SparsePoint3DKeyPointsGenerator' is not known here; pass the module itself"):
        aggregation(kps_generator=dict(type="SparsePoint3DKeyPointsGenerator"))


class NoPoints(nn.Module):
    """A generator that does not say how many points it makes."""


class WrongPoints(nn.Module):
    num_pts = 4

    def forward(self, anchor, instance_feature):
        return torch.zeros(2, 12, 5, 3, dtype=torch.float64)


WRONG_OPTIONS = {
    "no_groups": (dict(num_groups=0), ValueError, "num_groups must be an integer >= 1"),
    "groups_bool": (dict(num_groups=True), TypeError, "num_groups must be an integer >= 1"),
    "no_cameras": (dict(num_cams=0), ValueError, "num_cams must be an integer >= 1"),
    "levels_negative": (dict(num_levels=-1), ValueError, "num_levels must be an integer >= 1"),
    "channels_float": (dict(embed_dims=16.0), TypeError, "embed_dims must be an integer >= 1"),
    "drop_text": (dict(proj_drop="0.1"), TypeError, "proj_drop must be a number in [0, 1]"),
    "drop_large": (dict(proj_drop=1.5), ValueError, "proj_drop must be a number in [0, 1]"),
    "drop_nan": (dict(attn_drop=math.nan), ValueError, "attn_drop must be a number in [0, 1)"),
    "drop_all": (dict(attn_drop=1.0), ValueError, "attn_drop must be a number in [0, 1)"),
    "drop_bool": (dict(attn_drop=True), TypeError, "attn_drop must be a number in [0, 1)"),
    "flag": (dict(use_camera_embed="yes"), TypeError, "use_camera_embed must be True or False"),
    "function": (dict(use_deformable_func=None), TypeError, "use_deformable_func must be True or False"),
    "residual": (dict(residual_mode=[1]), ValueError, "residual_mode must be 'add', 'cat' or None"),
    "generator_list": (dict(kps_generator=[1]), TypeError, "kps_generator must be a module"),
    "generator_text": (dict(kps_generator="points"), TypeError, "kps_generator must be a module"),
    "generator_option": (dict(kps_generator=dict(pts=3)), ValueError, "kps_generator must be options of"),
    "generator_without_count": (dict(kps_generator=NoPoints()), TypeError, "kps_generator must have num_pts"),
    "learnable": (dict(kps_generator=dict(num_learnable_pts=-1)), ValueError, "num_learnable_pts must be an integer >= 0"),
    "learnable_bool": (dict(kps_generator=dict(num_learnable_pts=True)), TypeError, "num_learnable_pts must be an integer >= 0"),
    "fixed_text": (dict(kps_generator=dict(fix_scale="x")), TypeError, "fix_scale must be numbers [fixed, 3]"),
    "fixed_ragged": (dict(kps_generator=dict(fix_scale=[[0, 0, 0], [1]])), TypeError, "fix_scale must be numbers [fixed, 3]"),
    "fixed_flat": (dict(kps_generator=dict(fix_scale=[0, 0, 0])), ValueError, "fix_scale must be [fixed, 3]"),
    "fixed_pairs": (dict(kps_generator=dict(fix_scale=[[0, 0]])), ValueError, "fix_scale must be [fixed, 3]"),
    "fixed_none": (dict(kps_generator=dict(fix_scale=torch.zeros(0, 3))), ValueError, "fix_scale must have a point"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_aggregation_of_no_such_options(name):
    wrong, error, text = WRONG_OPTIONS[name]
    with pytest.raises(error) as found:
        aggregation(**wrong)
    assert text in str(found.value)
    assert "got " in str(found.value)


def of_metas(**changes):
    """The metas of `scene` with some changed; None leaves one out."""
    metas = {**scene()[2], **changes}
    return dict(metas={key: x for key, x in metas.items() if x is not None})


def of_rows(**changes):
    """Formatted maps with some of the three parts changed."""
    formatted = dict(zip(("features", "shapes", "starts"), sonde.feature_maps_format(scene()[1])))
    return dict(feature_maps=list({**formatted, **changes}.values()))


ROW, PROJECTION, SIZES = torch.zeros(2, 12, 16), "metas['projection_mat'] must be", "metas['image_wh'] must be"
AGGREGATION_REFUSES = {
    "instance_list": (dict(instance_feature=[1]), TypeError, "instance_feature must be a tensor [B, A, 16]"),
    "instance_channels": (dict(instance_feature=torch.zeros(2, 12, 8)), ValueError, "instance_feature must be [B, A, 16]"),
    "embed_none": (dict(anchor_embed=None), TypeError, "anchor_embed must be a tensor [B, A, 16]"),
    "embed_anchors": (dict(anchor_embed=torch.zeros(2, 11, 16)), ValueError, "anchor_embed must be [B, A, 16] with B=2"),
    "anchor_none": (dict(anchor=None), TypeError, "anchor must be a tensor"),
    "anchor_short": (dict(anchor=torch.zeros(2, 12, 7)), ValueError, "anchor must be boxes"),
    "anchor_rank": (dict(anchor=torch.zeros(12, 11)), ValueError, "anchor must have 3 dimensions"),
    "anchor_integers": (dict(anchor=torch.zeros(2, 12, 11).long()), TypeError, "anchor must be float16"),
    "anchor_count": (dict(anchor=torch.zeros(2, 11, 11)), ValueError, "instance_feature must be [B, A, 16] with B=2"),
    "maps_none": (dict(feature_maps=None), TypeError, "feature_maps must be maps [B, cams, C, H, W]"),
    "maps_empty": (dict(feature_maps=[]), TypeError, "feature_maps must be maps [B, cams, C, H, W]"),
    "maps_tensor": (dict(feature_maps=torch.zeros(2, 3, 16, 6, 8)), TypeError, "feature_maps must be maps [B, cams, C, H, W]"),
    "maps_groups": (
        dict(feature_maps=[[torch.zeros(2, 3, 16, 6, 8)]]),
        TypeError,
        "sonde.compat.sparsedrive.feature_maps_format takes groups",
    ),
    "maps_text": (dict(feature_maps=["a", "b"]), TypeError, "feature_maps must be maps [B, cams, C, H, W]"),
    "maps_second": (dict(feature_maps=[torch.zeros(2, 3, 16, 6, 8), None]), TypeError, "feature_maps[1] must be a tensor"),
    "maps_rank": (dict(feature_maps=[torch.zeros(6, 16, 6, 8)] * 2), ValueError, "feature_maps[0] must have 5 dimensions"),
    "maps_levels": (dict(feature_maps=[torch.zeros(2, 3, 16, 6, 8)]), ValueError, "feature_maps must have num_levels=2"),
    "maps_cameras": (dict(feature_maps=[torch.zeros(2, 2, 16, 6, 8)] * 2), ValueError, "feature_maps[0] must be [B, 3, 16, H, W]"),
    "maps_batch": (dict(feature_maps=[torch.zeros(1, 3, 16, 6, 8)] * 2), ValueError, "feature_maps[0] must be [B, 3, 16, H, W]"),
    "maps_channels": (dict(feature_maps=[torch.zeros(2, 3, 8, 6, 8)] * 2), ValueError, "feature_maps[0] must be [B, 3, 16, H, W]"),
    "maps_device": (
        dict(feature_maps=[torch.zeros(2, 3, 16, 6, 8, device="meta")] * 2),
        ValueError,
        "feature_maps[0] must be on cpu",
    ),
    "rows_two": (dict(feature_maps=[ROW, [[(3, 4)]]]), ValueError, "(features, spatial_shapes, level_starts)"),
    "rows_batch": (of_rows(features=torch.zeros(1, 180, 16)), ValueError, "feature_maps[0] must be [B, S, 16]"),
    "rows_count": (
        of_rows(features=torch.zeros(2, 181, 16)),
        ValueError,
        "feature_maps[1] must sum to the 181 rows of feature_maps[0]",
    ),
    "rows_shapes": (of_rows(shapes="x"), TypeError, "feature_maps[1] must be integers [cams, L, 2]"),
    "rows_cameras": (of_rows(shapes=[[(6, 8), (3, 4)]]), ValueError, "feature_maps["),
    "rows_starts": (of_rows(starts=[[0, 48]]), ValueError, "feature_maps[2] must be [cams, L]"),
    "metas_none": (dict(metas=None), TypeError, "metas must be a dictionary with 'projection_mat'"),
    "metas_list": (dict(metas=[{}]), TypeError, "metas must be a dictionary with 'projection_mat'"),
    "metas_tensor": (dict(metas=torch.eye(4)), TypeError, "metas must be a dictionary with 'projection_mat'"),
    "metas_empty": (dict(metas={}), ValueError, "metas must have 'projection_mat'"),
    "metas_without": (of_metas(projection_mat=None), ValueError, "metas must have 'projection_mat'"),
    "projection_none": (dict(metas={"projection_mat": None}), TypeError, f"{PROJECTION} a tensor"),
    "projection_list": (of_metas(projection_mat=[torch.eye(4)] * 3), TypeError, f"{PROJECTION} a tensor"),
    "projection_square": (of_metas(projection_mat=torch.zeros(2, 3, 3, 3)), ValueError, f"{PROJECTION} [B, 3, 3, 4] with B=2"),
    "projection_rank": (of_metas(projection_mat=torch.zeros(3, 4, 4)), ValueError, f"{PROJECTION} [B, 3, 4, 4] with B=2"),
    "projection_cameras": (of_metas(projection_mat=torch.zeros(2, 6, 4, 4)), ValueError, f"{PROJECTION} [B, 3, 4, 4] with B=2"),
    "projection_one": (of_metas(projection_mat=torch.zeros(2, 1, 4, 4)), ValueError, f"{PROJECTION} [B, 3, 4, 4] with B=2"),
    "projection_batch": (of_metas(projection_mat=torch.zeros(3, 3, 4, 4)), ValueError, f"{PROJECTION} [B, 3, 4, 4] with B=2"),
    "projection_integers": (of_metas(projection_mat=torch.zeros(2, 3, 4, 4).long()), TypeError, f"{PROJECTION} float16"),
    "projection_device": (of_metas(projection_mat=torch.zeros(2, 3, 4, 4, device="meta")), ValueError, f"{PROJECTION} on cpu"),
    "sizes_tuple": (of_metas(image_wh=(64, 48)), TypeError, f"{SIZES} a tensor [B, cams, 2]"),
    "sizes_text": (of_metas(image_wh="64x48"), TypeError, f"{SIZES} a tensor [B, cams, 2]"),
    "sizes_flat": (of_metas(image_wh=torch.tensor([64.0, 48.0])), ValueError, f"{SIZES} [B, cams, 2] with B=2, cams=3"),
    "sizes_cameras": (of_metas(image_wh=torch.ones(2, 2, 2)), ValueError, f"{SIZES} [B, cams, 2] with B=2, cams=3"),
    "sizes_last": (of_metas(image_wh=torch.ones(2, 3, 3)), ValueError, f"{SIZES} [B, cams, 2] with B=2, cams=3"),
    "sizes_bool": (of_metas(image_wh=torch.ones(2, 3, 2).bool()), TypeError, f"{SIZES} real numbers"),
}


@pytest.mark.parametrize("name", AGGREGATION_REFUSES)
def test_aggregation_refuses_arguments(name):
    wrong, error, text = AGGREGATION_REFUSES[name]
    inputs, maps, metas = scene()
    right = dict(zip(("instance_feature", "anchor", "anchor_embed"), inputs), feature_maps=maps, metas=metas)
    assert_refused(error, text, aggregation().double(), **{**right, **wrong})


def test_points_of_a_generator_are_checked():
    inputs, maps, metas = scene()
    with pytest.raises(ValueError, match=r"kps_generator must make .* = \[2, 12, 4, 3\] .*; got a tensor \[2, 12, 5, 3\]"):
        aggregation(kps_generator=WrongPoints()).double()(*inputs, maps, metas)


def test_cameras_broadcast():
    """One rig for the whole batch, one size (also integers) for all cameras; the last row of a projection is never read."""
    inputs, maps, metas = scene()
    layer = filled(aggregation())
    want = layer(*inputs, maps, metas)
    one = {"projection_mat": metas["projection_mat"][:1, :, :3], "image_wh": torch.tensor([64, 48]).reshape(1, 1, 2)}
    torch.testing.assert_close(layer(*inputs, maps, one), want, rtol=1e-12, atol=1e-12)


def test_layers_are_shown_with_their_sizes():
    assert "d_model=16, n_levels=3, n_heads=4, n_points=2" in repr(attention())
    assert "num_groups=4, num_levels=2, num_cams=3, num_pts=5" in repr(aggregation())


# ---- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [False, True], ids=["integers", "tensors"])
def test_layers_copy_nothing_from_the_host(tensors, monkeypatch):
    def on_meta(tree):
        return tree_map_only(Tensor, lambda x: x.detach().to("meta"), tree)

    for name in ("ms_deform_attn", "deformable_aggregation"):  # the operators' own tests cover them
        monkeypatch.setattr(CALLED_IN[name], name, lambda x, shapes, starts, at, *_, **__: x.new_empty(*at.shape[:2], 16))
    levels = on_meta((torch.tensor(LEVELS), torch.tensor([0, 54, 69]))) if tensors else (LEVELS, None)
    query, reference, pixels = on_meta((leaf(2, 5, 16), leaf(2, 5, 3, 2), leaf(2, S, 16)))
    inputs, maps, metas = on_meta(scene())
    attend, look = attention().to("meta"), aggregation(attn_drop=0.1).to("meta")
    with OneDevice():
        assert attend(query.float(), reference.float(), pixels.float(), *levels).shape == (2, 5, 16)
        assert look.double()(*inputs, maps, metas).shape == (2, 12, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", [False, True], ids=["integers", "tensors"])
def test_layers_never_wait_for_the_device(tensors):
    attend, query, pixels = attention().cuda(), torch.randn(1, 5, 16).cuda(), torch.randn(1, S, 16).cuda()
    reference = torch.rand(1, 5, 3, 2).cuda()
    levels = (torch.tensor(LEVELS).cuda(), torch.tensor([0, 54, 69]).cuda()) if tensors else (LEVELS, None)
    inputs, maps, metas = scene()
    inputs, maps = [x.detach().float().cuda() for x in inputs], [x.detach().float().cuda() for x in maps]
    metas = {k: x.float().cuda() for k, x in metas.items()}
    if tensors:
        maps = [x.cuda() for x in sparsedrive.feature_maps_format(maps)]
    look = aggregation(attn_drop=0.1).cuda()

    def run():
        attend(query, reference, pixels, *levels).sum().backward()
        look(*inputs, maps, metas).sum().backward()

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spy(monkeypatch, name: str) -> list[tuple]:
    """Records the arguments of every operator call that a layer makes."""
    seen, real = [], getattr(CALLED_IN[name], name)
    monkeypatch.setattr(CALLED_IN[name], name, lambda *args, **options: seen.append(args) or real(*args, **options))
    return seen
