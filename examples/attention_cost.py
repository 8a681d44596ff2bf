"""Time of power attention and of softmax attention by sequence length, on a GPU: ``power_attention.py --cost``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sonde.cli import plot
from sonde.power import power_attention

LENGTHS = [1024 * n for n in (4, 8, 16, 32, 64)]
POWER, SOFTMAX = "power attention", "softmax attention"
COLOURS = {POWER: plot.COLOURS["sonde"], SOFTMAX: plot.COLOURS["eager PyTorch"]}
PHASES = ("forward", "forward and backward")


def timed(run: Callable[[], Any], repeats: int = 9) -> float:
    """Median milliseconds on the GPU; the L2 cache is overwritten before each run."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    found = []
    for repeat in range(repeats + 3):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if repeat >= 3:
            found.append(start.elapsed_time(stop))
    return statistics.median(found)


def softmax_attention() -> tuple[str, Callable[..., Tensor]]:
    """``F.scaled_dot_product_attention`` by the first backend that runs here, and the backend's name."""
    for name, backend in {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}.items():

        def attend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            small = torch.randn(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            attend(small, small, small).sum().backward()
        except RuntimeError:
            continue
        return name, attend
    raise SystemExit("--cost: F.scaled_dot_product_attention has neither its cuDNN nor its flash backend here")


def cost(lengths: Sequence[int]) -> dict[str, Any]:
    """Milliseconds of power attention with gates and of softmax attention."""
    backend, softmax = softmax_attention()
    names = {POWER: "power_attention", SOFTMAX: f"SDPA ({backend})"}
    made: dict[str, Any] = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, names=names, rows=[])
    print(f"{made['device']}, torch {torch.__version__}: batch 1, 16 heads, d = 64, bfloat16, milliseconds")
    for T in lengths:
        x = torch.randn(4, 1, T, 16, 64, device="cuda").bfloat16()
        gates = F.logsigmoid(torch.randn(1, T, 16, device="cuda") + 5)
        calls = {POWER: (power_attention, [*x[:3], gates]), SOFTMAX: (softmax, [t.transpose(1, 2).contiguous() for t in x[:3]])}
        for name, (attend, given) in calls.items():
            leaves = [t.clone().requires_grad_() for t in given]
            grad = x[3] if name == POWER else x[3].transpose(1, 2).contiguous()
            runs = (lambda: attend(*given), lambda: torch.autograd.grad(attend(*leaves), leaves, grad))  # noqa: B023
            for phase, run in zip(PHASES, runs):
                made["rows"].append(dict(T=T, attention=name, phase=phase, ms=timed(run)))
                print(f"  T = {T:6}  {names[name]:18}{phase:22}{made['rows'][-1]['ms']:9.3f}", flush=True)
    return made


# Pictures, in the style of those of ``sonde bench``.


def picture(panels: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(plot.STYLE)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    return figure, figure.subplots(1, panels, squeeze=False, sharey=True)[0]


def save(figure: Any, file: str) -> None:
    for axes in figure.axes:
        axes.grid(color=plot.FAINT, linewidth=0.8)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.axes[0].legend(frameon=False)
    figure.savefig(file, dpi=160, metadata={"Date": None} if file.endswith(".svg") else None)


def draw_cost(file: str, made: dict[str, Any]) -> None:
    figure, panels = picture(2, (9, 4))
    lengths = sorted({row["T"] for row in made["rows"]})
    for axes, phase in zip(panels, PHASES):
        for name in COLOURS:
            points = sorted((r["T"], r["ms"]) for r in made["rows"] if (r["attention"], r["phase"]) == (name, phase))
            axes.loglog(*zip(*points), "o-", color=COLOURS[name], linewidth=2, markersize=4, label=made["names"][name])
        axes.set_title(phase.capitalize(), loc="left", fontsize=10)
        axes.set_xlabel("sequence length")
        axes.set_xticks(lengths, [f"{T // 1024}k" for T in lengths])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    panels[0].set_ylabel("milliseconds")
    figure.suptitle(f"{made['device']}: time by sequence length, batch 1, 16 heads, d = 64, bfloat16", fontsize=11)
    save(figure, file)
