"""The shared epipolar kernels against their own references, in every candidate configuration."""

import pytest
import torch

pytest.importorskip("triton")

import sonde
from helpers.operators import cotangents, deterministic, floats, leaves
from sonde.jit import bench
from sonde.jit.kernel import Tunable
from sonde.operators import OPERATORS

pytestmark = pytest.mark.asks("passes")
FORM = {"grid.form", "grid.rows"}
KERNELS = dict(sample_sum=FORM, sample_dot=FORM, sample_attention={"grid.attend", "grid.attend_queries", "grid.attend_pixels"})
EPIPOLAR = [operator for operator in OPERATORS.values() if operator.engine == "_epipolar"]


LAYOUTS = {
    "planes": (torch.contiguous_format, 1 << 30),
    "padded": (torch.contiguous_format, 0),
    "channels_last": (torch.channels_last, 0),
}


@pytest.mark.parametrize(("layout", "few"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("operator", EPIPOLAR, ids=str)
def test_candidates_agree_with_the_reference(operator, layout, few, triton_target, monkeypatch):
    """Any configuration a search may pick is right: candidates from both ends of the list, on the tensors a call passes to the
    kernels."""
    monkeypatch.setattr("sonde.grid._device.layout.FEW", few)
    monkeypatch.setattr(bench, "time_us", lambda run, *args, **keywords: (1.0,))
    met = {}
    bind = Tunable.bind

    def noted(self, problem, tensors):
        if self.tunable(problem):
            met.setdefault((self.name, problem), (self, [t if t is None else t.clone() for t in tensors]))
        return bind(self, problem, tensors)

    monkeypatch.setattr(Tunable, "bind", noted)
    args = list(operator.make("odd_sizes", device=triton_target.device))
    args[0] = args[0].contiguous(memory_format=layout)
    with sonde.jit.settings.set(sonde.jit.PickAny), deterministic():
        sonde.jit.winners.forget()  # so that this call prepares its launch again
        out = operator.call("triton")(*leaves(args))
    args = leaves(args)
    out = operator.call("triton")(*args)
    torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents([out]))
    assert {name for name, _ in met} == KERNELS[operator.name]
    for (name, problem), (kernel, tensors) in met.items():
        configs = kernel.fitting(problem)
        assert configs[0] == kernel.default(problem)
        assert len(configs) > 10
        trials = bench.Bench(kernel, problem, tensors)
        for config in (*configs[:3], configs[-1]):
            _, cause, error, _ = trials.trial(config, None)
            assert cause is None, f"{name} {config}: {cause}"
            assert error < 1e-6


def test_no_candidate_that_triton_cannot_compile(triton_target):
    """Triton 3.6 fails to compile planes with many samples per program, so neither a search nor a stored winner may use such a
    configuration."""
    from sonde.grid._epipolar import gpu_kernels as kernels

    planes = kernels.Problem(2, 6, 7, 64, 32, 40, 1, 0, 3, 2, torch.float32, False, True)
    failing = kernels.Config(16, 2, 1, 4), kernels.Config(8, 4, 1, 4), kernels.Config(4, 8, 2, 4), kernels.Config(16, 4, 1, 8)
    for config in failing:
        for kernel in (kernels.rows, kernels.form):
            for problem in (planes, planes._replace(d_stride=1)):
                assert not kernel.fits(problem, config)
                assert config not in kernel.fitting(problem)
            assert kernel.fits(planes._replace(stride=40), config)  # channels-last images compile
    assert not kernels.form.fits(planes, kernels.Config(4, 4, 1, 2))  # half as many fail, too, without the images' gradient
    assert kernels.form.fits(planes._replace(d_stride=1), kernels.Config(4, 4, 1, 2))


def test_a_wrong_candidate_is_seen(triton_target, monkeypatch):
    """The kernels' references catch a wrong kernel: one that skips a tile of channels fails."""
    from sonde.grid._epipolar import gpu_kernels as kernels

    monkeypatch.setattr(bench, "time_us", lambda run, *args, **keywords: (1.0,))
    images, samples, weights = OPERATORS["sample_sum"].make("wide", device=triton_target.device)
    B, C, H, W = images.shape
    problem = kernels.Problem(B, H, W, *samples.shape[1:3], C, 1, 1, weights.shape[1], 0, torch.float32, False, True)
    out = torch.empty(*weights.shape[:3], C, device=images.device)
    trials = bench.Bench(kernels.rows, problem, [images, samples, weights, out, torch.empty_like(images)])
    assert trials.trial(kernels.rows_config(problem), None)[1] is None
    real = kernels.rows.launch
    short = lambda p, c: (launch := real(p, c))._replace(grid=(launch.grid[0], launch.grid[1] - 1, 1))  # noqa: E731
    object.__setattr__(kernels.rows, "launch", short)
    try:
        cause = trials.trial(kernels.rows_config(problem)._replace(tiles=1), None)[1]
    finally:
        object.__setattr__(kernels.rows, "launch", real)
    assert cause.startswith("disagrees with the reference")
