"""A worker process that answers requests; if it crashes or hangs, its caller goes on.

We do not use ``multiprocessing``, which would run the caller's script again. A fresh interpreter imports this module and answers
over a socket of its own, so that nothing it prints can disturb the protocol.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any

START_LIMIT_S = 300.0  # for imports, the GPU's context, the reference
TAIL = 1000  # how many bytes of a lost process's output are shown


class Lost(Exception):
    """The process that should have answered could not be started, died or had to be killed; the text says why."""


class Worker:
    """A process that answers one question at a time with the function that ``role(*about)`` returned there.

    A lost process is replaced when the next question comes; one that fails to start is not tried again.
    """

    def __init__(self, role: Callable, about: tuple, env: dict[str, str]) -> None:
        self.role = role
        self._hello = pickle.dumps((role, about))
        self._env = env
        self._lock = threading.Lock()  # start and kill must not overlap
        self._killed = False
        self._process: subprocess.Popen | None = None
        self._broken: str | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        path = [os.fspath(entry) for entry in sys.path]
        try:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as problem:
            raise Lost(f"no process could be started: {problem}") from problem
        self._connection, theirs = Pipe()
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve({theirs.fileno()})"
        with self._lock, theirs:
            if self._killed:
                raise Lost("stopped")
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C reaches only the caller, and the whole group can be killed at once
                )
            except OSError as problem:  # no memory, or too many processes
                self._connection.close()
                self._log.close()
                raise Lost(f"no process could be started: {problem}") from problem
        self._ready, self._mark = False, 0
        self._send(self._hello)

    def ask(self, question: tuple, limit_s: float, doing: str, who: str) -> Any:
        """The answer. `doing` and `who` describe the work in the message of :class:`Lost`."""
        if self._broken:
            raise Lost(self._broken)
        self.start()
        if not self._ready:
            try:
                self._broken = self._answer(START_LIMIT_S, "the start of a process", "a process that started")
            except Lost as lost:
                self._broken = str(lost)
            if self._broken:
                self.stop()
                raise Lost(self._broken)
            self._ready = True
        self._mark = os.fstat(self._log.fileno()).st_size
        self._send(pickle.dumps(question))
        return self._answer(limit_s, doing, who)

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # if the process is gone, waiting for its answer reports that
            self._connection.send_bytes(message)

    def _answer(self, limit_s: float, doing: str, who: str) -> Any:
        assert self._process is not None
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
            cause = f"{doing} did not finish in {limit_s:g} s"
        except Exception:  # it is gone, or sent something else
            try:
                code = self._process.wait(5)
                cause = f"{who} crashed (signal {-code})" if code < 0 else f"{who} ended with exit status {code}"
            except subprocess.TimeoutExpired:
                cause = f"{who} answers no more"
        printed = os.pread(self._log.fileno(), 1 << 20, max(self._mark, os.fstat(self._log.fileno()).st_size - TAIL))
        self.stop()
        raise Lost("\n".join([cause, *printed.decode(errors="replace").strip().splitlines()]))

    def kill(self) -> None:
        """End the process for good, even while its owner waits for an answer in another thread."""
        with self._lock:
            self._killed = True
            self._signal()

    def stop(self) -> None:
        """End the process; the next question starts a new one."""
        with self._lock:
            self._signal()
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):  # the system may still be freeing its memory
                    self._process.wait(10)
                self._process = None
                self._connection.close()
                self._log.close()

    def close(self) -> None:
        self.kill()
        self.stop()

    def _signal(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def serve(fd: int) -> None:
    """The main loop of a :class:`Worker`'s process: answer until the caller is gone."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # crashes are expected; dump no core
    os.set_inheritable(fd, False)
    connection, inbox = Connection(fd), SimpleQueue[bytes]()

    def listen() -> None:
        try:
            while True:
                inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the caller is gone: end everything, even what hangs

    threading.Thread(target=listen, daemon=True).start()
    try:
        role, about = pickle.loads(inbox.get())
        answer = role(*about)
    except Exception as error:
        connection.send(describe(error))
        return
    connection.send(None)
    while True:
        connection.send(answer(*pickle.loads(inbox.get())))


def describe(error: BaseException) -> str:
    """Type and message. A long message is cut in the middle: Triton states the problem at the end."""
    while isinstance(error.__cause__, type(error)):  # Triton nests one error per call; the innermost names the line
        error = error.__cause__
    lines = str(error).strip().splitlines()
    if len(lines) > 12:
        lines = [*lines[:3], "…", *lines[-8:]]
    return "\n".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:]])
