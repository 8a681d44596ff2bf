"""A small character model with power attention and with softmax attention, and decoding in constant memory.

    python examples/power_attention.py                      # about a minute on two idle cores
    python examples/power_attention.py --out loss.svg       # draws the losses; needs matplotlib
    python examples/power_attention.py --cost --json cost.json                        # time by sequence length, on a GPU
    python examples/power_attention.py --cost-picture cost.svg --from cost.json       # draws it, on any machine

Both models have the same sizes and initial weights and see the same batches: the pages that Python's ``help("for")`` and the like
show. Power attention has gates, which tell each head how fast to forget. Its model then writes text token by token; all that it
keeps of the past is one ``PowerState`` per layer, of fixed size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_cost import COLOURS, LENGTHS, POWER, SOFTMAX, cost, draw_cost, picture, save
from sonde.cli import plot
from sonde.cli.console import UsageError, writable
from sonde.power import PowerState, power_attention

WIDTH, HEADS, LAYERS = 128, 4, 2
BATCH, LENGTH = 8, 256  # of training


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotary position embedding of ``[B, T, h, d]``; the first token has position `start`."""
    frequency = 1000 ** -torch.linspace(0, 1, x.shape[-1] // 2)
    angle = ((start + torch.arange(x.shape[1]))[:, None] * frequency)[:, None]  # [T, 1, d/2]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Layer(nn.Module):
    """Attention and an MLP, both residual."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, HEADS)  # unused by softmax attention
        nn.init.zeros_(self.gate.weight)
        self.gate.bias.data = torch.linspace(1, 6, HEADS)  # heads forget half of the past after 2 to 280 tokens
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, start: int, state: PowerState | None, keep: bool) -> tuple[Tensor, PowerState | None]:
        normal = self.norms[0](x)
        q, k, v = self.qkv(normal).unflatten(-1, (3, HEADS, -1)).unbind(2)  # [B, T, h, d]
        q, k = rotate(q, start), rotate(k, start)
        if self.kind == SOFTMAX:
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        else:
            gates = F.logsigmoid(self.gate(normal))
            if keep:
                out, state = power_attention(q, k, v, gates, state=state, return_state=True)
            else:
                out = power_attention(q, k, v, gates)
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.norms[1](x)), state


class Model(nn.Module):
    """Characters ``[B, T]`` → logits of the next ones, ``[B, T, characters]``."""

    def __init__(self, characters: int, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, tokens: Tensor, start: int = 0, states: list | None = None) -> Tensor:
        """`states` has one state per layer, or None before the first token, and is updated."""
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x, state = layer(x, start, None if states is None else states[i], keep=states is not None)
            if states is not None:
                states[i] = state
        return self.head(x)


def loss_of(model: Model, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(models: dict[str, Model], text: Tensor, steps: int) -> list[tuple[int, ...]]:
    """Train all models on the same batches; returns rows of the step and each model's loss on held-out text."""
    text, kept = text[: -8 * (LENGTH + 1)], text[-8 * (LENGTH + 1) :].view(8, -1)
    optimizers = {name: torch.optim.AdamW(model.parameters(), 3e-3) for name, model in models.items()}
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, total_steps=max(2, steps)) for o in optimizers.values()]
    seconds, rows = dict.fromkeys(models, 0.0), []
    print(f"{'step':>6}" + "".join(f"{name:>20}" for name in models))
    for step in range(steps + 1):
        if step % max(5, steps // 30) == 0 or step == steps:
            with torch.no_grad():
                rows.append((step, *(loss_of(model, kept).item() for model in models.values())))
            if step % max(5, steps // 10) == 0 or step == steps:
                print(f"{step:6}" + "".join(f"{loss:20.3f}" for loss in rows[-1][1:]), flush=True)
        if step == steps:
            break
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        tokens = text[starts + torch.arange(LENGTH + 1)]
        for name, model in models.items():
            began = time.perf_counter()
            optimizers[name].zero_grad()
            loss_of(model, tokens).backward()
            optimizers[name].step()
            seconds[name] += time.perf_counter() - began
        for schedule in schedules:
            schedule.step()
    print("   ".join(f"{name}: {1e3 * s / max(1, steps):.0f} ms per step" for name, s in seconds.items()))
    return rows


@torch.no_grad()
def write(model: Model, prompt: Tensor, count: int) -> tuple[Tensor, float, int]:
    """Prefill with `prompt`, then sample `count` characters one by one.

    Returns all characters, the largest difference of a logit from those of one call on the whole text, and the states' bytes.
    """
    states: list[Any] = [None] * LAYERS
    tokens, logits = prompt, model(prompt, 0, states)
    found = [logits]
    for _ in range(count):
        following = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1)
        logits = model(following, tokens.shape[1], states)
        tokens = torch.cat([tokens, following], 1)
        found.append(logits)
    off = (torch.cat(found, 1) - model(tokens)).abs().max().item()
    return tokens, off, sum(t.nbytes for state in states for t in state)


def draw_losses(file: str, rows: list[tuple[int, ...]], names: Sequence[str]) -> None:
    figure, (axes,) = picture(1, (7, 3.6))
    for i, name in enumerate(names, 1):
        label = f"{name}, with gates" if name == POWER else name
        axes.plot([row[0] for row in rows], [row[i] for row in rows], color=COLOURS[name], linewidth=2, label=label)
    axes.set_title("Loss on unseen text of two small character models that differ in attention", loc="left", fontsize=10)
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per character")
    save(figure, file)


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=300, help="training steps (default: 300)")
    options.add_argument("--characters", type=int, default=300, help="characters to generate after training (default: 300)")
    options.add_argument("--out", metavar="PICTURE", help="draw the losses (.svg, .png, .pdf)")
    options.add_argument("--cost", action="store_true", help="no training: time both attentions by sequence length, on a GPU")
    options.add_argument("--json", metavar="FILE", help="where --cost writes its figures")
    options.add_argument("--cost-picture", metavar="PICTURE", help="no training: draw the figures of --from")
    options.add_argument("--from", dest="source", metavar="FILE", help="what --cost --json wrote")
    args = options.parse_args(argv)
    if bool(args.cost_picture) != bool(args.source) or (args.json and not args.cost):
        options.error("--cost-picture goes with --from, and --json with --cost")
    try:
        plot.check("--out", args.out)
        plot.check("--cost-picture", args.cost_picture)
        writable("--json", args.json)
    except UsageError as problem:
        options.error(str(problem))
    if args.cost:
        if not torch.cuda.is_available():
            sys.exit("--cost needs a GPU, and torch finds none here")
        figures = cost(LENGTHS)
        if args.json:
            Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
        return
    if args.cost_picture:
        return draw_cost(args.cost_picture, json.loads(Path(args.source).read_text()))

    torch.manual_seed(0)
    text = "\n".join(topics.values())
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(c) for c in text])
    models = {kind: Model(len(letters), kind) for kind in (POWER, SOFTMAX)}
    models[SOFTMAX].load_state_dict(models[POWER].state_dict())
    size = sum(p.numel() for p in models[POWER].parameters())
    print(f"{len(text):,} characters, {size:,} parameters, held-out loss in nats per character")
    rows = train(models, tokens, args.steps)
    if args.out:
        draw_losses(args.out, rows, list(models))
    written, off, held = write(models[POWER], tokens[None, :100], args.characters)
    print("".join(letters[i] for i in written[0]))
    print(f"States: {held / 1024:.0f} KiB at any length; largest difference from the logits of one full forward: {off:.1e}")
    if not off < 1e-3:
        sys.exit("decoding does not equal the full forward")


if __name__ == "__main__":
    main()
