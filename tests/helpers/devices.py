"""Detect, without a GPU, copies for which a GPU would have to wait."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class OneDevice(TorchFunctionMode):
    """Fail if a torch function sees a tensor on another device, or makes one from Python numbers: such a copy waits for the device.

    The meta device stands for the GPU: reading its tensors raises, and tensors on the CPU are detected.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, Tensor.new_tensor), f"{function} of {args}"
        out = function(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        assert devices <= {"meta"}, f"{function} has tensors on {devices}"
        return out
