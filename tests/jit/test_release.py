"""Ahead-of-time builds: made without a GPU, found after a move, and never loaded where they do not match."""

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs

from sonde.jit import release
from sonde.jit.release import INDEX, MANIFEST, Entry, Task
from sonde.op import cache

ROOT = Path(__file__).parents[2]

# run in a process without these kernels: lists what it compiles, for each architecture
USER = """
import json, sys, warnings
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from sonde.jit.workers import CompileOnly
found = []
triton.knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
arch = int(sys.argv[1])
driver.set_active(CompileOnly(GPUTarget("cuda", arch, 32)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from sonde.grid.sample_sum import cases, gpu
    args = cases.make(**cases.SMALL["one_of_each"])
    from sonde.op.register import decide
    out = decide(gpu, args)(*args)
    decide(gpu, (out, *args), [True] * 3)(out, *args)
from sonde.jit.launch import _compiled
print(json.dumps(dict(bound=len(_compiled), hits=found, warnings=[str(w.message) for w in caught if "sonde" in str(w.message)])))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A build for two architectures in one process, with one case that cannot be built: it is reported, the rest is built."""
    folder = tmp_path_factory.mktemp("build") / "made"
    good = [Task("sample_sum", "one_of_each", "float32", "contiguous", arch) for arch in ("sm_80", "sm_90")]
    bad = good[0]._replace(case="no such case")
    done = {b.task: b for b in release.build([bad, *good], folder, 1)}
    assert "no such case" in done[bad].cause
    assert [(done[task].cause, bool(done[task].entries)) for task in good] == [(None, True)] * 2
    assert [t["arch"] for t in json.loads((folder / MANIFEST).read_text())["tasks"]] == ["sm_80", "sm_90"]
    return folder


def use(folder: Path | None, cache: Path, arch: int = 90) -> dict:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SONDE_RELEASE")}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "src")}
    if folder is not None:
        env["SONDE_RELEASE"] = str(folder)
    done = subprocess.run([sys.executable, "-c", USER, str(arch)], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_is_compiled_where_it_is_used(built, tmp_path):
    """After the folder has moved every kernel is found, for each architecture; without it every kernel is compiled."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(built, moved)
    for arch in (80, 90):
        found = use(moved, tmp_path / f"cache{arch}", arch)
        assert found["hits"] == []  # the compiler is not even asked
        assert found["bound"] >= 2
        assert not found["warnings"]
    assert not any(use(None, tmp_path / "other")["hits"])


@pytest.mark.parametrize("what", ["triton", "kernels", "python", "format", "manifest"])
def test_a_mismatch_is_named_and_ignored(built, tmp_path, what):
    """For a mismatch or an unfinished build, one warning names the cause, and kernels are compiled as usual."""
    folder = tmp_path / "release"
    shutil.copytree(built, folder)
    if what == "manifest":
        (folder / MANIFEST).unlink()
    else:
        document = json.loads((folder / MANIFEST).read_text())
        (document if what == "format" else document["built_with"])[what] = "another"
        (folder / MANIFEST).write_text(json.dumps(document))
    assert what == "manifest" or what in release.mismatch(folder)
    if what in ("triton", "manifest"):
        found = use(folder, tmp_path / "cache")
        assert found["hits"]
        assert not any(found["hits"])
        assert len(found["warnings"]) == 1
        assert str(folder) in found["warnings"][0]


# --- damaged or forged folders


@pytest.fixture
def folder(built, tmp_path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(built, tmp_path / "release")
    return tmp_path / "release"


@pytest.fixture
def attached(monkeypatch):
    """Attach a release as the first import does; returns the warnings."""

    def attach(folder: Path) -> list[str]:
        for name in ("_index", "_files"):
            monkeypatch.setattr(release, name, {})
        monkeypatch.setattr(release, "_folder", None)
        monkeypatch.setattr(cache, "_warned", set())
        monkeypatch.setattr(knobs.cache, "manager_class", None)
        monkeypatch.setenv("SONDE_RELEASE", str(folder))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            release.attach()
        return [str(w.message) for w in caught]

    return attach


def forge(folder: Path, index: bytes) -> None:
    """Make index and manifest agree, as anyone who can write the folder could."""
    (folder / INDEX).write_bytes(index)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["index"] = hashlib.sha256(index).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def edit(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_bytes())
    change(index)
    forge(folder, json.dumps(index).encode())


def found(folder: Path) -> list[str]:
    """Names of the kernels that can be loaded."""
    return [name for name in release._index if release.find(None, name) is not None]


def test_index_is_data(folder, attached):
    """The index lists every kernel and every file as plain data; a pickle is never read."""
    index = json.loads((folder / INDEX).read_bytes())
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert set(index["files"]) == files - {INDEX, MANIFEST}
    assert {k["folder"] for k in index["kernels"].values()} <= {name.split("/")[0] for name in files}
    assert not list(folder.rglob("*.pickle"))
    (folder / "index.pickle").write_bytes(b"cos\nabort\n(tR.")
    assert attached(folder) == []
    assert len(found(folder)) == len(index["kernels"]) >= 4


def test_entries_survive_the_journey():
    """All kinds of constants that kernels have survive a round trip; a kernel with any other kind is left to be compiled."""
    import triton.language as tl

    constants = {(3,): 64, (4,): None, (5,): True, (6, 1): 0.5, (7,): tl.float32, (8,): (1, tl.int64), (9,): "word"}
    entry = Entry("A" * 52, "ab" * 32, {"x": "*fp32", "N": "i32", "T": ("i32", "constexpr")}, constants)
    index = json.loads(json.dumps(release.index_of({"a": entry, "b": entry._replace(constants={(0,): object()})}, ROOT)))
    assert release.read_index(index) == ({"a": entry}, {}, [])


ODD_INDEX = {
    "missing": None, "empty": b"", "no JSON": b"{", "list": b"[]", "null": b"null", "number": b"1e999", "no parts": b"{}",
    "half": b'{"kernels": {}}', "other parts": b'{"kernels": [], "files": 3}', "deep": b"[" * 5000, "noise": bytes(range(256)),
    "pickle": pickle.dumps({}),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD_INDEX)
@pytest.mark.parametrize("forged", [False, True])
def test_an_odd_index_is_named_and_ignored(folder, attached, what, forged):
    """An invalid index gives a warning, never an error at import, whether or not the manifest agrees with it."""
    index = ODD_INDEX[what]
    if index is None:
        (folder / INDEX).unlink()
    elif forged:
        forge(folder, index)
    else:
        (folder / INDEX).write_bytes(index)
    (said,) = attached(folder)
    assert f"the release build {folder} is ignored" in said
    assert INDEX in said or forged
    assert (release._folder, release._index, knobs.cache.manager_class) == (None, {}, None)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", '"x"', "{}", '{"built_with": 3}', '{"built_with": []}', "[" * 5000, "\udcff"]
)
def test_an_odd_manifest_is_named_and_ignored(folder, attached, text):
    (folder / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    (said,) = attached(folder)
    assert f"is ignored: it has no readable {MANIFEST}" in said


@pytest.mark.parametrize("where", ["nowhere", "file", "folder/loop"])
def test_no_folder_at_all(tmp_path, attached, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "loop").symlink_to("loop")
    (said,) = attached(tmp_path / where)
    assert "is ignored: it has no readable" in said


def test_warnings_as_errors_do_not_stop_the_import(monkeypatch, folder):
    (folder / INDEX).unlink()
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv("SONDE_RELEASE", str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release.attach()
    assert release._folder is None


@pytest.mark.parametrize(
    "change",
    [
        dict(folder="../release"), dict(folder="/tmp"), dict(folder=""), dict(folder="."), dict(folder=3), dict(folder=None),
        dict(hash="x"), dict(hash=None), dict(signature=[]), dict(signature="x"), dict(constants={}), dict(constants=[[1]]),
        dict(constants=[[{"tuple": [1]}, {"code": "exit"}]]), dict(constants=[[{"tuple": [1]}, {"dtype": "fp3"}]]), 3, None, [],
    ],
)  # fmt: skip
def test_odd_entries_are_named_and_ignored(folder, attached, change):
    """Only the invalid entries are ignored: the other kernels are loaded."""

    def spoil(index):
        name, *_ = index["kernels"]
        index["kernels"][name] = index["kernels"][name] | change if isinstance(change, dict) and change else change

    edit(folder, spoil)
    name, *others = json.loads((folder / INDEX).read_bytes())["kernels"]
    said = attached(folder)
    assert found(folder) == (others if change != dict(constants={}) else [name, *others])
    if change != dict(constants={}):
        assert len(said) == 1
        assert "odd entries, which are ignored" in said[0]
        assert name[:60] in said[0]


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "{}/../../x", "{}/", "{}/..", "{}/a/b", "{}", "C:\\x", "{}/a\0b", "{}/\ud800", ""]
)
def test_paths_out_of_the_release_are_named_and_ignored(folder, attached, name):
    inside = json.loads((folder / INDEX).read_bytes())["kernels"].popitem()[1]["folder"]
    edit(folder, lambda index: index["files"].update({name.format(inside): "0" * 64}))
    (said,) = attached(folder)
    assert "odd entries, which are ignored" in said
    assert all(".." not in file and "/" not in file for files in release._files.values() for file in files)
    assert len(found(folder)) == len(release._index)


SPOILT = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "flipped": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "gone": lambda file: file.unlink(),
    "folder": lambda file: (file.unlink(), file.mkdir()),
    "circle": lambda file: (file.unlink(), file.symlink_to(file.name)),
    "link that leaves": lambda file: (file.rename(file.parents[2] / "elsewhere"), file.symlink_to(file.parents[2] / "elsewhere")),
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_spoilt_files_are_named_and_not_loaded(folder, attached, how, suffix):
    """Damaged files are found before any of them is used; a link out of the release is refused even if its content is right."""
    assert attached(folder) == []
    name, *others = release._index
    inside = folder / release._index[name].folder
    others = [other for other in others if release._index[other].folder != inside.name]
    (file,) = [f for f in inside.iterdir() if f.suffix == suffix and not f.name.startswith("__grp__")]
    SPOILT[how](file)
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(file))} of a release build is ignored: ") as caught:
        assert [release.find(None, name) for _ in range(2)] == [None, None]
    assert len(caught) == 1  # only one warning
    assert all(release.find(None, other) is not None for other in others)


def test_a_folder_that_is_a_link_out(folder, attached, tmp_path):
    attached(folder)
    name = next(iter(release._index))
    inside = folder / release._index[name].folder
    shutil.move(inside, tmp_path / "elsewhere")
    inside.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="it leads out of the release"):
        assert release.find(None, name) is None


def test_launchers_are_checked_too(folder, attached, monkeypatch, tmp_path):
    """Triton loads shared libraries from its cache; from the release it gets only files in the index with the recorded hash."""
    attached(folder)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    manager = knobs.cache.manager_class
    key, name = next((f.parent.name, f.name) for f in sorted(folder.rglob("*")) if f.suffix in (".so", ".cubin"))
    group = next(f.name.removeprefix("__grp__") for f in folder.rglob("__grp__*"))
    grouped = next(f.parent.name for f in folder.rglob(f"__grp__{group}"))
    assert manager(key).get_file(name) == str(folder / key / name)
    assert set(manager(grouped).get_group(group)) == {f.name for f in (folder / grouped).iterdir() if "__grp__" not in f.name}
    (folder / key / "new.so").write_bytes(b"")
    assert manager(key).get_file("new.so") is None
    assert release.artefact(key, "../sonde-release.json") is None
    for file in folder.glob("*/*"):
        file.write_bytes(b"other")
    with pytest.warns(RuntimeWarning, match="it is not what was built"):
        assert (manager(key).get_file(name), manager(grouped).get_group(group)) == (None, None)


def test_a_spoilt_release_compiles_in_a_fresh_process(folder, tmp_path):
    """If one binary is damaged, that kernel is compiled and the others come from the release."""
    binaries = sorted(folder.rglob("*.cubin"))
    for file in binaries:
        file.write_bytes(file.read_bytes()[:-1])
    found = use(folder, tmp_path / "cache")
    assert found["hits"]
    assert not any(found["hits"])
    assert found["bound"] >= 2
    assert found["warnings"]
    assert all("is ignored: it is not what was built" in text for text in found["warnings"])


def test_other_folders_are_left_alone(tmp_path):
    """A build into a folder with a user's own files neither uses, rewrites nor deletes any of them."""
    own = tmp_path / "mine" / "__grp__x"
    own.parent.mkdir()
    for file in (own, own.with_name("lock"), tmp_path / "lock"):
        file.write_text("mine")
    release.seal(tmp_path, [])
    assert [file.read_text() for file in (own, own.with_name("lock"), tmp_path / "lock")] == ["mine"] * 3
    assert json.loads((tmp_path / INDEX).read_bytes()) == dict(kernels={}, files={})


def test_identity_covers_every_file_that_imports_triton(monkeypatch, tmp_path):
    """Changing, moving or adding a file that imports Triton makes another release, whatever the file's name."""
    package = ROOT / "src" / "sonde"
    copy = tmp_path / "sonde"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    monkeypatch.setattr(cache, "__file__", str(copy / "op" / "cache.py"))

    def digest() -> str:
        cache.sources_digest.cache_clear()
        return release.identity()["kernels"]

    before = digest()
    files = [f for f in copy.rglob("*.py") if re.search(r"^\s*(import|from) triton", f.read_text(), re.MULTILINE)]
    assert len(files) > 20
    assert not all("gpu" in f.name for f in files)
    for file in files:
        text = file.read_text()
        file.write_text(text + "\n")
        assert digest() != before, file
        file.write_text(text)
    assert digest() == before
    (copy / "grid" / "taps.py").write_text("import triton\n")
    assert digest() != before
    monkeypatch.undo()
    cache.sources_digest.cache_clear()
