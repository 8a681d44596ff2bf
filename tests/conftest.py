"""Set up a test run: Triton kernels run on a GPU if there is one, else on CPU tensors in Triton's interpreter."""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads must not spin; set before torch loads

import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs; some tests send SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, hence before the lines below

from importlib.util import find_spec

import pytest

from helpers.bounds import check_bounds
from helpers.interpreter import improve_interpreter
from helpers.operators import HAS_GPU, Target
from helpers.selection import applies, in_default_run
from sonde.op.cache import forget_calls
from sonde.operators import OPERATORS, Operator

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    improve_interpreter()
    check_bounds()
if find_spec("triton"):
    from sonde.grid._device import layout

    layout.FEW = 200  # numbers, chosen so that some small cases read planes where they lie and others convert them

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.data_too_large]
    settings.register_profile("sonde", deadline=None, max_examples=30, derandomize=True, database=None, suppress_health_check=quiet)
    settings.register_profile("thorough", parent=settings.get_profile("sonde"), max_examples=1000, derandomize=False)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sonde"))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads it
def pytest_cmdline_main(config):
    """Run the whole suite on one process per core, with work stealing, unless there is a GPU, which all would have to share."""
    given = config.option
    all_of_them = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput") and not given.keyword
    watched = given.usepdb or given.trace or given.collectonly or given.capture == "no"
    if all_of_them and not watched and not torch.cuda.is_available() and getattr(given, "numprocesses", 0) is None:
        given.numprocesses, given.dist = min(8, os.cpu_count() or 1), "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect tests that do not apply to an operator; mark those that take too long without a GPU as slow.

    A test marked ``gpu`` that was requested on a machine without one is skipped, not failed.
    """
    config.hook.pytest_deselected(items=[item for item in items if not applies(item)])
    items[:] = sorted((item for item in items if applies(item)), key=lambda item: "longest" not in item.keywords)
    missing = [name for name in ("numba", "triton") if find_spec(name) is None]
    for item in items if missing else ():
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for name in missing:
            if any(isinstance(value, str) and value == name for value in params):
                item.add_marker(pytest.mark.skip(reason=f"needs {name}"))
    for item in items if not HAS_GPU else ():
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if not in_default_run(item):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=OPERATORS.values(), ids=str)
def operator(request) -> Operator:
    """Each operator that the test applies to (``helpers.selection``)."""
    request.param.function  # noqa: B018 (resolved here, where nothing is traced)
    return request.param


@pytest.fixture(params=[Target("triton"), Target("numba")])
def target(request) -> Target:
    """An implementation and the device of the tensors that it gets in this run."""
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture(params=[Target("reference"), Target("triton"), Target("numba")])
def impl(request) -> Target:
    """Like `target`, plus the reference, for tests that do not compare with the reference."""
    if request.param != "reference":
        pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def triton_target() -> Target:
    pytest.importorskip("triton")
    return Target("triton")


@pytest.fixture
def numba_target() -> Target:
    pytest.importorskip("numba")
    return Target("numba")


@pytest.fixture(autouse=True)
def same_state_after():
    """Restore torch's global switches after each test, and clear cached calls that depended on them."""
    threads = torch.get_num_threads()
    forget_calls()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
