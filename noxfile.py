"""Our claims about versions, as commands: each session runs the tests in an environment of its own.

    nox                                       # all sessions that this machine has an interpreter for
    nox -s oldest_torch                       # one of them
    nox -s no_numba -- tests/grid tests/op    # only these tests: everything after -- goes to pytest

docs/compatibility.md lists what was run with which versions, and what is known not to work.
"""

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["oldest_torch", "newest_torch", "no_numba", "no_triton", "next_python"]
nox.options.error_on_missing_interpreters = False  # next_python runs where there is one

PINNED = ("-c", "constraints.txt", "-e", ".[test]")


@nox.session
def oldest_torch(session: nox.Session) -> None:
    """The oldest torch that pyproject.toml admits. Its Triton (3.5) needs numpy < 2.4 for interpreted kernels."""
    session.install("-e", ".[test]", "torch==2.9.0", "numpy<2.4")
    test(session)


@nox.session
def newest_torch(session: nox.Session) -> None:
    """The newest versions that are known to work together: constraints.txt."""
    session.install(*PINNED)
    test(session)


@nox.session
def no_numba(session: nox.Session) -> None:
    """Without Numba, CPU tensors go through the reference."""
    session.install(*PINNED)
    session.run("pip", "uninstall", "--yes", "numba", "llvmlite", silent=True)
    test(session)


@nox.session
def no_triton(session: nox.Session) -> None:
    """Without Triton, as on Windows and macOS: CPU kernels run, and commands that need Triton say so."""
    session.install(*PINNED)
    session.run("pip", "uninstall", "--yes", "triton", silent=True)
    test(session)


@nox.session(python=["3.12", "3.13", "3.14"])
def next_python(session: nox.Session) -> None:
    """Pythons newer than the one that continuous integration uses."""
    session.install(*PINNED)
    test(session)


def test(session: nox.Session) -> None:
    session.run("python", "-c", "import torch, sonde; print('torch', torch.__version__, 'sonde', sonde.__version__)")
    session.run("pytest", *session.posargs)
