"""A process that answers questions, and whose crash or hang takes nobody with it.

It is not ``multiprocessing``'s, which would run the caller's script again: a fresh interpreter imports this module and answers
over a socket of its own, whatever is printed meanwhile.
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

START_LIMIT_S = 300.0  # imports, the GPU's context, the reference
TAIL = 1000  # characters of what a lost process printed


class Lost(Exception):
    """The process that should have answered could not be started, died or had to be killed; the text says why."""


class Worker:
    """A process that answers one question at a time: ``role(*about)`` there gives the function that is asked.

    A lost one is replaced when there is another question; one that cannot start is not tried again.
    """

    def __init__(self, role: Callable, about: tuple, env: dict[str, str]) -> None:
        self.role = role
        self._hello = pickle.dumps((role, about))
        self._env = env
        self._lock = threading.Lock()  # between starting and killing
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
                    start_new_session=True,  # Ctrl-C is its caller's, and what it starts can be killed with it
                )
            except OSError as problem:  # no memory, or too many processes
                self._connection.close()
                self._log.close()
                raise Lost(f"no process could be started: {problem}") from problem
        self._ready, self._mark = False, 0
        self._send(self._hello)

    def ask(self, question: tuple, limit_s: float, doing: str, who: str) -> Any:
        """The answer; `doing` and `who` name what takes place in the text of :class:`Lost`."""
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
        with suppress(OSError):  # if it is gone, the missing answer will tell
            self._connection.send_bytes(message)

    def _answer(self, limit_s: float, doing: str, who: str) -> Any:
        assert self._process is not None
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
            cause = f"{doing} did not finish in {limit_s:g} s"
        except Exception:  # it is gone, or what came is no answer
            try:
                code = self._process.wait(5)
                cause = f"{who} crashed (signal {-code})" if code < 0 else f"{who} ended with exit status {code}"
            except subprocess.TimeoutExpired:
                cause = f"{who} answers no more"
        printed = os.pread(self._log.fileno(), 1 << 20, max(self._mark, os.fstat(self._log.fileno()).st_size - TAIL))
        self.stop()
        raise Lost("\n".join([cause, *printed.decode(errors="replace").strip().splitlines()]))

    def kill(self) -> None:
        """End it for good; its owner may be waiting for it in another thread."""
        with self._lock:
            self._killed = True
            self._signal()

    def stop(self) -> None:
        """End it; the next question starts another."""
        with self._lock:
            self._signal()
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):  # if the system is still freeing what it held
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
    """What a :class:`Worker`'s process does: answer until the caller is gone."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # a crash is no news here
    os.set_inheritable(fd, False)
    connection, inbox = Connection(fd), SimpleQueue[bytes]()

    def listen() -> None:
        try:
            while True:
                inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # no caller: not even what hangs goes on

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
    """Type and message; of a long one, where it starts and how it ends, which is where Triton says what is wrong."""
    while isinstance(error.__cause__, type(error)):  # from the call to the line that it fails in
        error = error.__cause__
    lines = str(error).strip().splitlines()
    if len(lines) > 12:
        lines = [*lines[:3], "…", *lines[-8:]]
    return "\n".join([f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:]])
