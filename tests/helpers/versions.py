"""What older versions of torch and Triton cannot do (``docs/compatibility.md``); tests of it are skipped there."""

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def at_least(package: str, *wanted: int) -> bool:
    try:
        found = version(package)
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in found.split(".")[: len(wanted)]) >= wanted


OLD_TORCH = not at_least("torch", 2, 11)
SPILLED = dict(cuda=0, hip=0) if at_least("triton", 3, 7) else dict(cuda=16, hip=160)  # bytes, or registers on AMD, at most
EXPORTS_TRAINING = pytest.mark.skipif(OLD_TORCH, reason="torch 2.9 generates guards that use an undefined name")
MAPS_VIEWS_OF_BITS = pytest.mark.skipif(OLD_TORCH, reason="torch 2.9 has no batching rule for views of another dtype")


def sizes_from_data():
    """A context in which graphs may hold operators whose results' sizes depend on data; later versions need no such switch."""
    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
