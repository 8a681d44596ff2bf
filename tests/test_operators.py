"""The table of operators: every entry is true of its operator, and reading the table imports no family."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.operators import cotangents, floats, leaves
from sonde.operators import EDGES, OPERATORS, Operator

SRC = Path(__file__).parents[1] / "src"
EACH = pytest.mark.parametrize("operator", OPERATORS.values(), ids=str)
pytestmark = [pytest.mark.without_gradients, pytest.mark.asks("operator")]


def test_every_folder_of_an_operator_is_in_the_table():
    """All but the hash, which users do not call."""
    folders = {p.parent.relative_to(SRC / "sonde") for p in (SRC / "sonde").rglob("api.py")}
    assert {str(f) for f in folders} - {"points/_search/hash"} == {
        f"{o.family}/{o.folder.replace('.', '/')}" for o in OPERATORS.values()
    }


def test_reading_it_loads_no_family():
    """The table imports alone, without the package around it."""
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('table', {str(SRC / 'sonde' / 'operators.py')!r}); "
        "table = importlib.util.module_from_spec(spec); sys.modules['table'] = table; spec.loader.exec_module(table); "
        "print(len(table.OPERATORS), [m for m in ('torch', 'numba', 'triton', 'sonde') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split(maxsplit=1) == [str(len(OPERATORS)), "[]\n"], done.stderr


@EACH
def test_names(operator: Operator):
    """Arguments named by traits exist, and the image is the first argument."""
    named = [operator.image, operator.samples, operator.align, *operator.searched, *operator.summed, *operator.queries]
    assert {name for name in named if name} <= set(operator.arguments)
    assert not operator.factors or operator.factors[0] in operator.arguments
    assert not operator.image or operator.arguments[0] == operator.image
    assert not operator.graded or operator.graded in operator.results
    for other in (operator.registered_like, operator.computes_like):
        assert not other or (OPERATORS[other].family == operator.family and not OPERATORS[other].computes_like)
    assert sum(o.interpreted for o in OPERATORS.values()) == 1


@EACH
def test_cases(operator: Operator):
    """Each operator has the cases that tests require of every operator, and those that its traits name."""
    assert set(EDGES) <= operator.cases.SMALL.keys()
    named = {*(operator.in_full or ()), *(operator.interpreted_cases or ()), *operator.vanishing}
    assert named <= operator.cases.SMALL.keys()
    assert operator.on_cpu.keys() <= operator.cases.BENCH[operator.typical].keys()
    assert {*operator.fixed, *operator.least} <= {
        "octaves",
        "cams",
        "L",
        *inspect.signature(operator.cases.make).parameters,
        "dims",
        "k",
    }
    assert any(target.get("everywhere") for target in operator.cases.TARGETS)
    assert operator.make("odd_sizes") is not None


@EACH
def test_results(operator: Operator):
    """The number of results is as stated; the differentiable one has a gradient for every tensor, the others have none."""
    args = leaves(operator.make("odd_sizes"))
    plain, options = operator._parted
    out = operator.public(*args[:plain], **dict(zip(options, args[plain:])), impl="reference")
    outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)[: len(operator.results)]
    assert [o.requires_grad for o in outs] == [name == operator.graded for name in operator.results]
    if operator.graded:
        out = operator.reference(*args)
        torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents([out]))


SLICED = [operator for operator in OPERATORS.values() if operator.queries and not operator.sizes_from_data]


@pytest.mark.parametrize("operator", SLICED, ids=str)
def test_queries_do_not_see_each_other(operator: Operator):
    """Removing the last query leaves the other results unchanged."""
    args = operator.make("odd_sizes")
    few = [
        a.narrow(operator.queries[name], 0, a.shape[operator.queries[name]] - 1)
        if name in operator.queries and a is not None
        else a
        for name, a in zip(operator.arguments, args)
    ]
    whole = operator.reference(*args)
    expected = whole.narrow(operator.result, 0, whole.shape[operator.result] - 1)
    torch.testing.assert_close(operator.reference(*few), expected)
