"""Errors are raised before any work."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Nothing(TorchDispatchMode):
    """Fail if anything is computed."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called before all arguments were checked")


def assert_refused(error: type, text: str, function, *args, **options) -> None:
    """The call raises this error with this text before anything is computed."""
    with Nothing(), pytest.raises(error) as found:
        function(*args, **options)
    assert text in str(found.value)
    assert "; got " in str(found.value)
