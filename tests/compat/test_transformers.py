"""transformers: a model gives the same results with Sonde's attention as with its own, and undoing the patch restores it."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sonde.compat.transformers as compat

SRC = Path(__file__).parents[2] / "src"
LEVELS = [(5, 7), (3, 3)]


@pytest.fixture(scope="module")
def detr():
    """Deformable DETR's module, imported lazily because that takes seconds."""
    pytest.importorskip("transformers")
    from transformers.models.deformable_detr import modeling_deformable_detr

    return modeling_deformable_detr


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    compat.unpatch()


@pytest.fixture
def calls(monkeypatch):
    """Records the arguments of every call of the operator."""
    seen, real = [], compat._ms_deform_attn
    monkeypatch.setattr(compat, "_ms_deform_attn", lambda *args: seen.append(args) or real(*args))
    return seen


def tiny(detr, two_stage: bool):
    """A random model built from configurations alone; reference points with one stage, boxes with two."""
    from transformers import DeformableDetrConfig, ResNetConfig

    stages = dict(hidden_sizes=[4, 8, 12, 16], depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"])
    backbone = ResNetConfig(embedding_size=4, layer_type="basic", **stages)
    sizes = dict(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5, num_labels=3
    )
    config = DeformableDetrConfig(
        backbone_config=backbone, with_box_refine=two_stage, two_stage=two_stage, two_stage_num_proposals=5, dropout=0.0, **sizes
    )
    torch.manual_seed(0)
    model = detr.DeformableDetrForObjectDetection(config).double().eval()
    for name, parameter in model.named_parameters():
        if "sampling_offsets.weight" in name or "attention_weights.weight" in name:  # zero before training
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def outputs(model) -> dict[str, torch.Tensor]:
    """The model's outputs for two images, one of them padded, and the gradients of images and parameters."""
    torch.manual_seed(1)
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64).requires_grad_()
    mask = torch.ones(2, 64, 96, dtype=torch.long)
    mask[1, :, 70:] = 0
    out = model(images, pixel_mask=mask)
    found = {name: out[name] for name in ("logits", "pred_boxes", "last_hidden_state", "encoder_last_hidden_state")}
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in found.values())
    wanted = {"images": images, **{name: p for name, p in model.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {**found, **{f"gradient of {name}": g for name, g in zip(wanted, grads) if g is not None}}


@pytest.mark.parametrize("two_stage", [False, True])
def test_same_outputs_and_gradients(detr, calls, two_stage):
    model = tiny(detr, two_stage)
    want = outputs(model)
    assert not calls
    with compat.patch():
        got = outputs(model)
    assert len(calls) == 3  # one encoder layer, two decoder layers
    assert got.keys() == want.keys()
    assert sum("sampling_offsets" in name for name in got) == 6
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_patch_and_unpatch(detr):
    own = detr.MultiScaleDeformableAttention.forward
    first = compat.patch()
    assert detr.MultiScaleDeformableAttention.forward is compat.MultiScaleDeformableAttention.forward
    with compat.patch() as second:  # changes nothing and restores nothing
        assert not second.replaced
    assert detr.MultiScaleDeformableAttention.forward is not own
    compat.unpatch()
    assert detr.MultiScaleDeformableAttention.forward is own
    compat.unpatch()
    with first:  # already undone
        pass
    assert detr.MultiScaleDeformableAttention.forward is own


def test_a_with_statement_ends_in_errors_too(detr):
    own = detr.MultiScaleDeformableAttention.forward
    with pytest.raises(RuntimeError, match="oops"), compat.patch():
        raise RuntimeError("oops")
    assert detr.MultiScaleDeformableAttention.forward is own
    assert not compat._originals


def test_every_model_is_found(detr):
    """Every model that uses the attention is patched, including those not imported yet."""
    found = {getattr(owner, "__module__", None) or owner.__name__ for owner, _, _ in compat.patch().replaced}
    families = {name.split(".")[2] for name in found}
    assert {"deformable_detr", "rt_detr", "grounding_dino", "omdet_turbo", "mask2former", "oneformer"} <= families


def inputs(queries: int = 4):
    torch.manual_seed(0)
    value, locations = torch.randn(2, 44, 2, 3).double(), 1.4 * torch.rand(2, queries, 2, 2, 3, 2).double() - 0.2
    return value, locations, torch.rand(2, queries, 2, 2, 3).double()


def test_layer_is_theirs(detr):
    """The layer alone takes the original's arguments and gives its results; it reads levels from the list, never from the
    tensor."""
    theirs, ours = detr.MultiScaleDeformableAttention(), compat.MultiScaleDeformableAttention()
    names = list(inspect.signature(theirs.forward).parameters)
    assert list(inspect.signature(ours.forward).parameters) == names
    value, locations, weights = inputs()
    unreadable = torch.empty(2, 2, dtype=torch.long, device="meta")
    want = theirs(value, unreadable, LEVELS, unreadable[0], locations, weights, 64)
    torch.testing.assert_close(ours(value, unreadable, LEVELS, unreadable[0], locations, weights, 64), want)


def test_function_is_theirs(detr):
    """The function of Mask2Former and OneFormer, with levels as a list and as a tensor."""
    from transformers.models.mask2former import modeling_mask2former as mask2former

    value, locations, weights = inputs()
    want = mask2former.multi_scale_deformable_attention(value, LEVELS, locations, weights)
    with compat.patch():
        assert mask2former.multi_scale_deformable_attention is compat.multi_scale_deformable_attention
        for levels in (LEVELS, torch.tensor(LEVELS)):
            torch.testing.assert_close(mask2former.multi_scale_deformable_attention(value, levels, locations, weights), want)
    assert mask2former.multi_scale_deformable_attention is not compat.multi_scale_deformable_attention


def test_attention_is_one_graph(detr):
    """The patched attention of a model compiles to one graph for images of any size."""
    model = tiny(detr, two_stage=False)
    attention = model.model.encoder.layers[0].self_attn
    compat.patch()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    sizes = {"default": [(5, 7), (3, 4), (2, 2), (2, 3)], "fail_on_recompile": [(4, 6), (3, 3), (2, 3), (2, 2)]}
    for stance, levels in sizes.items():
        rows, shapes = sum(h * w for h, w in levels), torch.tensor(levels)
        pixels, reference = torch.randn(2, rows, 32).double(), torch.rand(2, rows, 4, 2).double()
        given = dict(encoder_hidden_states=pixels, reference_points=reference, spatial_shapes=shapes, spatial_shapes_list=levels)
        with torch.compiler.set_stance(stance):
            got = compiled(pixels, **given, level_start_index=shapes.prod(1).cumsum(0) - shapes.prod(1))[0]
        torch.testing.assert_close(got, attention(pixels, **given)[0])


def test_import_is_lazy():
    """Neither sonde, its layers nor this module import transformers; where it is missing, patch() says so."""
    code = """
import sys, sonde, sonde.nn, sonde.compat.mmcv, sonde.compat.sparsedrive, sonde.compat.transformers as compat
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
sys.path_importer_cache.clear()
try:
    compat.patch()
except (ModuleNotFoundError, ValueError) as refused:
    print(refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "transformers is not installed; pip install transformers" in done.stdout
