"""Settings nest, are restored, are local to their thread, and reject invalid values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sonde.jit import PickAny, PickBest, PickFixed, PickStored, settings

SRC = Path(__file__).parents[2] / "src"


# Importing the package's root would import torch, which takes seconds and is not needed here.
WITHOUT_TORCH = f"""
import sys, types
for name in ("sonde", "sonde.op", "sonde.jit"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{str(SRC)!r} + "/" + name.replace(".", "/")]
"""


def python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SONDE_", "TRITON_INTERPRET"))}
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**clean, "PYTHONPATH": str(SRC), **env}, timeout=120)


# --- one process


def test_what_is_not_given_keeps_its_value():
    with settings.set(PickBest, num_workers=3) as outer:
        assert outer is settings.current()
        with settings.set(max_configs=5, budget_s=2, verbose=True):
            assert settings.current() == settings.Settings(PickBest(), 3, 5, 2.0, True)
            with settings.set(PickStored, max_configs=None):
                assert settings.current() == settings.Settings(PickStored(), 3, None, 2.0, True)
        assert settings.current() is outer
    assert settings.current() is settings.DEFAULT


def test_exceptions_restore():
    with pytest.raises(KeyError), settings.set(PickBest):
        raise KeyError
    with pytest.raises(KeyError), settings.use(settings.Settings(PickBest(), 1, None, None, False)):
        raise KeyError
    assert settings.current() is settings.DEFAULT


def test_decorator_takes_what_is_in_force_at_the_call():
    @settings.set(PickBest)
    def seen():
        return settings.current().policy, settings.current().num_workers

    for workers in (2, 7, 2):
        with settings.set(num_workers=workers):
            assert seen() == (PickBest(), workers)
    assert settings.current() is settings.DEFAULT


def test_threads_do_not_see_each_other():
    """Eight threads set and read settings at the same time."""
    together, wrong = threading.Barrier(8), []

    def work(n: int) -> None:
        if settings.current() is not settings.DEFAULT:
            wrong.append(n)
        for _ in range(50):
            with settings.set(PickFixed(n), num_workers=n + 1):
                together.wait(30)
                if settings.current().policy != PickFixed(n) or settings.current().num_workers != n + 1:
                    wrong.append(n)
                together.wait(30)

    with settings.set(PickBest):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert wrong == []


def test_use_carries_settings_to_another_thread():
    """The backward pass does this, since autograd runs it in a thread of its own."""
    with settings.set(PickBest, num_workers=5):
        forward = settings.current()
    seen = []

    def backward():
        with settings.use(forward):
            seen.append(settings.current())
        seen.append(settings.current())

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert seen == [forward, settings.DEFAULT]


@pytest.mark.parametrize("given", [PickBest, PickBest(), "best", "BEST", "PickBest", "pickbest", " best "])
def test_policies_by_class_instance_and_name(given):
    with settings.set(given):
        assert settings.current().policy == PickBest()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (["fastest"], {}, ValueError, "policy must be one of any, best, stored where it is a name, got 'fastest'"),
        (["fixed"], {}, ValueError, "policy must be one of any, best, stored"),
        ([3], {}, TypeError, "policy must be PickAny, PickBest, PickStored, PickFixed(config) or a name, got 3 of type int"),
        ([int], {}, TypeError, "policy must be"),
        ([PickFixed], {}, TypeError, "write PickFixed(config)"),
        ([], dict(num_workers=0), ValueError, "num_workers must be at least 1, got 0"),
        ([], dict(num_workers="8"), TypeError, "num_workers must be an int, got '8' of type str"),
        ([], dict(num_workers=None), TypeError, "num_workers must be an int, got None"),
        ([], dict(num_workers=True), TypeError, "num_workers must be an int, got True"),
        ([], dict(max_configs=-1), ValueError, "max_configs must be at least 1, got -1"),
        ([], dict(max_configs=2.0), TypeError, "max_configs must be an int or None, got 2.0"),
        ([], dict(budget_s=0), ValueError, "budget_s must be more than 0 seconds, got 0"),
        ([], dict(budget_s=float("nan")), ValueError, "budget_s must be more than 0 seconds, got nan"),
        ([], dict(budget_s="1m"), TypeError, "budget_s must be a number of seconds or None, got '1m'"),
        ([], dict(verbose=1), TypeError, "verbose must be True or False, got 1"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    """The error is raised by the call itself, not by the ``with`` that uses its result."""
    with pytest.raises(error) as caught:
        settings.set(*arguments, **options)
    assert message in str(caught.value)
    assert settings.current() is settings.DEFAULT


def test_use_takes_settings_only():
    with pytest.raises(TypeError, match="must be a Settings"), settings.use(PickBest()):  # type: ignore[arg-type]
        pass


def test_policies_are_values():
    config = dict(BLOCK=64)
    fixed = PickFixed(config)
    config["BLOCK"] = 128
    assert fixed == PickFixed(dict(BLOCK=64)) != PickFixed(config)
    assert len({PickAny(), PickAny(), PickBest(), PickStored(), fixed, PickFixed(dict(BLOCK=64)), PickFixed(config)}) == 5
    with pytest.raises(TypeError, match="got None"):
        PickFixed(None)


# --- the environment


SHOW = WITHOUT_TORCH + "from sonde.jit import settings as s; print(s.current().policy, s.current().num_workers)"


@pytest.mark.parametrize(
    ("policy", "shown"), [("any", "PickAny()"), ("Best", "PickBest()"), ("PickStored", "PickStored()"), ("", "PickAny()")]
)
def test_environment(policy, shown):
    done = python(SHOW, SONDE_POLICY=policy, SONDE_WORKERS="3")
    assert (done.stdout.strip(), done.stderr) == (f"{shown} 3", "")


@pytest.mark.parametrize("options", [(), ("-W", "error::RuntimeWarning")], ids=["warning", "error"])
def test_bad_environment_warns_once_and_changes_nothing(options):
    done = python(SHOW + "; s.current()", *options, SONDE_POLICY="fastest", SONDE_WORKERS="many", SONDE_LOG="loud")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "PickAny()"
    for text in (
        "SONDE_POLICY must be one of any, best, stored, got 'fastest'; using any",
        "SONDE_WORKERS must be a whole number of at least 1, got 'many'; using ",
        "SONDE_LOG must be 1 or one of DEBUG, INFO, WARNING, ERROR, CRITICAL, got 'loud'",
    ):
        assert done.stderr.count(text) == 1, done.stderr


@pytest.mark.parametrize("level", ["1", "info"])
def test_log_is_seen_once(level):
    speak = "import logging, sonde.jit.settings; l = logging.getLogger('sonde'); l.info('tuning'); l.debug('detail');"
    assert python(WITHOUT_TORCH + speak, SONDE_LOG=level).stderr == "sonde: tuning\n"
    assert python(WITHOUT_TORCH + speak).stderr == ""
    own = "import logging; logging.basicConfig(format='mine: %(message)s')\n"
    assert python(WITHOUT_TORCH + own + speak, SONDE_LOG=level).stderr == "mine: tuning\n"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "here"))
    assert settings.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("SONDE_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert settings.cache_dir() == tmp_path / "sonde"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert settings.cache_dir() == tmp_path / ".cache" / "sonde"


def test_import_stays_lean():
    code = (
        "import sys, json, torch; before = set(sys.modules); import sonde.jit; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = {name.split(".")[0] for name in json.loads(python(code).stdout)}
    assert not loaded & {"triton", "numba", "sqlite3", "rich"}
