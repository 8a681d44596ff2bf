"""Calls of every operator where torch lacks one of the private names that we use; run by `test_torch_private.py`.

A child for each name hides it before the package is imported, and prints a digest of all results and gradients.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
import sys
import traceback
import warnings
from pathlib import Path

import torch  # in the parent, so that no child has to
from torch.fx.experimental.proxy_tensor import make_fx

NAMES = re.findall(r'_find\(\s*"([^"]+)"', (Path(__file__).parents[2] / "src/sonde/op/torch_private.py").read_text())


def import_without(name: str) -> bool:
    """Import the package where torch seems to lack this name; True if that was noticed."""
    real = operator.attrgetter

    def attrgetter(path: str):
        if path == name:
            raise AttributeError(path)
        return real(path)

    operator.attrgetter = attrgetter
    from sonde.op import torch_private

    operator.attrgetter = real
    return f"torch.{name}" in torch_private.MISSING


def digest() -> str:
    """Of values and gradients, cold and warm, and of calls under a mode, a profiler and a transform."""
    from op.calls import CALLS, value_and_gradients

    found = hashlib.sha256()
    for call in CALLS.values():
        for _ in range(3):
            for x in value_and_gradients(call):
                found.update(x.contiguous().numpy().tobytes())
    call = CALLS["sample_sum"]
    with torch.autograd.profiler.profile():
        found.update(call.function(*call.args).numpy().tobytes())
    with torch.device("meta"):
        found.update(call.function(*call.args).numpy().tobytes())
    graph = make_fx(lambda *args: call.function(*args))(*call.args)
    found.update(graph(*[x.flip(0) for x in call.args]).numpy().tobytes())
    return found.hexdigest()


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        sys.stdout.flush()
        if pid := os.fork():
            os.waitpid(pid, 0)
            continue
        try:
            missing = import_without(name)
            print(name, digest(), "missing" if missing else "there", flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(["nothing", *(sys.argv[1:] or NAMES)])
