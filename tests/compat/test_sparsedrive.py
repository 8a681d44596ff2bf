"""SparseDrive's and Sparse4D's names: the same arguments in the same order and the same results as plain PyTorch."""

import inspect

import pytest
import torch

import plain
from helpers.operators import cotangents
from sonde.compat import sparsedrive


def maps(cams, *sizes, channels=8):
    """Maps ``[B, cams, C, H, W]``, one for each size."""
    return [torch.randn(2, cams, channels, h, w, dtype=torch.float64).requires_grad_() for h, w in sizes]


def places(cams, levels, groups=4):
    """Locations, some of them outside, and weights."""
    locations = 1.4 * torch.rand(2, 5, 3, cams, 2, dtype=torch.float64) - 0.2
    return [locations.requires_grad_(), torch.randn(2, 5, 3, cams, levels, groups, dtype=torch.float64).requires_grad_()]


def results(out, inputs):
    return [out, *torch.autograd.grad(out, inputs, cotangents([out]))]


@pytest.mark.parametrize("name", ["deformable_aggregation_function", "DeformableAggregationFunction"])
def test_function(name):
    torch.manual_seed(0)
    function = getattr(sparsedrive, name)
    function = getattr(function, "apply", function)
    given, (locations, weights) = maps(3, (5, 7), (3, 3)), places(3, 2)
    inputs = [*given, locations, weights]
    got = results(function(*sparsedrive.feature_maps_format(given), locations, weights), inputs)
    want = results(plain.deformable_aggregation(given, locations, weights), inputs)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_arguments():
    names = ["feature_maps", "spatial_shape", "scale_start_index", "sampling_location", "weights"]
    assert list(inspect.signature(sparsedrive.deformable_aggregation_function).parameters) == names
    assert list(inspect.signature(sparsedrive.DeformableAggregationFunction.apply).parameters) == names
    assert list(inspect.signature(sparsedrive.feature_maps_format).parameters) == ["feature_maps", "inverse"]
    assert sparsedrive.DeformableAggregationFunction.feature_maps_format is sparsedrive.feature_maps_format
    assert sparsedrive.CUDA_EXT_AVAILABLE is True


def test_format():
    """Rows go camera by camera, level by level, pixel by pixel; the result is a list of three tensors."""
    given = maps(2, (2, 3), (1, 2))
    formatted = sparsedrive.feature_maps_format(given)
    assert isinstance(formatted, list)
    features, shapes, starts = formatted
    assert shapes.tolist() == 2 * [[[2, 3], [1, 2]]]
    assert starts.tolist() == [[0, 6], [8, 14]]
    assert shapes.dtype == starts.dtype == torch.int64
    rows = [given[level][:, camera].flatten(2).mT for camera in range(2) for level in range(2)]
    assert torch.equal(features, torch.cat(rows, 1))


def test_format_of_groups():
    """Cameras of different sizes come as nested lists; each start points at its level's first row."""
    groups = [maps(2, (2, 3), (1, 2)), maps(1, (3, 3), (2, 1)), maps(1, (1, 1), (1, 1))]
    features, shapes, starts = sparsedrive.feature_maps_format(groups)
    assert shapes.tolist() == [[[2, 3], [1, 2]], [[2, 3], [1, 2]], [[3, 3], [2, 1]], [[1, 1], [1, 1]]]
    cameras = [[level[:, camera] for level in group] for group in groups for camera in range(group[0].shape[1])]
    for camera, levels in enumerate(cameras):
        for level, image in enumerate(levels):
            h, w = shapes[camera, level].tolist()
            start = starts[camera, level].item()
            assert torch.equal(features[:, start : start + h * w].mT.unflatten(2, (h, w)), image)


def test_aggregation_of_groups():
    """The sum over all cameras equals the sum over groups of the groups' sums."""
    torch.manual_seed(0)
    groups, (locations, weights) = [maps(2, (5, 7), (3, 3)), maps(1, (4, 4), (2, 1))], places(3, 2)
    got = sparsedrive.deformable_aggregation_function(*sparsedrive.feature_maps_format(groups), locations, weights)
    first = plain.deformable_aggregation(groups[0], locations[:, :, :, :2], weights[:, :, :, :2])
    second = plain.deformable_aggregation(groups[1], locations[:, :, :, 2:], weights[:, :, :, 2:])
    torch.testing.assert_close(got, first + second, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tuples", [False, True])
def test_inverse(tuples):
    """The inverse groups neighbouring cameras of one size again: the same bits, with gradients."""
    groups = [maps(2, (2, 3), (1, 2)), maps(1, (3, 3), (2, 1))]
    features, shapes, starts = sparsedrive.feature_maps_format(groups)
    if tuples:
        shapes, starts = shapes.tolist(), starts.tolist()
    back = sparsedrive.feature_maps_format([features, shapes, starts], inverse=True)
    assert [len(group) for group in back] == [2, 2]
    for group, original in zip(back, groups):
        for got, want in zip(group, original):
            assert torch.equal(got, want)
    back[1][0].sum().backward()
    assert groups[1][0].grad.eq(1).all()
    assert not groups[0][0].grad.any()


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


A_LIST, ROWS = "feature_maps must be a list of tensors [B, cams, C, H, W]", zeros(2, 16, 8)
REFUSED = {
    "empty": ([], False, TypeError, A_LIST),
    "empty_tuple": ((), False, TypeError, A_LIST),
    "dictionary": ({}, False, TypeError, A_LIST),
    "dictionary_of_maps": ({0: zeros(1, 2, 8, 2, 3)}, False, TypeError, A_LIST),
    "none": (None, False, TypeError, A_LIST),
    "number": (3, False, TypeError, A_LIST),
    "text": ("maps", False, TypeError, A_LIST),
    "tensor": (zeros(2, 1, 2, 8, 2, 3), False, TypeError, A_LIST),
    "of_none": ([None], False, TypeError, "feature_maps[0] must be a tensor"),
    "of_text": (["a"], False, TypeError, "feature_maps[0] must be a tensor"),
    "rank": ([zeros(2, 8, 2, 3)], False, ValueError, "feature_maps[0] must have 5 dimensions"),
    "cameras": (
        [zeros(1, 2, 8, 2, 3), zeros(1, 3, 8, 1, 1)],
        False,
        ValueError,
        "feature_maps[1] must be [B, cams, C, H1, W1] with B=1",
    ),
    "batches": (
        [zeros(1, 2, 8, 2, 3), zeros(2, 2, 8, 1, 1)],
        False,
        ValueError,
        "feature_maps[1] must be [B, cams, C, H1, W1] with B=1",
    ),
    "channels": (
        [zeros(1, 2, 8, 2, 3), zeros(1, 2, 4, 1, 1)],
        False,
        ValueError,
        "feature_maps[1] must be [B, cams, C, H1, W1] with B=1",
    ),
    "dtypes": ([zeros(1, 2, 8, 2, 3), zeros(1, 2, 8, 1, 1).double()], False, TypeError, "feature_maps[1] must be torch.float32"),
    "integers": ([zeros(1, 2, 8, 2, 3).long()], False, TypeError, "feature_maps[0] must be float16"),
    "devices": ([zeros(1, 2, 8, 2, 3), zeros(1, 2, 8, 1, 1, device="meta")], False, ValueError, "feature_maps[1] must be on cpu"),
    "group_empty": ([[zeros(1, 2, 8, 2, 3)], []], False, TypeError, "feature_maps[1] must be a list of tensors"),
    "group_mixed": ([zeros(1, 2, 8, 2, 3), [zeros(1, 2, 8, 2, 3)]], False, TypeError, "feature_maps[0] must be a list of tensors"),
    "group_batches": (
        [[zeros(1, 2, 8, 2, 3)], [zeros(2, 1, 8, 2, 3)]],
        False,
        ValueError,
        "feature_maps[1][0] must be [B, cams1, C",
    ),
    "group_dtypes": (
        [[zeros(1, 2, 8, 2, 3)], [zeros(1, 1, 8, 2, 3).half()]],
        False,
        TypeError,
        "feature_maps[1][0] must be torch.fl",
    ),
    "group_levels": ([[zeros(1, 2, 8, 2, 3)], [zeros(1, 2, 8, 2, 3)] * 2], False, ValueError, "the same number of levels"),
    "way": ([zeros(1, 2, 8, 2, 3)], "no", TypeError, "inverse must be True or False"),
    "inverse_empty": ([], True, TypeError, "feature_maps must be [features, spatial_shape, scale_start_index]"),
    "inverse_none": (None, True, TypeError, "feature_maps must be [features, spatial_shape, scale_start_index]"),
    "inverse_maps": ([zeros(1, 2, 8, 2, 3)], True, TypeError, "feature_maps must be [features, spatial_shape, scale_start_index]"),
    "inverse_rank": ([zeros(16, 8), [[(2, 3), (1, 2)]] * 2, None], True, ValueError, "feature_maps[0] must have 3 dimensions"),
    "inverse_rows": ([ROWS, [[(2, 3), (1, 1)]] * 2, None], True, ValueError, "feature_maps[1] must sum to the 16 rows"),
    "inverse_shapes": ([ROWS, "x", None], True, TypeError, "feature_maps[1] must be integers [cams, L, 2]"),
    "inverse_floats": ([ROWS, zeros(2, 2, 2), None], True, TypeError, "feature_maps[1] must be an int64"),
    "inverse_levels": ([ROWS, [(4, 4)], None], True, TypeError, "feature_maps[1] must be integers [cams, L, 2]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    """The error names the argument, what was expected and what was given."""
    given, inverse, error, text = REFUSED[name]
    with pytest.raises(error) as found:
        sparsedrive.feature_maps_format(given, inverse)
    assert f"feature_maps_format: {text}"[0 if text.startswith(("feature", "inverse")) else 21 :] in str(found.value)
    assert "; got " in str(found.value)


def test_one_graph():
    """From maps to the result in one graph."""

    def function(given, locations, weights):
        return sparsedrive.deformable_aggregation_function(*sparsedrive.feature_maps_format(given), locations, weights)

    inputs = maps(2, (2, 3), (1, 2)), *places(2, 2)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs), function(*inputs))
