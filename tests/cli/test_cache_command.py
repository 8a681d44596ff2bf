"""``sonde cache``: its output, its questions, its errors."""

from __future__ import annotations

import json
import sqlite3
import sys

import pytest

from sonde.cli import main
from sonde.jit import store
from sonde.jit.store import Key, Store, Trial, open_store
from sonde.op import cache

KEY = Key("sample_sum", "abc", "NVIDIA H200", "2.13", "3.7", "float32", "C=64 " * 20, "2^10")
A, B = dict(BLOCK=64, warps=4), dict(BLOCK=128, warps=8)


@pytest.fixture(autouse=True)
def tuned(monkeypatch, tmp_path) -> Store:
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_stores", {})
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(cache, "_warned", set())
    open_store().record(KEY, [Trial(A, (12.345678901, 12.345678901, 99.0)), Trial(B, cause="wrong")])
    open_store().record(KEY._replace(kernel="sample_dot", device="A100"), [Trial(B, (7.0,))])
    return open_store()


def sonde(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(("cache", *argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_show(capsys):
    code, out, err = sonde(capsys, "show")
    assert (code, err) == (0, "")
    (row,) = [line for line in out.splitlines() if "sample_sum" in line]
    for word in ("NVIDIA H200", "float32", "C=64 C=64 C=64 C=64 C=64 C=64 C…", "2^10", "BLOCK=64 warps=4", "12.35", " 3 ", "20"):
        assert word in row
    assert "sample_dot" in out
    assert sonde(capsys) == (0, out, "")  # the default
    assert "sample_dot" not in sonde(capsys, "show", "--kernel", "sample_sum")[1]


def test_show_json(capsys, tmp_path):
    _, out, _ = sonde(capsys, "show", "--kernel", "sample_sum", "--json")
    (row,) = json.loads(out)["winners"]
    assert (row["kernel"], row["config"], row["constants"], row["timings"]) == ("sample_sum", A, KEY.constants, 3)
    assert sonde(capsys, "show", "--json", str(tmp_path / "x.json")) == (0, "", "")
    assert len(json.loads((tmp_path / "x.json").read_text())["winners"]) == 2


def test_clear(capsys, tuned):
    assert sonde(capsys, "clear", "--kernel", "sample_dot") == (0, "Forgot 1 winner and all timings of sample_dot\n", "")
    assert [w.key for w in tuned.winners()] == [KEY]
    assert sonde(capsys, "clear")[0] == 0
    assert tuned.trials() == []
    code, out, _ = sonde(capsys, "show")
    assert code == 0
    assert out.startswith("Nothing is tuned yet in ")


@pytest.mark.parametrize(("answer", "left"), [("n", 2), ("", 2), ("y", 0), ("YES", 0), (None, 2)])
def test_clear_asks_on_a_terminal(capsys, monkeypatch, tuned, answer, left):
    asked = []

    def reply(text):
        asked.append(text)
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", reply)
    assert sonde(capsys, "clear")[0] == 0
    assert len(tuned.winners()) == left
    assert len(asked) == 1
    assert asked[0].startswith("Forget 2 winners and all timings in ")
    assert sonde(capsys, "clear", "--yes")[0] == 0
    assert (len(asked), tuned.winners()) == (1, [])


def test_export_and_import(capsys, tuned, tmp_path, monkeypatch):
    file = str(tmp_path / "winners.json")
    assert sonde(capsys, "export", file) == (0, f"Wrote 2 winners to {file}\n", "")
    before = tuned.export()
    assert json.loads(sonde(capsys, "export", "-")[1]) == before
    assert [w["device"] for w in json.loads(sonde(capsys, "export", "-", "--device", "A100")[1])["winners"]] == ["A100"]
    tuned.clear()
    code, out, _ = sonde(capsys, "import", file)
    assert (code, out.split(";")[0]) == (0, "Imported 2 of 2 winners")
    assert tuned.export() == before  # export and import lose no digit
    assert sonde(capsys, "import", file)[1].startswith("Imported 0 of 2 winners")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shwo"], "unknown action 'shwo'. Did you mean 'show'? Valid: show, clear, export, import"),
        (["show", "--kernel", "sample_sun"], "unknown kernel 'sample_sun'. Did you mean 'sample_sum'?"),
        (["clear", "--kernel", "other"], "unknown kernel 'other'. Valid: sample_dot, sample_sum"),
        (["export"], "cache export needs a file: sonde cache export FILE"),
        (["export", "no/such/folder/x.json"], "folder that exists"),
        (["export", "-", "--device", "A10"], "Did you mean 'A100'?"),
        (["import"], "cache import needs a file"),
        (["import", "nothing.json"], "import nothing.json: No such file"),
        (["import", "x.json", "--yes"], "cache import takes no --yes"),
        (["show", "x.json"], "cache show takes no 'x.json'"),
        (["show", "--json", "no/such/folder/x.json"], "folder that exists"),
        (["show", "--kernle", "x"], "did you mean --kernel?"),
    ],
)
def test_refusals(capsys, tuned, argv, message):
    code, out, err = sonde(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert len(tuned.winners()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "Expecting"), ("[]", "must have format 1"), ('{"format": 9}', "must have format 1"), ("\udcff", "decode")],
)
def test_import_refuses_other_files(capsys, tuned, tmp_path, text, message):
    file = tmp_path / "x.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    code, out, err = sonde(capsys, "import", str(file))
    assert (code, out) == (2, "")
    assert f"import {file}: " in err
    assert message in err


def test_import_leaves_out_rows_that_are_not_valid(capsys, tuned, tmp_path):
    """Invalid rows, written as text into the file, are left out one by one; the others are imported."""
    document = tuned.export()
    for row in document["winners"]:
        row["median_us"] = 1.0
    good, other = [json.dumps(row) for row in document["winners"]]
    nested = '{"BLOCK": ' * 5000 + "1" + "}" * 5000
    bad = [
        good.replace('"median_us": 1.0', f'"median_us": {value}')
        for value in ('"text"', "NaN", "-Infinity", "-1", "0", "true", "null", "1e999", "1" * 5000, nested, "[" * 5000 + "]" * 5000)
    ]
    bad += [good.replace('"timings": ', f'"timings": {n}') for n in (10**30, "0.0")]
    bad += [good.replace('{"BLOCK"', nested + ', "BLOCK"').replace('"config": ', '"config": {"x": '), good[:-1] + ', "at": 1e999}']
    bad += [good.replace('"kernel": "', f'"kernel": "{text}') for text in (r"\ud800", r"\u001b[31m", "\udcff")]
    bad += [good[:-1] + ', "median_us": 0.5}', good.replace('"config": {', '"config": {"BLOCK": 1, ')]  # a name that occurs twice
    bad += ["3", "[]", "{}", "null"]
    bad = [row for row in bad if row != good]
    file = tmp_path / "x.json"
    file.write_bytes(f'{{"format": 1, "winners": [{", ".join([*bad, good, *bad, other])}]}}'.encode(errors="surrogateescape"))
    tuned.clear()
    code, out, err = sonde(capsys, "import", str(file))
    assert (code, err) == (0, "")
    first, counted, *causes = out.splitlines()
    assert first.startswith(f"Imported 2 of {2 * len(bad) + 2} winners; ")
    assert counted == f"Left out {2 * len(bad)} that are not valid:"
    assert causes[0] == "  row 0: median_us must be a number of 0.001 to 1e+12, got 'text'"
    assert causes[-1] == f"  and {2 * len(bad) - 5} more"
    assert len(bad) > 20
    assert tuned.export() == document


def test_show_and_export_count_what_they_leave_out(capsys, tuned, tmp_path):
    with sqlite3.connect(tuned.path) as db:
        db.execute("UPDATE winners SET median_us = 'fast' WHERE key = 1")
    db.close()
    cause = "row 0: median_us must be a number of 0.001 to 1e+12, got 'fast'"
    with pytest.warns(RuntimeWarning, match="not valid"):
        assert sonde(capsys, "show")[1].endswith(f"Left out 1 that are not valid:\n  {cause}\n")
    assert json.loads(sonde(capsys, "show", "--json")[1])["left_out"] == [cause]
    file = tmp_path / "winners.json"
    assert sonde(capsys, "export", str(file))[1] == f"Wrote 1 winner to {file}\nLeft out 1 that are not valid:\n  {cause}\n"
    assert json.loads(sonde(capsys, "export", "-")[1])["winners"][0]["kernel"] == "sample_dot"


@pytest.mark.filterwarnings("ignore:sonde")
def test_store_that_cannot_be_used_is_said(capsys, monkeypatch, tmp_path):
    file = tmp_path / "winners.json"
    sonde(capsys, "export", str(file))
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "plain"))
    code, out, err = sonde(capsys, "import", str(file))
    assert (code, out) == (2, "")
    assert "the tuning store cannot be used: " in err
