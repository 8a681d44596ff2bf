"""``sonde.testing.check_operator``: a correct operator passes, and each kind of kernel mistake is found and named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import sonde
from sonde.testing import CHECKS, check_operator

ROOT = Path(__file__).parents[1]
FRAME = ("compile", "export")  # seconds each, so run only in the tests about them
number = count()


def definition(x: Tensor, w: Tensor, gain: float) -> Tensor:
    """The weighted sum of the rows of `x`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return ((x.to(wide) * w.to(wide)).sum(-1) * gain).to(x.dtype)


def right(x: Tensor, w: Tensor, gain: float) -> Tensor:
    wide = np.float64 if torch.float64 in (x.dtype, w.dtype) else np.float32
    a, b = (t.to(torch.float64 if wide is np.float64 else torch.float32).numpy() for t in (x, w))
    out = np.empty(x.shape[:-1], wide)
    np.sum(a * b, axis=-1, out=out)
    return torch.from_numpy(out * wide(gain)).to(x.dtype)


def gradients(grad: Tensor, x: Tensor, w: Tensor, gain: float, *, needs):
    wide = torch.promote_types(x.dtype, torch.float32)
    grad = grad.to(wide) * gain
    d_x = (grad[..., None] * w.to(wide)).to(x.dtype) if needs.x else None
    d_w = (grad[..., None] * x.to(wide)).sum(tuple(range(x.ndim - 1))).to(w.dtype) if needs.w else None
    return d_x, d_w


def made(function: Callable = right, backward: Callable | None = gradients, reference: Callable = definition, **more):
    """An operator with a new, unique name."""

    def fast(x: Tensor, w: Tensor, gain: float) -> Tensor:
        return function(x, w, gain)

    op = sonde.operator(f"planted::op{next(number)}", fast, reference=reference, backward=backward, **more)
    assert op.implementations == ("kernel", "reference")
    return op


def cases(columns: int = 5):
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": (torch.randn(3, columns, generator=generator), torch.randn(columns, generator=generator), 1.5),
        "square": (torch.randn(columns, columns, generator=generator), torch.randn(columns, generator=generator), -1.0),
    }


def said(op, *words: str, cases=None, skip=FRAME) -> None:
    with pytest.raises(AssertionError) as problem:
        check_operator(op, cases or globals()["cases"](), skip=skip)
    text = str(problem.value)
    assert op.name in text
    assert "impl='kernel'" in text
    for word in words:
        assert word in text, text


def test_a_right_operator_passes():
    """Every check runs or says why it does not, with gradients by a kernel and by the reference."""
    for backward in (gradients, None):
        report = check_operator(made(backward=backward, deterministic=True, devices="cpu"), cases())
        assert set(report.checked["kernel"]) == set(CHECKS) - {"synchronisation", "streams"}
        assert "only GPUs" in str(report)


def test_halves_and_doubles_pass():
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x, w, gain = cases()["odd"]
        check_operator(made(), [(x.to(dtype), w.to(dtype), gain)], skip=FRAME)


def test_wrong_values_are_measured():
    def wrong(x, w, gain):
        out = right(x, w, gain)
        out[-1] += 0.1
        return out

    said(made(wrong), "values, case odd", "1 of 3 elements differ, the worst at [2]: got", "of its norm, allowed are")


def test_a_forgotten_tail_is_found():
    said(made(lambda x, w, gain: right(x[:, :4], w[:4], gain)), "values", "differs from the reference")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out[:, None], "has shape [3, 1], the reference [3]"),
        (lambda out: out.double(), "is float64, the reference float32"),
        (lambda out: out.to("meta"), "is on meta, the reference on cpu"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_another_form_is_found(change, words):
    said(made(lambda x, w, gain: change(right(x, w, gain)), None), words)


def test_other_strides_are_found():
    def fast(x: Tensor) -> Tensor:
        return (x * 2).T.contiguous().T

    op = sonde.operator("planted::strides", fast, reference=lambda x: (x * 2).contiguous())
    said(op, "has strides (1, 3), the reference (4, 1)", cases=[(torch.randn(3, 4),)])


def test_a_mutated_argument_is_found():
    def mutates(x, w, gain):
        out = right(x, w, gain)
        w.numpy()[0] += 1
        return out

    said(made(mutates), "arguments", "it writes into its argument w")


def test_a_backward_pass_that_writes_into_arguments_is_found():
    def backward(grad, x, w, gain, *, needs):
        out = gradients(grad, x, w, gain, needs=needs)
        x.numpy()[0] = 0
        return out

    said(made(backward=backward), "its argument x is another after the backward pass")


def test_a_backward_pass_that_writes_into_its_gradient_is_found():
    def backward(grad, x, w, gain, *, needs):
        out = gradients(grad.clone(), x, w, gain, needs=needs)
        grad.mul_(2)
        return out

    said(made(backward=backward), "writes into the gradients of results")


def test_an_alias_is_found():
    def alias(x: Tensor) -> Tensor:
        return x[1:]

    op = sonde.operator("planted::alias", alias, reference=lambda x: x[1:].clone())
    said(op, "aliasing", "the result of it shares memory with its argument x", cases=[(torch.randn(3, 4),)])


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        (lambda d_x, d_w: (d_x, torch.zeros_like(d_w)), "the gradient of w is forgotten"),
        (lambda d_x, d_w: (-d_x, d_w), "the gradient of x has the opposite sign"),
        (lambda d_x, d_w: (d_x, d_w * 1.01), "the gradient of w differs from the reference by 0.01 of its norm"),
        (lambda d_x, d_w: (d_x.double(), d_w[:-1]), "shape"),
    ],
    ids=["forgotten", "sign", "wrong", "shape"],
)
def test_a_wrong_gradient_is_found(backward, words):
    class All:
        x = w = True

    said(made(backward=lambda *args, needs: backward(*gradients(*args, needs=All))), "gradients", words)


def test_mixed_up_gradients_are_found():
    def fast(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    op = sonde.operator(
        "planted::mixed", fast, reference=lambda x, y: x * y, backward=lambda grad, x, y, *, needs: (grad * x, grad * y)
    )
    said(op, "the gradient of x is that of y: they are mixed up", cases=[(torch.randn(3), torch.randn(3))])


def test_a_gradient_that_is_wrong_when_asked_for_alone_is_found():
    def backward(grad, x, w, gain, *, needs):
        both = gradients(grad, x, w, gain, needs=needs)
        return both if needs.x and needs.w else tuple(None if g is None else g * 2 for g in both)

    said(made(backward=backward), "asked for alone, the gradient of x is another")


def test_a_backward_pass_for_contiguous_gradients_only_is_found():
    def backward(grad, x, w, gain, *, needs):
        dense = torch.empty(grad.shape).stride()  # what a kernel given a bare pointer may assume
        flat = grad if 0 in grad.stride() else grad.as_strided(grad.shape, dense)
        return gradients(flat, x, w, gain, needs=needs)

    def cloned(x, w, gain):
        return right(x, w, gain)

    x, w, gain = cases()["odd"]
    said(made(cloned, backward), "gradients of results, the gradient of", cases=[(torch.stack([x, x + 1]), w, gain)])


def test_foreign_memory_is_found():
    def stray(x, w, gain):
        room = x.untyped_storage().nbytes() > x.nbytes  # otherwise torch refuses
        base = x.as_strided((x.numel() + 1,), (1,), x.storage_offset()) if room else x
        return right(x, w, gain) + 0 * base.flatten()[-1]

    said(made(stray), "foreign memory", "it reads memory outside of its arguments")


def test_a_write_outside_of_an_argument_is_found():
    def stray(x, w, gain):
        if x.storage_offset() and x.is_contiguous():
            x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(7)
        return right(x, w, gain)

    said(made(stray), "it writes outside of its argument x")


def test_uninitialised_memory_is_found():
    def unwritten(x, w, gain):
        out = torch.empty(x.shape[:-1], dtype=x.dtype)
        out.copy_(right(x, w, gain)) if not out.isnan().all() else out[1:].copy_(right(x, w, gain)[1:])
        return out

    said(made(unwritten), "uninitialised memory", "leaves some of it unwritten")


def test_uninitialised_memory_of_numpy_is_found():
    def unwritten(x, w, gain):
        out = np.empty(x.shape[0], np.float32)
        found = right(x, w, gain).float().numpy()
        first = int(np.isnan(out).all())
        out[first:] = found[first:]
        return torch.from_numpy(out).to(x.dtype)

    said(made(unwritten), "uninitialised memory", "leaves some of it unwritten")


def test_a_write_outside_of_a_result_is_found():
    def beyond(x, w, gain):
        out = torch.empty(x.shape[:-1], dtype=x.dtype)
        out.copy_(right(x, w, gain))
        if out.untyped_storage().nbytes() > out.nbytes:  # only inside a red zone: elsewhere it might crash the process
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)
        return out

    said(made(beyond), "wrote outside a tensor of 3 elements")


def test_other_bits_in_another_run_are_found():
    def noisy(x, w, gain):
        return right(x, w, gain) * (1 + 1e-7 * torch.rand(x.shape[0])).to(x.dtype)

    check_operator(made(noisy), cases(), skip=FRAME)  # it makes no promise of determinism
    said(made(noisy, deterministic=True), "determinism", "the result has other bits in another run")


def test_a_kernel_for_contiguous_arguments_is_found():
    def flat(x, w, gain):
        return right(x.as_strided(x.shape, (x.shape[1], 1)), w, gain)

    said(made(flat), "strides", "with x reversed in memory")


def test_a_kernel_that_fails_on_empty_tensors_is_found():
    def fails(x, w, gain):
        assert x.numel(), "an empty grid"
        return right(x, w, gain)

    said(made(fails), "empty inputs", "with no elements where there were 3, it raises AssertionError: an empty grid")


def test_a_kernel_for_one_dtype_is_found():
    def one(x, w, gain):
        if x.dtype != w.dtype:
            raise TypeError("one dtype, please")
        return right(x, w, gain)

    said(made(one), "autocast", "raises TypeError: one dtype, please")
    said(made(lambda x, w, gain: right(x.float(), w, gain)), "autocast", "is float32, the reference bfloat16")


def test_a_kernel_that_autocast_changes_passes():
    """Autocast does not reach kernels: their matrix products keep their dtype."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    op = sonde.operator("planted::product", product, reference=lambda x, y: x @ y)
    check_operator(op, [(torch.randn(3, 4), torch.randn(4, 5))], skip=FRAME)


def test_rows_that_see_each_other_are_found_by_vmap():
    def centred(x: Tensor) -> Tensor:
        return x - x.mean()

    op = sonde.operator("planted::rows", centred, reference=lambda x: x - x.mean(), batched=True)
    said(op, "vmap", "of torch.vmap differs from that of separate calls", cases=[(torch.randn(3, 4),)])


def test_a_reference_that_cannot_be_traced_is_found_by_compile():
    def counted(x: Tensor) -> Tensor:
        return x[: int((x > 0).sum())].clone()

    op = sonde.operator("planted::counted", counted, reference=lambda x: x[: int((x > 0).sum())].clone())
    said(op, "compile, case 0: raises", cases=[(torch.randn(7),)], skip=["vmap", "export"])


def test_shapes_that_are_not_the_results_are_found_by_export():
    x = cases()["odd"][0]
    wrong = made(fake=lambda x, w, gain: x.new_empty(x.shape[0] + 1))
    said(wrong, "export", "the result of a trace is [4] of torch.float32", cases=[(x, x[0], 1.0)], skip=["compile"])


@pytest.mark.gpu
def test_a_kernel_that_waits_is_found():
    def waits(x: Tensor) -> Tensor:
        return x * (2 if x.sum().item() < 1e30 else 3)

    op = sonde.operator("planted::waits", waits, reference=lambda x: x * 2)
    said(op, "synchronisation", "it waits for the device", cases=[(torch.randn(7, device="cuda"),)])


@pytest.mark.gpu
def test_a_kernel_on_another_stream_is_found():
    def elsewhere(x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return x * 2

    op = sonde.operator("planted::elsewhere", elsewhere, reference=lambda x: x * 2)
    said(op, "streams", "is not computed on the current stream", cases=[(torch.randn(1000, device="cuda"),)])


@pytest.mark.gpu
def test_a_right_operator_passes_on_gpus():
    op = sonde.operator("planted::double", _double, reference=lambda x: x * 2)
    report = check_operator(op, [(torch.randn(1000, device="cuda"),)])
    assert set(report.checked["kernel"]) == set(CHECKS) - {"determinism"}


def _double(x: Tensor) -> Tensor:
    return x * 2


def test_lists_optional_tensors_and_several_results():
    def fast(w: float, xs: list[Tensor], y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = sum(x.numpy() for x in xs) * np.float32(w)
        return torch.from_numpy(total if y is None else total + y.numpy()), torch.tensor(len(xs))

    def reference(w, xs, y=None):
        total = torch.stack(xs).sum(0) * w
        return total if y is None else total + y, torch.tensor(len(xs), device=xs[0].device)

    op = sonde.operator("planted::lists", fast, reference=reference, no_grad=(1,))
    x, y = torch.randn(2, 3, 4)
    report = check_operator(op, {"two": (2.0, [x, y]), "three": (2.0, [x, y, x], y)}, skip=["autocast", "aliasing"])
    assert "gradients" in report.checked["kernel"]


@pytest.mark.usefixtures("numba_target")
def test_the_readme_s_kernel_in_a_project_of_its_own(tmp_path):
    """The README's kernel, at most fifteen lines, works in a separate folder with nothing but Sonde installed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"<!-- own-kernel:begin -->\n```python\n(.*?)```", readme, re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (tmp_path / "test_squash.py").write_text(code, encoding="utf-8")
    installed = Path(sonde.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(installed), "PYTEST_ADDOPTS": "", "SONDE_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("PYTEST_XDIST_WORKER", None)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "test_squash.py"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "1 passed" in done.stdout


def test_what_cannot_be_checked_is_refused():
    op = made()
    with pytest.raises(ValueError, match="there are no cases"):
        check_operator(op, [])
    with pytest.raises(ValueError, match="skip must be of values"):
        check_operator(op, cases(), skip=["speed"])
    with pytest.raises(TypeError, match="case 0 must be a tuple of arguments; got Tensor"):
        check_operator(op, torch.ones(2, 3))
    op = made(devices="cuda")
    with pytest.raises(ValueError, match=r"nothing of .* could be checked: kernel, case odd: it needs cuda tensors, got cpu"):
        check_operator(op, cases())
    with pytest.raises(ValueError, match="needs cuda tensors, got cpu"):
        check_operator(op, cases(), impl="kernel")
