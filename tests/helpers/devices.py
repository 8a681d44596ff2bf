"""What would make a GPU wait, seen without one."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class OneDevice(TorchFunctionMode):
    """Nothing has a tensor elsewhere in hand, or makes one of the host's numbers: such a copy would wait for the device.

    The meta device stands for a GPU: its tensors cannot be read, and what comes from the CPU is seen.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, Tensor.new_tensor), f"{function} of {args}"
        out = function(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        assert devices <= {"meta"}, f"{function} has tensors on {devices}"
        return out
