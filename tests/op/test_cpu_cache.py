"""The disk cache of CPU kernels: damaged files cost time, never a result, and another user's code is never run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from sonde.op import cache, cpu, cpu_cache

SRC = Path(__file__).parents[2] / "src"
POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX modes")


def total(start, stop, x, out):
    s = 0.0
    for i in range(start, stop):
        s += 2 * x[i]
    out[0] = s


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    """An empty cache, in a process that has not warned yet."""
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    cpu_cache.cache_folder.cache_clear()
    yield tmp_path / "cache"
    cpu_cache.cache_folder.cache_clear()


def fresh() -> tuple[int, list[str]]:
    """Call with two signatures as a new process would, and check the results; how many came from the disk, and the warnings."""
    cpu_cache.cache_folder.cache_clear()
    cache._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = cpu.jit(total)
        for dtype in (np.float32, np.float64):
            for n in (3, 5):
                out = np.zeros(1, dtype)
                kernel(0, n, np.arange(n, dtype=dtype), out)
                assert out[0] == n * (n - 1)
    return sum(kernel.stats.cache_hits.values()), [str(w.message) for w in caught]


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_what_one_process_compiles_the_next_one_loads(folder):
    assert fresh() == (0, [])
    assert len(files(folder)) == 2  # one for each signature, and no temporary files
    assert fresh() == (2, [])


DAMAGES = {
    "empty": lambda file, data: file.write_bytes(b""),
    "cut": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "last byte cut": lambda file, data: file.write_bytes(data[:-1]),
    "longer": lambda file, data: file.write_bytes(data + b"\0"),
    "first byte flipped": lambda file, data: file.write_bytes(bytes([data[0] ^ 1]) + data[1:]),
    "code flipped": lambda file, data: file.write_bytes(_flipped(data)),
    "zeros": lambda file, data: file.write_bytes(bytes(len(data))),
    "noise": lambda file, data: file.write_bytes(np.random.default_rng(0).bytes(len(data))),
    "huge length": lambda file, data: file.write_bytes(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f"),  # pickle: MemoryError
    "text": lambda file, data: file.write_text("this is no kernel"),
    "link to nothing": lambda file, data: (file.unlink(), file.symlink_to("nowhere")),
}


def _flipped(data: bytes) -> bytes:
    """Flip bits of the machine code, which unpickling does not check."""
    at = data.index(b"\x7fELF") + 0x200
    return data[:at] + bytes(b ^ 0x55 for b in data[at : at + 64]) + data[at + 64 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(folder, damage):
    """Both kernels are compiled again with one warning; the next process finds the files repaired."""
    fresh()
    for file in files(folder):
        DAMAGES[damage](file, file.read_bytes())
    hits, said = fresh()
    if damage == "link to nothing":
        assert (hits, said) == (0, [])  # the same as if the file had been deleted
    else:
        assert hits == 0
        assert len(said) == 1
        assert "cannot be used and is compiled again" in said[0]
    assert fresh() == (2, [])


def test_one_damaged_file_of_two(folder):
    fresh()
    files(folder)[0].write_bytes(b"")
    hits, said = fresh()
    assert (hits, len(said)) == (1, 1)
    assert fresh() == (2, [])


def test_swapped_files(folder):
    """Each file is intact, but its code was compiled for other arguments, so it is not used."""
    fresh()
    one, two = files(folder)
    contents = one.read_bytes(), two.read_bytes()
    one.write_bytes(contents[1])
    two.write_bytes(contents[0])
    hits, said = fresh()
    assert (hits, len(said)) == (0, 1)
    assert fresh() == (2, [])


def test_folders_in_place_of_files(folder):
    """Folders where files should be are never deleted; every process compiles, with a warning."""
    fresh()
    for file in files(folder):
        file.unlink()
        file.mkdir()
    for _ in range(2):
        hits, said = fresh()
        assert (hits, len(said)) == (0, 2)
        assert "compiled again" in said[0]
        assert "are not kept" in said[1]


def test_deleted_while_it_is_used(folder):
    fresh()
    kernel = cpu.jit(total)
    shutil.rmtree(folder)
    out = np.zeros(1)
    kernel(0, 3, np.arange(3.0), out)
    assert out[0] == 6
    assert len(files(folder)) == 1


@pytest.mark.parametrize(
    ("when", "code"),
    [("write", errno.ENOSPC), ("write", errno.EDQUOT), ("make", errno.EROFS), ("make", errno.ENOSPC), ("move", errno.EACCES)],
)
def test_full_disk(monkeypatch, folder, when, code):
    """The disk is full when a file is created, written or renamed: calls are right, with one warning and no files left behind."""

    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    class Full:
        def __init__(self, descriptor, mode):
            self.file = real(descriptor, mode)

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            self.file.close()

        write = fail

    real = open
    with monkeypatch.context() as full:
        if when == "make":
            full.setattr(tempfile, "mkstemp", fail)
        elif when == "move":
            full.setattr(os, "replace", fail)
        else:
            full.setattr(cpu_cache, "open", lambda file, mode: (Full if mode == "wb" else real)(file, mode), raising=False)
        for _ in range(2):
            hits, said = fresh()
            assert hits == 0
            assert len(said) == 1
            assert os.strerror(code) in said[0]
        assert not files(folder)
    assert fresh() == (0, [])
    assert fresh() == (2, [])


def test_no_folder(monkeypatch, tmp_path):
    """The cache folder cannot be created, because a file is in its place or there is no home: one warning, right results."""
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "plain"))
    hits, said = fresh()
    assert (hits, len(said)) == (0, 1)
    assert "every process compiles them again" in said[0]
    monkeypatch.setattr(cpu_cache, "cache_dir", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    hits, said = fresh()
    assert (hits, len(said)) == (0, 1)


def test_warnings_as_errors_cost_no_result(folder):
    fresh()
    for file in files(folder):
        file.write_bytes(b"")
    cache._warned.clear()
    cpu_cache.cache_folder.cache_clear()
    out = np.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.jit(total)(0, 3, np.arange(3.0), out)
    assert out[0] == 6


def test_numba_that_has_moved_its_parts(monkeypatch, folder):
    """If Numba's internals have moved, nothing is cached and all results are right."""
    monkeypatch.setattr(cpu_cache, "dumps", None)
    assert fresh() == (0, [])
    assert not files(folder)
    monkeypatch.undo()
    monkeypatch.setenv("SONDE_CACHE_DIR", str(folder))
    monkeypatch.delattr(cpu_cache.CompileResult, "_reduce")
    hits, said = fresh()
    assert (hits, len(said)) == (0, 1)


# --- ownership and permissions


@POSIX
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_only_the_user_can_write(folder, umask):
    """Files and folders are created writable for the user only, whatever the umask."""
    before = os.umask(umask)
    try:
        fresh()
    finally:
        os.umask(before)
    inner = cpu_cache.cache_folder()
    assert inner is not None
    assert [stat.S_IMODE(p.stat().st_mode) for p in (inner.parent, inner)] == [0o700] * 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(folder)} == {0o600}
    assert fresh() == (2, [])


@POSIX
@pytest.mark.parametrize("which", ["inner", "outer"])
@pytest.mark.parametrize("how", ["group", "others", "owner", "link"])
def test_folders_that_others_can_write_are_refused(monkeypatch, folder, which, how):
    fresh()
    inner = cpu_cache.cache_folder()
    assert inner is not None
    this = inner if which == "inner" else inner.parent
    if how == "link":
        this.rename(folder / "moved")
        this.symlink_to(folder / "moved")
    elif how == "owner":
        # run as another user, whose own folder name is taken by a folder that this user owns
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        other = inner.parent.with_name(f"numba-{me + 1}")
        shutil.copytree(inner.parent, other)
    else:
        this.chmod(0o720 if how == "group" else 0o702)
    before = [file.read_bytes() for file in files(folder)]
    hits, said = fresh()
    assert (hits, len(said)) == (0, 1)
    assert {"link": "is not a folder", "owner": "belongs to user"}.get(how, "can be written by others") in said[0]
    assert [file.read_bytes() for file in files(folder)] == before  # nothing was written there either


@POSIX
def test_files_that_others_can_write_are_refused(folder):
    """Each file's permissions are checked, too, in case the folder was swapped after it was checked."""
    fresh()
    for file in files(folder):
        file.chmod(0o620)
    hits, said = fresh()
    assert (hits, len(said)) == (0, 1)
    assert "can be written by others" in said[0]
    assert fresh() == (2, [])


@POSIX
def test_users_of_one_folder_do_not_disturb_each_other(monkeypatch, folder):
    fresh()
    mine, me = cpu_cache.cache_folder(), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    monkeypatch.setattr(cpu_cache, "_must_be_ours", lambda path, found: None)  # files of the made-up user would fail this check
    assert fresh() == (0, [])
    assert cpu_cache.cache_folder() != mine
    monkeypatch.setattr(os, "geteuid", lambda: me)
    assert fresh() == (2, [])


@POSIX
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_unreadable_files_and_folders(monkeypatch, mode):
    """Files in a read-only folder are used; if nothing can be read, everything is compiled."""
    root = os.geteuid() == 0
    fresh()  # so that numba has imported what it needs
    folder = Path(tempfile.mkdtemp())  # pytest's own folders cannot be entered by other users
    monkeypatch.setenv("SONDE_CACHE_DIR", str(folder))
    if root:  # root ignores permissions, so continue as another user
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        fresh()
        inner = cpu_cache.cache_folder()
        assert inner is not None
        for file in files(folder):
            file.chmod(mode & 0o400)
        inner.chmod(mode)
        hits, said = fresh()
        assert hits == (2 if mode else 0)
        assert bool(said) == (not mode)
        inner.chmod(0o700)
        fresh()
        assert fresh() == (2, [])
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(folder)


# --- whole processes


OPERATOR = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, sonde
    torch.manual_seed(0)
    torch.set_num_threads(1)
    points = torch.rand(64, 3)
    distance, index = sonde.knn(points, points, 3, impl="numba")
    assert torch.equal(index, torch.cdist(points.double(), points.double()).topk(3, largest=False).indices)
from sonde.points._search import cpu_tree as _cpu_tree
from sonde.points._search import cpu as _cpu_search
kernels = [k for module in (_cpu_tree, _cpu_search) for k in vars(module).values() if hasattr(k, "stats")]
said = [str(w.message) for w in caught if "sonde" in str(w.message)]
print(json.dumps([sum(sum(k.stats.cache_hits.values()) for k in kernels), said]))
"""


def process(folder: Path) -> subprocess.Popen:
    env = os.environ | {"SONDE_CACHE_DIR": str(folder), "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", OPERATOR], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(running: subprocess.Popen) -> list:
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_operators_in_processes(folder):
    """Three processes start at once with an empty cache, then with one damaged in several ways; all results are right."""
    for said, before in ((0, None), (1, lambda i, file: (b"", file.read_bytes()[:-1], os.urandom(9))[i % 3])):
        for i, file in enumerate(files(folder)) if before else ():
            file.write_bytes(before(i, file))
        for _, words in [finish(p) for p in [process(folder) for _ in range(3)]]:
            assert len(words) <= said
        hits, words = finish(process(folder))
        assert hits > 0
        assert not words
