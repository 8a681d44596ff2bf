"""The examples run, eagerly and as one graph, and match plain PyTorch."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import sonde

SMALL = {
    "deformable_detr_encoder": ["--height", "64", "--width", "96", "--channels", "32"],
    "sparsedrive_decoder": ["--anchors", "20", "--height", "64", "--width", "96", "--channels", "32"],
}


@pytest.mark.parametrize("example", SMALL)
@pytest.mark.parametrize("compiled", [[], ["--compile", "eager"]], ids=["eagerly", "one graph"])
def test_example(example, compiled, capsys):
    """Traced but not lowered, since Inductor takes a minute; the layers' tests cover the graphs of gradients."""
    import_module(example).main([*SMALL[example], "--repeats", "1", "--device", "cpu", *compiled])
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith(", cpu, one graph by eager" if compiled else ", cpu, eagerly")
    (values, _), exact = (map(float, found) for found in re.findall(r": values (\S+), gradients (\S+)", said))
    assert values < 1e-5
    assert max(exact) < 1e-12


@pytest.mark.parametrize("how", [[], ["--radius", "0.6"]], ids=["nearest", "radius"])
def test_knn_projector(how, capsys):
    """The tutorial's model trains, eagerly and as one graph, and agrees with a search in plain PyTorch."""
    small = ["--points", "300", "--side", "4", "--repeats", "1", "--steps", "3", "--device", "cpu", "--backend", "eager"]
    import_module("knn_projector").main([*small, *how])
    said = capsys.readouterr().out
    assert all(float(off) < 1e-4 for off in re.findall(r": (\S+) off plain PyTorch", said))
    table = re.findall(r"^  (.+?)  +([\d.]+) +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    assert [name for name, *_ in table] == ["plain PyTorch", "sonde", "sonde, one graph by eager"]
    assert len({loss for *_, loss in table}) == 1
    assert "another machine, an A100" in said


def epipolar(capsys, *options: str) -> tuple[list[float], list[tuple[int, int, int]]]:
    """The losses and the difference from eager PyTorch, and the percentages of correct attention as training goes on."""
    import_module("epipolar").main([*options, "--repeats", "1"])
    said = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^  (?:sonde|eager PyTorch) +([\d.]+) +[\d.]+ +[\d.]+$", said, re.MULTILINE)]
    (off,) = re.findall(r"difference of loss and gradients: (\S+)", said)
    return [*losses, float(off)], [
        tuple(map(int, found)) for found in re.findall(r"in (\d+)% of the pixels, (\d+)% of it is there \((\d+)% by", said)
    ]


def test_epipolar(capsys, tmp_path):
    """It agrees with plain PyTorch, trains, and draws what it learned."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "matcher.svg"
    small = ["--height", "12", "--width", "16", "--samples", "8", "--channels", "8", "--steps", "5", "--picture", str(picture)]
    (ours, eager, off), learnt = epipolar(capsys, *small)
    assert ours == pytest.approx(eager, abs=1e-5)
    assert off < 1e-5
    assert len(learnt) == 6
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_epipolar_learns_depth(capsys):
    """After training the peaks of most pixels, and most of the attention, are at the true depth; before, attention was spread
    evenly."""
    _, learnt = epipolar(capsys, "--steps", "100")
    (_, first, chance), (peaks, last, _) = learnt[0], learnt[-1]
    assert first < 2 * chance
    assert peaks > 85
    assert last > 55


DOCS = Path(__file__).parents[1] / "docs"


def documented(page: str, section: str = "") -> str:
    """A page of the documentation, or one of its sections."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text if not section else re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL).group(1)


@pytest.mark.parametrize(("page", "section"), [("power.md", ""), ("migrating.md", "retention")])
def test_documented(page, section):
    """Each block of Python runs by itself, and its assertions hold."""
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", documented(page, section), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize("page", ["../README.md", "points.md", "epipolar.md"])
def test_documented_in_turn(page):
    """The blocks of Python run one after another, as a reader would paste them into one session."""
    torch.manual_seed(0)
    text = re.sub(r"<!-- own-kernel:begin.*?own-kernel:end -->", "", documented(page), flags=re.DOTALL)  # tests/test_testing.py
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert len(names) > len(blocks) > 0


def test_documented_lengths():
    """The table of sizes and of the lengths above which power_attention takes chunks."""
    from sonde.power.power_attention.reference import rows_of_chunk

    rows = re.findall(r"^\| (\d) \| (\d+) \| (\d*) *\| (.+?) \|$", documented("power.md", "Power attention"), re.MULTILINE)
    assert len(rows) == 7
    for power, d, D, most in ((int(p), int(d), *rest) for p, d, *rest in rows):
        if most == "any length":
            assert rows_of_chunk(10**9, d, d, power, None) == 10**9
            continue
        assert sonde.power.sympow_dim(d, power) == int(D)
        assert rows_of_chunk(int(most), d, d, power, None) == int(most)
        assert rows_of_chunk(int(most) + 1, d, d, power, None) == 1024


def test_external_kernels(capsys):
    """Wrapping a library's kernel as an operator turns several graphs into one, and its own gradient matches the reference's."""
    pytest.importorskip("scipy")
    import_module("external_kernels").main(["--points", "200", "--queries", "100", "--repeats", "1", "--device", "cpu"])
    said = capsys.readouterr().out
    before, after = (int(found) for found in re.findall(r"graphs: (\d+)", said))
    assert before > after == 1
    assert float(re.search(r"by (\S+) of its norm", said).group(1)) < 1e-5
    assert "1. the library" in said
    assert "A100" in said


def test_power_attention(capsys, tmp_path, monkeypatch):
    """Both models learn, decoding from states equals the full forward (the example exits otherwise), and the losses are drawn."""
    pytest.importorskip("matplotlib")
    example, picture = import_module("power_attention"), tmp_path / "loss.svg"
    monkeypatch.setattr(example, "LENGTH", 64)
    example.main(["--steps", "10", "--characters", "20", "--out", str(picture)])
    said = capsys.readouterr().out
    losses = [tuple(map(float, row)) for row in re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", said, re.MULTILINE)]
    assert all(last < first - 1 for first, last in zip(losses[0], losses[-1]))
    assert float(re.search(r"one full forward: (\S+)", said).group(1)) < 1e-4
    assert picture.stat().st_size > 1000


def test_cost_of_power_attention(capsys, tmp_path):
    """The picture needs no GPU; the figures do."""
    pytest.importorskip("matplotlib")
    example, figures, picture = import_module("power_attention"), tmp_path / "cost.json", tmp_path / "cost.svg"
    names, phases = {"power attention": "power_attention", "softmax attention": "SDPA (cuDNN)"}, ("forward", "forward and backward")
    rows = [dict(T=T, attention=name, phase=phase, ms=T / 1000) for T in (4096, 8192) for name in names for phase in phases]
    figures.write_text(json.dumps(dict(device="a GPU", names=names, rows=rows)))
    example.main(["--cost-picture", str(picture), "--from", str(figures)])
    assert picture.stat().st_size > 1000
    with pytest.raises(SystemExit, match="2"):
        example.main(["--cost-picture", str(picture)])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="needs a GPU"):
            example.main(["--cost"])
