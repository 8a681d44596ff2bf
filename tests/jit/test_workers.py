"""Real worker processes: compiling for a GPU that is absent, and trials on CPU tensors of kernels that misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from toy import TOY, Config, Problem, Toy

from sonde.jit import process
from sonde.jit.bench import relative_error
from sonde.jit.search import best, search
from sonde.jit.workers import InProcess, Trials, _feed, _start_compiler, keep, precompile, trials

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
MISALIGNED = 1  # elements


def make_tensors():
    """A transposed input with a misaligned start, an absent tensor, and two results."""
    x = torch.arange(1.0, 42.0)[MISALIGNED:].reshape(5, 8).t()
    assert x.data_ptr() % 16
    return [x, None, torch.full((8, 5), 7.0), torch.full((1,), 5.0)]


# ---- compiling ----------------------------------------------------------------------------------------------------------------


def compile_toy(tmp_path, *target):
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": PATH, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, HERE / "compile_toy.py", *target, tmp_path], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_compiles_into_the_cache_that_a_launch_reads(tmp_path):
    report = compile_toy(tmp_path, "cuda", "90")
    causes = report["causes"]
    assert [causes[good] for good in ("64 4 3", "128 8 3", "128 8 2")] == [None] * 3
    assert causes["48 4 3"].startswith("CompilationError: ")
    assert causes["48 4 3"].endswith("must be a power of 2")
    assert causes["32 4 3"] == "compiler crashed (signal 11)"
    assert causes["16 4 3"] == "compilation did not finish in 4 s"

    assert report["hits"] == [True] * 3
    assert report["unchanged"]
    assert report["kernels"] == 3
    assert report["other alignment hits"] == [False]  # so the hits above are not accidental

    assert report["descriptors"] == [None, True]

    assert report["kept"][0] == report["kept"][1] != []  # the next search reuses the same processes
    assert report["kept on"] == []  # and they end with the block

    causes = report["search"]["causes"]  # a search continues after each failure and finds the best of the others
    assert causes[0].startswith("CompilationError: ")
    assert causes[1:] == ["compiler crashed (signal 11)", None, None, None]
    assert report["search"]["best"] == 64

    assert report["here"][0] is None
    assert report["here"][1].startswith("CompilationError: ")
    assert report["interrupted"]
    assert not report["left"]  # the process that hung was killed


@pytest.mark.slow
def test_compiles_for_amd(tmp_path):
    """AMD's cache keys also depend on the size of a storage."""
    report = compile_toy(tmp_path, "hip", "gfx942")
    assert list(report["causes"].values()) == [None] * 3
    assert report["hits"] == [True] * 3
    assert report["unchanged"]


def test_nothing_to_compile():
    assert list(precompile(TOY, Problem(2.0), ["a", "b"], make_tensors(), 2, 1)) == [("a", 0.0, None), ("b", 0.0, None)]


# ---- trying -------------------------------------------------------------------------------------------------------------------


def test_trials():
    """One failing candidate after another; none affects the next one or this process."""
    tensors = make_tensors()
    kept = [t if t is None else t.clone() for t in tensors]
    bench = Trials(TOY, Problem(2.0), tensors)
    try:

        def trial(does, best_us=None, limit_s=30.0, ms=0.0):
            return bench.trial(Config(does, ms), best_us, limit_s)

        found = trial("right")
        assert (found.config, found.cause, len(found.times_us)) == (Config("right"), None, 20)
        assert found.error < 1e-6
        assert len(trial("right", best_us=100.0, ms=2).times_us) == 5

        for does in ("forgets", "wrong", "wavers"):  # "forgets" first: it would pass if it saw the previous results
            found = trial(does)
            assert found.cause.startswith("disagrees with the reference: relative error ")
            assert not found.error <= 1e-5
            assert found.times_us == ()
        assert trial("prints").cause is None
        assert trial("raises").cause == "RuntimeError: out of resource: shared memory"
        # size, strides and alignment are those of the caller's tensors
        assert trial("strides").cause == "RuntimeError: (8, 5) (1, 8) 4 (8, 5) (5, 1) 0"

        assert trial("aborts").cause == "the run crashed (signal 6)\na last word"
        assert trial("right").cause is None
        assert trial("hangs", limit_s=0.5).cause == "the run did not finish in 0.5 s"
        assert trial("exits").cause == "the run ended with exit status 3"
    finally:
        bench.close()
    for tensor, before in zip(tensors, kept):
        assert tensor is before is None or torch.equal(tensor, before)


def test_a_spoilt_process_is_replaced():
    """After an illegal access nothing runs in that process any more, so a new one takes over."""

    class Spoilt:
        stopped = 0

        def ask(self, question, *args):
            return "" if question[0] == "case" else ((), "an illegal memory access", None, False)

        def stop(self):
            self.stopped += 1

    bench = Trials(TOY, Problem(2.0), make_tensors())
    bench.close()
    bench._worker = Spoilt()
    assert bench.trial(Config("right"), None, 30).cause == "an illegal memory access"
    assert bench._worker.stopped == 1


def test_a_kept_process_serves_the_next_search():
    """A kept process takes the next problem without restarting; one that still owes an answer is not kept."""
    seen = []
    with keep():
        for factor in (2.0, 3.0):
            bench = Trials(TOY, Problem(factor), make_tensors())
            assert bench.trial(Config("right"), None, 30).cause is None
            seen.append(bench._worker._process.pid)
            bench._idle = factor == 2.0
            bench.close()
        assert bench._worker._process is None
    assert seen[0] == seen[1]


def test_what_cannot_start_is_tried_once():
    bench = Trials(TOY, Problem(2.0, "no reference"), make_tensors())
    cause = bench.trial(Config("right"), None, 30).cause
    assert cause == "MemoryError: the reference is too large"
    start = time.monotonic()
    assert bench.trial(Config("right"), None, 30).cause == cause
    assert time.monotonic() - start < 0.1
    bench.close()


@pytest.mark.slow
def test_search_survives_every_kind_of_trouble():
    """A candidate raises, aborts, exits or hangs: its cause is recorded, and the next ones are tried."""
    toy_module = sys.modules["toy"]
    configs = [Config(does) for does in ("raises", "aborts", "exits", "hangs", "wrong")] + [Config("right")]
    kernel = toy_module.TOY
    before, kernel.configs = kernel.configs, configs
    try:
        found = search(kernel, Problem(2.0), make_tensors(), num_workers=1, trial_limit_s=1)
    finally:
        kernel.configs = before
    assert [t.config.does for t in found] == [c.does for c in configs]
    assert all(t.cause for t in found[:-1])
    assert best(found).config.does == "right"


@pytest.mark.parametrize("what", ["Popen", "TemporaryFile"])
def test_no_process_can_be_started(monkeypatch, what):
    """No memory, too many processes, or a full disk: every candidate gets that cause, and nothing raises."""

    def fail(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(*((process.subprocess, what) if what == "Popen" else (process.tempfile, what)), fail)
    found = search(Toy(Config("right"), Config("wrong")), Problem(2.0), make_tensors(), num_workers=1)
    assert [t.cause for t in found] == ["no process could be started: [Errno 12] Cannot allocate memory"] * 2
    configs = [Config("right"), Config("wrong")]
    queue: SimpleQueue = SimpleQueue()
    _feed(process.Worker(_start_compiler, (("cuda", 90, 32),), {}), (), deque(configs), queue, 1.0)
    assert [queue.get()[2] for _ in configs] == [found[0].cause] * 2


def test_a_candidate_that_cannot_be_asked_about():
    """If a candidate cannot be pickled, the others are still compiled."""

    class Fine:
        def ask(self, question, *limits):
            if question[-1] == "bad":
                raise TypeError("cannot pickle 'module' object")
            return 1.0, None

    queue: SimpleQueue = SimpleQueue()
    _feed(Fine(), (), deque(["bad", "good"]), queue, 1.0)
    assert [queue.get()[2] for _ in range(2)] == ["TypeError: cannot pickle 'module' object", None]


def test_in_process():
    kernel = Toy(Config("right"))
    kernel.module = None
    tensors = make_tensors()
    bench = trials(kernel, Problem(2.0), tensors)
    assert isinstance(bench, InProcess)
    assert bench.trial(Config("right"), None, 1).cause is None
    assert bench.trial(Config("wrong"), None, 1).cause.startswith("disagrees")
    assert bench.trial(Config("raises"), None, 1).cause == "RuntimeError: out of resource: shared memory"
    assert bench.trial(Config("strides"), None, 1).cause == "RuntimeError: (8, 5) (1, 8) 4 (8, 5) (5, 1) 0"
    bench.close()
    assert torch.equal(tensors[2], torch.full((8, 5), 7.0))


def test_interpreted_kernel_from_end_to_end():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton does not interpret here")
    import toy_triton

    x = torch.rand(1000)
    found = search(toy_triton.SCALE, toy_triton.Problem(1000, 3), [x, None, torch.empty(1000)], num_workers=2)
    assert [t.config.block for t in found] == [64, 128]
    assert [t.cause for t in found] == [None, None]
    assert best(found).error < 1e-6


SCRIPT = """
import sys, torch, toy
from sonde.jit.search import search
toy.TOY.configs = [toy.Config("right"), toy.Config("hangs")]
x = torch.ones(8)
found = search(toy.TOY, toy.Problem(2.0, sys.argv[1]), [x, None, x.clone(), torch.zeros(1)], num_workers=1)
print([t.config.does for t in found])
"""


def test_no_orphans(tmp_path):
    """Ctrl-C, or the end of the caller, also ends a kernel that hangs and the processes that it started."""
    env = os.environ | {"PYTHONPATH": PATH}
    notes = {signal.SIGINT: tmp_path / "interrupted", signal.SIGKILL: tmp_path / "killed"}
    callers = {
        how: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, note], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for how, note in notes.items()
    }
    for how, caller in callers.items():
        wait_until(lambda note=notes[how], caller=caller: note.exists() or caller.poll() is not None)
        caller.send_signal(how)
        out, errors = caller.communicate(timeout=20)
        assert notes[how].exists(), errors
        if how == signal.SIGINT:
            assert out.strip() == "['right']", errors  # results found before the interruption count
        wait_until(lambda note=notes[how]: not any(is_alive(pid) for pid in note.read_text().split()))


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_relative_error():
    nan, inf = float("nan"), float("inf")
    a = torch.tensor
    assert relative_error(a([3.0, 5.0]), a([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_error(a([nan, inf, 1.0]), a([nan, inf, 1.0])) == 0
    assert not relative_error(a([nan, 1.0]), a([1.0, 1.0])) <= 1e9
    assert not relative_error(a([1.0, 1.0]), a([inf, 1.0])) <= 1e9
    assert relative_error(a([0.0]), a([0.0])) == 0
    assert relative_error(a([2.0]), a([0.0])) == 2
    assert relative_error(a([3, 5]), a([3, 4])) == pytest.approx(0.2)
