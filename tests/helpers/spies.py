"""Spies on passes, and functions that run in a child process."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from sonde.op.cache import forget_calls
from sonde.operators import Operator


def spy(monkeypatch, operator: Operator, impl: str) -> list[tuple[str, dict]]:
    """Record every call of the kernels' launchers: ``("forward" | "backward", keywords)``."""
    calls: list[tuple[str, dict]] = []

    def note(phase: str, run: Callable, *args, **keywords):
        calls.append((phase, keywords))
        return run(*args)

    around(monkeypatch, operator.kernels(impl), note)
    return calls


def around(monkeypatch, module: ModuleType, through: Callable) -> None:
    """Wrap this module's passes in ``through(phase, run, *args, **keywords)``."""
    forget_calls()
    recorded = hasattr(module, "forward_pass")
    for phase in ("forward", "backward"):
        name = f"{phase}_pass" if recorded else phase
        real = getattr(module, name, None)

        def record(*args, _phase=phase, _real=real, **keywords):
            made = _real(*args, **keywords)
            run = made.bind()
            made.bind = lambda: lambda *args: through(_phase, run, *args, **keywords)
            return made

        def act(*args, _phase=phase, _real=real, **keywords):
            return through(_phase, partial(_real, **keywords), *args, **keywords)

        if real is not None:  # operators without gradients have no backward pass
            monkeypatch.setattr(module, name, record if recorded else act)


def in_child(function: Callable[[], Any], seconds: int = 60) -> Any:
    """The result of `function` in a forked process; a crash there is only an error here."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(seconds)
            try:
                out = (True, function())
            except BaseException:
                out = (False, traceback.format_exc())
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(out, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), f"the child was ended by signal {os.WTERMSIG(status)}"
    ok, value = pickle.loads(raw)
    assert ok, value
    return value
