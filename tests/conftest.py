"""One run for everything: Triton kernels on a GPU where there is one, interpreted on CPU tensors where there is none."""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave their core to the tests beside; before torch loads

import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; some tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, hence before the lines below

from importlib.util import find_spec

import pytest

from helpers import OPERATORS, Operator, Target, improve_interpreter
from sonde.op.cache import forget_calls

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    improve_interpreter()
if find_spec("triton"):
    from sonde.grid._device import layout

    layout.FEW = 200  # numbers: so that some of the small cases read planes where they lie and others convert them

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.data_too_large]
    settings.register_profile("sonde", deadline=None, max_examples=30, derandomize=True, database=None, suppress_health_check=quiet)
    settings.register_profile("thorough", parent=settings.get_profile("sonde"), max_examples=1000, derandomize=False)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sonde"))


# what torch makes of an operator, which every implementation gets from the same lines
OF_TORCH = {
    "test_gradcheck", "test_saves_nothing_but_its_inputs", "test_derivative_of_a_graph_comes_from_kernels", "test_registration",
    "test_registration_with_channels_last", "test_compiles_once_for_all_sizes", "test_compiles_every_path",
    "test_determinism_flag_is_in_the_graph", "test_exports_runs_and_trains", "test_vmap_is_one_call", "test_torch_func_grad",
    "test_vmap_and_grad_compose", "test_jacobians_and_forward_mode", "test_forward_mode_is_never_silently_zero",
    "test_transforms_compile",
}  # fmt: skip


# operators that share their passes with others, or take longest there: what is their own
SHARING = {
    "grid.deformable_aggregation", "grid.grid_sample", "grid.ms_deform_attn", "grid.sample_dot",
    "points.knn", "points.radius_neighbors", "points.knn_aggregate", "points.radius_aggregate",
}  # fmt: skip
# and these do so whoever runs them: one search under several names
ONE_SEARCH = {"points.knn", "points.radius_neighbors"}
OF_EACH = {"test_gradcheck", "test_compiles_once_for_all_sizes"}
THEIR_OWN = {
    "test_deterministic_mode_repeats_its_bits", "test_modes_without_gradients",
    "test_names_and_writes", "test_only_the_needed_gradients", "test_values_that_are_not_finite",
    "test_what_is_absent_is_never_read", "test_workspace_is_what_is_allocated",
}  # fmt: skip


# of the points' own tests, what is interpreted by default: each is seconds there
CLOUDS = {
    "test_200_clouds",
    "test_is_the_textbook_form",
    "test_single_neighbour_pulls_at_nothing",
    "test_four_at_one_distance_weigh_a_quarter_each",
    "test_offsets_that_nobody_could_check",
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads it
def pytest_cmdline_main(config):
    """All tests, where there is no GPU to share: a process on each core, which take what is left from each other."""
    given = config.option
    all_of_them = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput") and not given.keyword
    watched = given.usepdb or given.trace or given.collectonly or given.capture == "no"
    if all_of_them and not watched and not torch.cuda.is_available() and getattr(given, "numprocesses", 0) is None:
        given.numprocesses, given.dist = min(8, os.cpu_count() or 1), "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A test marked ``gpu`` is skipped, not failed, where someone asks for it without having one.

    The interpreter takes minutes for what torch makes of every operator; one stands for all there, and Numba runs them all.
    """
    items.sort(key=lambda item: item.path.name != "test_targets.py")  # the longest first
    for item in items if not torch.cuda.is_available() else ():
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        given = item.callspec.params if hasattr(item, "callspec") else {}
        operator, name = given.get("operator"), getattr(item, "originalname", "")
        if operator and ("triton" in (given.get("target"), given.get("impl")) or "triton_target" in item.fixturenames):
            others = operator in SHARING and name not in THEIR_OWN
            if others or (name in OF_TORCH and operator != "grid.sample_sum"):
                item.add_marker(pytest.mark.slow)
        interpreted = "points" in item.path.parts and "triton" in (given.get("target"), given.get("impl"))
        if interpreted and (name not in CLOUDS or given.get("tens", 0) > 0):
            item.add_marker(pytest.mark.slow)
        if given.get("path") in ONE_SEARCH and (given.get("target") == "triton" or given.get("dtype") != torch.float32):
            item.add_marker(pytest.mark.slow)
        walks = given.get("path") == "points.radius_aggregate" and given.get("target") == "triton"  # a second for each case
        if walks and given.get("case") not in ("odd_sizes", "hostile", "one_pixel", "sigma_of_rows", None):
            item.add_marker(pytest.mark.slow)
        if operator == "points.radius_aggregate" and name in OF_TORCH - OF_EACH:  # knn_aggregate stands for both
            item.add_marker(pytest.mark.slow)
        if operator in ONE_SEARCH and name not in THEIR_OWN | OF_EACH:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=OPERATORS)
def operator(request) -> Operator:
    return Operator.find(request.param)


@pytest.fixture(params=["triton", "numba"])
def target(request) -> Target:
    """An implementation and the device whose tensors it takes in this run."""
    pytest.importorskip(request.param)
    return Target(request.param)


@pytest.fixture(params=["reference", "triton", "numba"])
def impl(request) -> Target:
    """The definition, too, where a test has a truth of its own."""
    if request.param != "reference":
        pytest.importorskip(request.param)
    return Target(request.param)


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
    """No test leaves torch's global switches changed for the next, nor decisions that depended on what it had changed."""
    threads = torch.get_num_threads()
    forget_calls()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
