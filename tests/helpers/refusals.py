"""Errors come before any work."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Nothing(TorchDispatchMode):
    """Nothing is computed."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called before all arguments were checked")


def assert_refused(error: type, text: str, function, *args, **options) -> None:
    """In words that say what came, before anything is computed."""
    with Nothing(), pytest.raises(error) as found:
        function(*args, **options)
    assert text in str(found.value)
    assert "; got " in str(found.value)
