"""Which tests apply to which operators, and which of them the default run interprets.

A mark on the test says what it is about; a trait in the table of operators says which operators are special.

``not_for(trait, why)``: the test does not apply to operators with this trait, for this reason.
``without_gradients``: the test needs no gradients, so it also runs for operators that have none.
``asks(what)``: what the test is about, and hence which operators may be left out by default because another covers them:

- ``"passes"``: an operator's own passes. Every operator, also in the interpreter.
- ``"operator"``: every operator; in the interpreter, only the table's representative.
- ``"torch"``: what torch derives from a registration, which is the same code for all operators of a kind.
- ``"engine"``, the default: what an engine computes, even if several operators share it.
- ``"values"``: single results in any dtype; in a default run, only float32 where another operator has the same engine.

``interpreted(default)``: whether a test, or a whole file, is interpreted by default; the mark nearest to the case decides.
"""

from __future__ import annotations

import torch

from helpers.operators import Target
from sonde.operators import Operator


def _given(item, kind: type):
    """The case's parameter of this type, or None."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((value for value in parameters if isinstance(value, kind)), None)


def applies(item) -> bool:
    operator = _given(item, Operator)
    if operator is None:
        return True
    if any(getattr(operator, mark.args[0]) for mark in item.iter_markers("not_for")):
        return False
    return bool(operator.graded) or item.get_closest_marker("without_gradients") is not None


def in_default_run(item) -> bool:
    interpreted = _given(item, Target) == "triton" or "triton_target" in getattr(item, "fixturenames", ())
    return not (interpreted and _left_out(item)) and _asked(item, interpreted)


def _left_out(item) -> bool:
    """True if the case is left out by default; a mark of the case decides, else one of the test, else one of its file."""
    near = [mark.args[0] for mark in item.own_markers if mark.name == "interpreted"]
    far = item.get_closest_marker("interpreted")
    return not all(near) if near else far is not None and not far.args[0]


def _asked(item, interpreted: bool) -> bool:
    operator = _given(item, Operator)
    if operator is None:
        return True
    mark = item.get_closest_marker("asks")
    asks = mark.args[0] if mark else "engine"
    if asks == "values":
        return not operator.computes_like or (not interpreted and _given(item, torch.dtype) is torch.float32)
    if interpreted and not operator.interpreted and asks != "passes":
        return False
    return not (operator.registered_like and asks == "torch") and not (operator.computes_like and asks == "engine")
