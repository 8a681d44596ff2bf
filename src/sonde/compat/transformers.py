"""Multi-scale deformable attention of Hugging Face's ``transformers``, computed by :func:`sonde.ms_deform_attn`::

from sonde.compat import transformers as fast

fast.patch()  # until fast.unpatch(), or until the end of a ``with`` block
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..grid import ms_deform_attn as _ms_deform_attn
from .mmcv import multi_scale_deformable_attn_pytorch as multi_scale_deformable_attention

__all__ = ["MultiScaleDeformableAttention", "multi_scale_deformable_attention", "patch", "unpatch"]


def __dir__() -> list[str]:
    return __all__


class MultiScaleDeformableAttention(nn.Module):
    """The layer of this name in Deformable DETR, RT-DETR, Grounding DINO and others, which has no parameters."""

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: Sequence[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int = 64,
    ) -> Tensor:
        """Sample the value for each query, and sum with the attention weights.

        Args:
            value: ``[B, S, heads, channels]``.
            value_spatial_shapes: ``[L, 2]`` on the device; not read, since the list has the same values on the host.
            value_spatial_shapes_list: (height, width) of each level.
            level_start_index: Not read: levels are contiguous.
            sampling_locations: ``[B, Q, heads, L, P, 2]``.
            attention_weights: ``[B, Q, heads, L, P]``.
            im2col_step: Ignored.

        Returns:
            ``[B, Q, heads * channels]``.
        """
        return _ms_deform_attn(value, value_spatial_shapes_list, None, sampling_locations, attention_weights)


_REPLACED = {  # in the modules of transformers: name → (the attribute to replace, or None for the name itself; its replacement)
    "MultiScaleDeformableAttention": ("forward", MultiScaleDeformableAttention.forward),
    "multi_scale_deformable_attention": (None, multi_scale_deformable_attention),
}
_DEFINES = re.compile(rf"^(?:class|def) ({'|'.join(_REPLACED)})\(", re.MULTILINE)
_originals: list[tuple[Any, str, Any]] = []


class Patch:
    """What one call of :func:`patch` replaced; the end of a ``with`` block puts it back."""

    def __init__(self, replaced: Sequence[tuple[Any, str, Any]]) -> None:
        self.replaced = list(replaced)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.replaced:
            if place in _originals:  # unpatch() may have restored it already
                _originals.remove(place)
                setattr(*place)


def patch() -> Patch:
    """Make every model of ``transformers`` that has this attention use Sonde's, including models that exist already.

    These are the models whose modules define ``MultiScaleDeformableAttention`` (Deformable DETR, RT-DETR, Grounding DINO and
    others) or ``multi_scale_deformable_attention`` (Mask2Former, OneFormer). RT-DETRv2 and D-FINE sample differently and are
    not changed. Call it before ``torch.compile``; a second call does nothing.
    """
    replaced = []
    for module in _modules():
        for name, (attribute, ours) in _REPLACED.items():
            theirs = getattr(module, name, None)
            if theirs is None:
                continue
            owner, key = (module, name) if attribute is None else (theirs, attribute)
            if getattr(owner, key) is not ours:
                replaced.append((owner, key, getattr(owner, key)))
                setattr(owner, key, ours)
    _originals.extend(replaced)
    return Patch(replaced)


def unpatch() -> None:
    """Undo :func:`patch`."""
    while _originals:
        setattr(*_originals.pop())


def _modules() -> list[Any]:
    """The modules of transformers that define what is replaced; imports those that are not loaded yet."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("sonde.compat.transformers.patch: transformers is not installed; pip install transformers")
    files = sorted(Path(found.origin).parent.glob("models/*/modeling_*.py"))
    defining = [file for file in files if _DEFINES.search(file.read_text(encoding="utf-8"))]
    return [import_module(f"transformers.models.{file.parent.name}.{file.stem}") for file in defining]
