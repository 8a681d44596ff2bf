"""The tuning store: processes never lose each other's rows, and no damage to the file stops the library."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from sonde.jit import database, store
from sonde.jit.store import Key, Store, Trial, open_store
from sonde.op import cache

SRC = Path(__file__).parents[2] / "src"
KEY = Key("sample_sum", "abc", "H200", "2.13", "3.7", "float32", "C=64", "2^10")
A, B, C = dict(BLOCK=64), dict(BLOCK=128), dict(BLOCK=256)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache" / "tuning.sqlite"


@pytest.fixture
def one(path) -> Store:
    return Store(path)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(store, "_stores", {})


# Importing the package's root would import torch, which takes eight processes longer than their work; these modules do not need it
# (`timing` names it, and uses it on GPUs).
PROLOGUE = f"""
import sys, os, time, types
for name in ("sonde", "sonde.op", "sonde.jit", "torch"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{str(SRC)!r} + "/" + name.replace(".", "/")]
from pathlib import Path
from sonde.jit import database
from sonde.jit.store import Key, Store, Trial
path, n = Path(sys.argv[1]), int(sys.argv[2])
store, KEY = Store(path), Key{tuple(KEY)!r}
"""


def start(code: str, path: Path, n: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-W", "error", "-c", PROLOGUE + code, str(path), str(n)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.strip()


# --- contents


def test_trials_are_kept_whole(one, path):
    trials = [
        Trial(A, (3.0, 1.5, 2.25), error=1e-7, compile_s=0.5),
        Trial(B, (1.0 / 3, 5e3), error=float("inf")),
        Trial(C, cause="wrong: off by 1e-2 — µ"),
    ]
    before = time.time()
    assert one.record(KEY, trials) == A
    one.record(KEY._replace(bucket="2^11"), [Trial(B, (1.0,))])
    again = Store(path)
    assert [r.trial for r in again.trials(KEY)] == trials
    assert all(r.key == KEY and before <= r.at <= time.time() for r in again.trials(KEY))
    assert len(again.trials()) == 4


def test_median():
    assert Trial(A, (9.0, 1.0, 2.0)).median_us == 2.0
    assert Trial(A, (9.0, 1.0, 2.0, 4.0)).median_us == 3.0
    assert Trial(A).median_us == math.inf


def test_every_part_of_the_key_counts(one):
    one.record(KEY, [Trial(A, (1.0,))])
    for name in Key._fields:
        assert one.winner(KEY._replace(**{name: "other"})) is None
    assert one.winner(KEY) == A


def test_winner_is_the_fastest_that_is_right(one):
    assert one.winner(KEY) is None
    assert one.record(KEY, [Trial(A, cause="does not compile"), Trial(B)]) is None
    assert one.winner(KEY) is None
    trials = [Trial(A, (1.0,), cause="wrong"), Trial(B, (3.0,)), Trial(C, (2.0,)), Trial(dict(BLOCK=1), (float("nan"),))]
    assert one.record(KEY, trials) == C
    assert one.winner(KEY) == C


@pytest.mark.parametrize(("new", "wins"), [(94.9, True), (95.0, True), (95.1, False), (100.0, False)])
def test_new_winner_must_be_five_percent_faster(one, new, wins):
    one.record(KEY, [Trial(A, (100.0,))])
    assert one.record(KEY, [Trial(B, (new,))]) == (B if wins else A)
    assert one.winners()[0].median_us == (new if wins else 100.0)


def test_old_winner_defends_itself_with_its_new_time(one):
    one.record(KEY, [Trial(A, (100.0,))])
    assert one.record(KEY, [Trial(B, (85.0,)), Trial(A, (88.0, 88.0))]) == A  # the machine is faster today
    assert one.winners()[0][2:4] == (88.0, 2)
    assert one.record(KEY, [Trial(A, (120.0,)), Trial(B, (110.0,))]) == B
    assert one.record(KEY, [Trial(B, (105.0,), cause="wrong"), Trial(C, (500.0,))]) == C  # what fails now is dropped
    assert one.record(KEY, [Trial(C, cause="wrong")]) is None
    assert one.winner(KEY) is None


def test_winner_is_a_copy(one):
    one.record(KEY, [Trial(A, (1.0,))])
    one.winner(KEY)["BLOCK"] = 0
    assert one.winner(KEY) == A


def test_snapshot_has_one_device(one):
    other = KEY._replace(device="A100")
    one.record(KEY, [Trial(A, (1.0,))])
    one.record(other, [Trial(B, (1.0,))])
    assert one.snapshot("H200") == {KEY: A}
    assert one.snapshot("A100") == {other: B}
    assert one.snapshot("none") == {}


def test_clear(one):
    other = KEY._replace(kernel="sample_dot")
    one.record(KEY, [Trial(A, (1.0,))])
    one.record(other, [Trial(B, cause="wrong")])
    assert one.clear("nothing") == 0
    assert one.clear("sample_dot") == 1
    assert [r.key for r in one.trials()] == [KEY]
    assert one.claim(KEY, "me", 60)
    assert one.clear() == 1
    assert (one.winners(), one.trials()) == ([], [])
    assert not one.claim(KEY, "you", 60)  # leases survive, so whoever is tuning is still alone


def test_reading_creates_nothing(one, path):
    """Reading a store that does not exist neither warns nor creates the file."""
    assert one.winner(KEY) is None
    assert (one.trials(), one.snapshot("H200"), one.wait(KEY, 1), one.clear()) == ([], {}, None, 0)
    assert not path.parent.exists()


def test_mistakes_in_the_call_surface_and_leave_the_file_alone(one, path):
    one.record(KEY, [Trial(A, (1.0,))])
    with pytest.raises(TypeError):
        one.record(KEY, [Trial(dict(BLOCK=object()), (1.0,))])
    with pytest.raises(sqlite3.Error):
        one.record(KEY._replace(bucket=object()), [])
    assert one.winner(KEY) == A
    assert len(list(path.parent.glob("*.sqlite*"))) == 1


def test_one_store_per_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store.platform, "node", lambda: "host/1 a")
    first = open_store()
    assert first is open_store()
    assert first.path == tmp_path / "tuning-host-1-a.sqlite"
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "other"))
    assert open_store() is not first


# --- documents


def test_export_and_load(one, tmp_path):
    other = KEY._replace(device="A100")
    one.record(KEY, [Trial(A, (100.0, 101.0, 102.0))])
    one.record(other, [Trial(B, (10.0,))])
    document = json.loads(json.dumps(one.export()))
    assert (document["format"], document["device"], len(document["winners"])) == (1, None, 2)
    copy = Store(tmp_path / "copy.sqlite")
    assert copy.load(document) == 2
    assert copy.export() == one.export()
    assert copy.load(document) == 0

    document = one.export("H200")
    (row,) = document["winners"]
    assert document["device"] == row["device"] == "H200"
    assert (row["torch"], row["triton"], row["config"], row["median_us"], row["timings"]) == ("2.13", "3.7", A, 101.0, 3)
    row |= dict(config=C, median_us=97.0)
    assert copy.load(document) == 0  # within the margin, so the stored winner stays
    row |= dict(median_us=95.0)
    assert copy.load(document) == 1
    assert copy.winner(KEY) == C


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(format=2), "must have format 1, as `sonde cache export` of this version writes, got 2"),
        (dict(format=True), "must have format 1.* got True"),
        (dict(format=1.0), "must have format 1.* got 1.0"),
        (dict(format="1"), "must have format 1.* got '1'"),
        (dict(format=10**5000), "must have format 1.* got int"),
        (dict(winners={}), "winners must be a list, got dict"),
        (dict(winners=None), "winners must be a list, got NoneType"),
    ],
)
def test_load_refuses_what_it_does_not_know(one, change, message):
    one.record(KEY, [Trial(A, (1.0,))])
    document = one.export() | change
    with pytest.raises(ValueError, match=message):
        one.load(document)
    with pytest.raises(ValueError, match="got None"):
        one.load([])
    assert one.winners()[0].median_us == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "row 0: must be an object with every name once, got 3"),
        ({"kernel": "x"}, "row 0: has no source, device, torch, triton, dtypes, constants, bucket, config, median_us, timings, at"),
        (dict(config=-1), "row 0: config must be an object, got -1"),
        (dict(bucket=-1), "row 0: bucket must be a line of text, got -1"),
        (dict(median_us=-1), "row 0: median_us must be a number of 0.001 to 1e+12, got -1"),
    ],
)
def test_load_leaves_out_rows_that_are_not_valid(one, tmp_path, row, message):
    """Invalid rows are left out, and the others are loaded."""
    one.record(KEY, [Trial(A, (1.0,))])
    document = one.export()
    (good,) = document["winners"]
    document["winners"] = [row if not isinstance(row, dict) or "kernel" in row else good | row, good]
    copy = Store(tmp_path / "copy.sqlite")
    assert copy.load(document) == 1
    assert copy.left_out == [message]
    assert [w.key for w in copy.winners()] == [KEY]
    assert copy.left_out == []


# --- invalid rows: every field in turn holds invalid values


def _nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


ANYTHING = [
    None, True, False, -1, 0, -0.5, 1e-9, 1e13, 1e300, 10**30, -(10**30), 2**63 - 1, math.inf, -math.inf, math.nan,
    "12.5", "text", "", "\ud800", "a\udcffb", "\x1b[31mred", "two\nlines", "nul\0", "x" * (1 << 21), b"bytes", b"\xff\xfe",
    [], [1], {}, {"BLOCK": 1}, {"BLOCK": math.nan}, {"BLOCK": 10**30}, {"BLOCK": [1]}, {"BLOCK": {}}, {"\ud800": 1}, {"\x1b": 1},
    {"BLOCK": "\ud800"}, _nested(50), _nested(5000), {"BLOCK": _nested(5000)},
]  # fmt: skip
NUMBERS = ("median_us", "timings", "at")


def _is_legal(field: str, value) -> bool:
    """True if the value is legal in this field after all: another kernel's name, another time, another configuration."""
    if field in Key._fields:
        return value in ("12.5", "text", "")
    if field == "config":
        return value in ({}, {"BLOCK": 1})
    return type(value) in (int, float) and value in dict(median_us=(), timings=(0,), at=(0, 1e-9))[field]


HOSTILE = [(field, value) for field in (*Key._fields, "config", *NUMBERS) for value in ANYTHING if not _is_legal(field, value)]


def _works(one: Store, path: Path, left_out: int) -> None:
    """Every query returns the good rows, leaves out the others, and never raises."""
    other = KEY._replace(bucket="2^11")
    for each in (one, Store(path)):
        assert (each.winner(KEY), each.winner(other)) == (A, B)
        assert [w.key for w in each.winners()] == [KEY, other]
        assert len(each.left_out) == left_out
        assert each.snapshot("H200") == {KEY: A, other: B}
        assert [row["config"] for row in json.loads(json.dumps(each.export()))["winners"]] == [A, B]
        assert each.wait(KEY, 0) == A
        assert each.trials() is not None


def test_fuzz_of_documents(tmp_path):
    """One file per field: valid rows among invalid ones that would win, by their times, if they counted."""
    good = dict(KEY._asdict(), config=A, median_us=2.0, timings=3, at=10.0)
    last = good | dict(bucket="2^11", config=B)
    for field in dict(HOSTILE):
        values = [value for name, value in HOSTILE if name == field]
        bad = [good | dict(config=C, median_us=1.0) | {field: value} for value in values]
        bad += [{k: v for k, v in good.items() if k != field}]
        path = tmp_path / f"{field}.sqlite"
        one = Store(path)
        assert one.load(dict(format=1, winners=[*bad, good, *bad, last, *bad])) == 2
        assert len(one.left_out) == 3 * len(bad)
        _works(one, path, 0)


def _column(field: str, value):
    """The value as the file's column stores it; None if it cannot be stored or becomes legal when stored."""
    if isinstance(value, str) and not value.isascii():
        return None
    if isinstance(value, (str, bytes)) and field in ("config", *Key._fields):
        return value
    if field == "config":
        deep = value in (ANYTHING[-2], ANYTHING[-1])  # the JSON encoder fails at such depths, too
        return '{"BLOCK": ' * 5000 + "1" + "}" * 5000 if deep else json.dumps(value)
    whole = isinstance(value, int) and abs(value) < 2**63
    if field in Key._fields or value != value or not (whole or isinstance(value, (float, str, bytes))):
        return None
    became = 12.5 if value == "12.5" else value  # SQLite converts it by the column's affinity
    legal = dict(median_us=became in (1, 12.5), timings=became in (0, 1), at=became in (0, 1, 12.5))
    return None if legal[field] else value


def test_fuzz_of_the_file(one, path):
    """Invalid rows written directly into the file's tables, winners and trials alike."""
    one.record(KEY, [Trial(A, (2.0,))])
    one.record(KEY._replace(bucket="2^11"), [Trial(B, (2.0,))])
    db = sqlite3.connect(path)
    count = 0
    for field, value in HOSTILE:
        value = _column(field, value)
        if value is None:
            continue
        row = dict(KEY._asdict(), bucket=f"2^{100 + count}", config=json.dumps(C), median_us=1.0, timings=3, at=10.0)
        row[field] = value
        key = db.execute(
            f"INSERT INTO keys ({', '.join(Key._fields)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [row[name] for name in Key._fields]
        ).lastrowid
        given = [key, *[row[name] for name in ("config", *NUMBERS)]]
        db.execute("INSERT INTO winners (key, config, median_us, timings, at) VALUES (?, ?, ?, ?, ?)", given)
        count += 1
    no_utf8 = "CAST(x'ff' AS TEXT)"
    for name in Key._fields:
        names = ", ".join(no_utf8 if n == name else n for n in Key._fields)
        db.execute(f"INSERT INTO keys SELECT NULL, {names} FROM keys WHERE id = 1")
        db.execute("INSERT INTO winners SELECT max(keys.id), config, 1.0, timings, at FROM winners, keys WHERE key = 1")
        count += 1
    for column in ("config", "times_us", "cause", "error", "compile_s", "at"):
        for text in ("'text'", "x'ff'", no_utf8, "-1", "9e999", "'NaN'", "'[[]]'", "'[\"1\"]'", "'[-1]'", "'[true]'", "'[1e999]'"):
            columns = dict(config="'{}'", times_us="'[1.0]'", cause="NULL", error="0", compile_s="0", at="0") | {column: text}
            db.execute(f"INSERT INTO trials (key, {', '.join(columns)}) VALUES (1, {', '.join(columns.values())})")
    db.commit()
    db.close()
    assert count > 100
    with pytest.warns(RuntimeWarning, match=f"tuning store .* that are not valid are ignored: {count}, such as row") as caught:
        _works(one, path, count)
    assert len(caught) == 1
    trials = one.trials()
    assert [r.trial.config for r in trials[:2]] == [A, B]
    assert all(r.trial.cause is not None or r.trial.error == math.inf for r in trials[2:])  # any text and infinity are valid there
    assert len(one.left_out) == 66 - len(trials[2:]) > 50


def test_a_row_that_is_not_valid_gives_way(one, path):
    """Any valid trial of the same key replaces an invalid winner, whatever time that claims."""
    one.record(KEY, [Trial(A, (1.0,))])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE winners SET median_us = 'fast'")
    db.close()
    with pytest.warns(RuntimeWarning, match="1, such as row 0: median_us must be a number of 0.001 to 1e.12, got 'fast'"):
        assert one.winner(KEY) is None
    assert one.record(KEY, [Trial(B, (100.0,))]) == B
    assert (one.winner(KEY), one.left_out) == (B, [])


@pytest.mark.parametrize("until", ["'text'", "9e999", "1e300", "x'ff'", "NULL"])
def test_a_lease_that_is_none_blocks_nobody(one, path, until):
    assert one.claim(KEY, "a", 60)
    with sqlite3.connect(path) as db:
        if until == "NULL":
            db.execute("DELETE FROM leases")
        else:
            db.execute(f"UPDATE leases SET until = {until}")
    db.close()
    assert one.wait(KEY, 5) is None
    assert one.claim(KEY, "b", 60)
    assert not one.claim(KEY, "c", 60)


@pytest.mark.parametrize("time_us", [-1.0, 0.0, math.nan, math.inf, 1e-9, 1e15])
def test_impossible_times_do_not_win(one, time_us):
    assert one.record(KEY, [Trial(A, (time_us,)), Trial(B, (5.0,))]) == B
    assert one.winner(KEY) == B


def test_a_cause_that_no_file_can_hold(one):
    one.record(KEY, [Trial(A, cause="no such file: a\udcffb")])
    assert [r.trial.cause for r in one.trials()] == ["no such file: a?b"]


# --- many processes


HAMMER = """
done, end = 0, float(sys.argv[3]) if len(sys.argv) > 3 else time.time() + SECONDS
while time.time() < end:
    store.record(KEY._replace(bucket=str(done % 3)), [Trial(dict(process=n, row=done), tuple(range(1, 20)))])
    done += 1
    if done % 7 == 0:
        store.winner(KEY), store.snapshot("H200"), store.claim(KEY, str(n), 1), store.release(KEY, str(n))
print(done)
"""


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_eight_processes_lose_no_row(one, path, seconds):
    """Writers run for some seconds, starting with the creation of the file; warnings are errors in them."""
    processes = [start(HAMMER.replace("SECONDS", str(seconds)), path, n) for n in range(8)]
    counts = [int(finish(p)) for p in processes]
    rows = [(r.trial.config["process"], r.trial.config["row"]) for r in one.trials()]
    assert sorted(rows) == [(n, i) for n, count in enumerate(counts) for i in range(count)]
    assert min(counts) > 10
    assert [w.key.bucket for w in one.winners()] == ["0", "1", "2"]
    assert one.problem is None


KILLED = """
done = 0
while True:
    store.record(KEY, [Trial(dict(row=done, part=i), tuple(range(1, 400))) for i in range(5)])
    os.write(1, b"%d\\n" % done)
    done += 1
"""


def test_killed_writer_leaves_what_it_committed(one, path):
    """Each transaction writes five rows: all five or none are there, and every acknowledged transaction is."""
    for round in range(5):
        one.clear()
        writer = start(KILLED, path)
        assert writer.stdout
        writer.stdout.readline()
        time.sleep(0.1 + 0.037 * round)
        writer.send_signal(signal.SIGKILL)
        out, _ = writer.communicate(timeout=60)
        last = int(out.split()[-1]) if out.split() else 0
        rows = [(r.trial.config["row"], r.trial.config["part"]) for r in one.trials()]
        written = len(rows) // 5
        assert rows == [(row, part) for row in range(written) for part in range(5)]
        assert written in (last + 1, last + 2)  # it may have died after the commit and before the acknowledgement
        assert one.record(KEY._replace(bucket="after"), [Trial(A, (1.0,))]) == A


MID_WRITE = """
store.record(KEY, [Trial(dict(row=0), (1.0,))])
def work(db):
    db.execute("DELETE FROM winners")
    db.execute("DELETE FROM trials")
    db.execute("PRAGMA cache_spill=1"), db.execute("PRAGMA cache_size=1")
    db.executemany("INSERT INTO trials (key, config, times_us, at) VALUES (1, '{}', ?, 0)", [("x" * 5000,)] * 200)
    print("within", flush=True)
    time.sleep(60)
database.transact(path, work, True)
"""


def test_killed_within_a_transaction(one, path):
    writer = start(MID_WRITE, path)
    assert writer.stdout
    assert writer.stdout.readline() == "within\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=60)
    assert one.winner(KEY) == dict(row=0)
    assert len(one.trials()) == 1
    assert one.record(KEY, [Trial(A, (0.5,))]) == A


# --- leases


def test_lease(one):
    assert one.claim(KEY, "a", 60)
    assert not one.claim(KEY, "b", 60)
    assert one.claim(KEY, "a", 60)
    assert one.claim(KEY._replace(bucket="2^11"), "b", 60)
    one.release(KEY, "b")  # "b" does not hold this lease
    assert not one.claim(KEY, "b", 60)
    one.release(KEY, "a")
    assert one.claim(KEY, "b", 60)


def test_lease_expires(one):
    assert one.claim(KEY, "killed", 0.2)
    assert not one.claim(KEY, "b", 60)
    begin = time.monotonic()
    assert one.wait(KEY, 60, poll=0.01) is None
    assert time.monotonic() - begin < 10
    assert one.claim(KEY, "b", 60)
    assert not one.claim(KEY, "killed", 60)


def test_lease_from_the_future_is_void(one, monkeypatch):
    """A lease that ends too far in the future, after the clock was set back, is ignored."""
    assert one.claim(KEY, "a", 60)
    now = time.time()
    monkeypatch.setattr(store.time, "time", lambda: now - 3600)
    assert one.claim(KEY, "b", 60)


def test_wait(one):
    assert one.wait(KEY, 60) is None  # nobody is tuning
    assert one.claim(KEY, "a", 60)
    begin = time.monotonic()
    assert one.wait(KEY, 0.2) is None
    assert 0.15 < time.monotonic() - begin < 10
    one.record(KEY, [Trial(A, (1.0,))])
    assert one.wait(KEY, 60) == A


RANK = """
if not store.claim(KEY, str(n), 60):
    print("waited", store.wait(KEY, 60)["winner"])
elif store.winner(KEY):  # came so late that the first was done
    print("waited", store.winner(KEY)["winner"])
else:
    time.sleep(0.3)
    store.record(KEY, [Trial(dict(winner=n), (1.0,))])
    store.release(KEY, str(n))
    print("tuned", n)
"""


def test_one_of_many_processes_tunes(path):
    words = [finish(p).split() for p in [start(RANK, path, n) for n in range(6)]]
    assert len({who for _, who in words}) == 1  # all ranks have the same winner
    assert [word for word, _ in words].count("tuned") == 1


# --- a damaged file


def _damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "garbage":
        path.write_bytes(b"this is no database" * 1000)
    elif how == "header":
        path.write_bytes(b"\0" * 100 + data[100:])
    elif how == "cut":
        path.write_bytes(data[:5000])
    elif how == "pages":
        path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    else:
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE winners")
        db.close()


@pytest.mark.parametrize("how", ["garbage", "header", "cut", "pages", "table"])
def test_damaged_file_is_set_aside(one, path, how):
    one.record(KEY, [Trial(A, (1.0,))])
    _damage(path, how)
    damaged = path.read_bytes()
    with pytest.warns(RuntimeWarning, match="is damaged|has format") as caught:
        assert one.winner(KEY) is None
    assert len(caught) == 1
    (kept,) = [f for f in path.parent.iterdir() if ".corrupt-" in f.name or ".format-" in f.name]
    assert str(kept) in str(caught[0].message)
    assert kept.read_bytes() == damaged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.record(KEY, [Trial(B, (1.0,))]) == B
        assert Store(path).winner(KEY) == B


SCHEMAS = {
    "trigger": "CREATE TRIGGER no BEFORE INSERT ON trials BEGIN SELECT RAISE(ABORT, 'no'); END",
    "rollback": "CREATE TRIGGER no BEFORE INSERT ON keys BEGIN SELECT RAISE(ROLLBACK, 'no'); END",
    "view": "ALTER TABLE winners RENAME TO w; CREATE VIEW winners AS SELECT * FROM w",
    "columns": "ALTER TABLE winners RENAME COLUMN config TO c",
    "trial columns": "ALTER TABLE trials RENAME COLUMN times_us TO t",
    "unique": "CREATE UNIQUE INDEX once ON trials (at > 0)",
    "leases": "ALTER TABLE leases RENAME COLUMN until TO u",
}


@pytest.mark.parametrize("how", SCHEMAS)
@pytest.mark.filterwarnings("ignore:sonde")
def test_tables_of_others(one, path, how):
    """A file of the right format with other tables never raises, and this process keeps its own results."""
    one.record(KEY, [Trial(A, (1.0,))])
    db = sqlite3.connect(path)
    db.executescript(SCHEMAS[how])
    db.close()
    other = KEY._replace(bucket="2^11")
    for _ in range(2):
        assert one.claim(other, "me", 60)
        assert one.record(other, [Trial(B, (1.0,))]) == B
        one.release(other, "me")
    assert one.winner(other) == B
    assert one.wait(other, 1) in (B, None)  # None if the file cannot tell whether anybody is tuning
    assert other in one.snapshot("H200")
    assert one.trials(other)
    assert one.load(one.export()) in (0, 1)  # rows that only this process had may be written to the file
    one.clear()


def test_damage_of_a_copy_of_the_log_is_harmless(one, path):
    one.record(KEY, [Trial(A, (1.0,))])
    Path(f"{path}-wal").write_bytes(os.urandom(10000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.winner(KEY) == A


@pytest.mark.parametrize("version", [7, 0])
def test_other_format_is_set_aside(one, path, version):
    one.record(KEY, [Trial(A, (1.0,))])
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={version}")
    db.close()
    with pytest.warns(RuntimeWarning, match=rf"has format {version or 'of something else'}.* writes format 1.*format-{version}-"):
        assert one.record(KEY, [Trial(B, (1.0,))]) == B
    assert len([f for f in path.parent.iterdir() if ".format-" in f.name]) == 1


def test_processes_that_find_damage_together_lose_no_row(one, path):
    """Each row is written after the damage, so all must be in the new file: no process moves a file that another just created."""
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 1000)
    code = "import warnings; warnings.simplefilter('ignore')\n" + HAMMER.replace("SECONDS", "1.5")
    counts = [int(finish(p)) for p in [start(code, path, n) for n in range(6)]]
    assert len(one.trials()) == sum(counts)
    assert len([f for f in path.parent.iterdir() if ".corrupt-" in f.name]) == 1


def test_nobody_sets_aside_what_another_has_begun(monkeypatch, one, path):
    """Another process finds the damage, moves the file and writes a new one, between our own finding and moving."""
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 1000)
    alone = database._alone

    def late(given):
        monkeypatch.setattr(database, "_alone", alone)
        assert Store(path).record(KEY, [Trial(A, (1.0,))]) == A
        return alone(given)

    monkeypatch.setattr(database, "_alone", late)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert one.record(KEY, [Trial(B, (2.0,))]) == A
    assert [r.trial.config for r in one.trials()] == [A, B]
    assert len([f for f in path.parent.iterdir() if ".corrupt-" in f.name]) == 1


def test_deleted_file_begins_again(one, path):
    one.record(KEY, [Trial(A, (1.0,))])
    path.unlink()
    assert one.winner(KEY) is None
    assert one.record(KEY, [Trial(B, (1.0,))]) == B
    assert path.exists()


# --- no file at all


def _works_without(one: Store, message: str) -> None:
    """One warning, and this process keeps its results in memory."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert one.winner(KEY) is None
        assert one.claim(KEY, "me", 60)
        assert one.record(KEY, [Trial(A, (100.0,)), Trial(C, cause="wrong")]) == A
        assert one.record(KEY, [Trial(B, (96.0,))]) == A
        assert one.record(KEY, [Trial(B, (90.0,))]) == B
        assert one.winner(KEY) == one.wait(KEY, 1) == B
        assert one.snapshot("H200") == {KEY: B}
        assert [r.trial.config for r in one.trials(KEY)] == [A, C, B, B]
        other = one.export()
        other["winners"][0]["median_us"] = 50.0
        assert one.load(other) == 1
        one.release(KEY, "me")
        assert one.record(KEY, [Trial(B, cause="wrong")]) is None
        assert one.winner(KEY) is None
        assert one.clear() == 1
        assert (one.trials(), one.winners()) == ([], [])
    assert len(caught) == 1
    assert message in str(caught[0].message)
    assert "set SONDE_CACHE_DIR to a folder that is writable" in str(caught[0].message)
    assert message in one.problem


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    _works_without(Store(tmp_path / "file" / "cache" / "tuning.sqlite"), str(tmp_path / "file"))


def test_folder_that_cannot_be_written(monkeypatch, one, path):
    def refused(*args, **kwargs):
        raise sqlite3.OperationalError("unable to open database file")

    path.parent.mkdir()
    monkeypatch.setattr(sqlite3, "connect", refused)
    _works_without(one, "unable to open database file")


def test_read_only_folder_is_still_read(monkeypatch, one, path):
    """A store in a read-only folder is still read, as in a container whose image has a tuned store."""
    one.record(KEY, [Trial(A, (1.0,))])
    before = {f: f.stat().st_mtime_ns for f in path.parent.iterdir()}
    monkeypatch.setattr(database.os, "access", lambda *args: False)
    assert one.winner(KEY) == A
    assert one.snapshot("H200") == {KEY: A}
    assert {f: f.stat().st_mtime_ns for f in path.parent.iterdir()} == before
    assert one.problem is None


def test_no_sqlite(monkeypatch, one):
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    _works_without(one, "built without sqlite3")


def test_no_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SONDE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    _works_without(open_store(), "no home folder")


def test_full_disk(monkeypatch, one, path):
    """Existing rows stay readable, new ones are kept in this process, and writes resume once the disk has space again."""
    one.record(KEY, [Trial(A, (100.0,))])
    connect = database._connect

    def small(path, write):
        db = connect(path, write)
        db.execute("PRAGMA max_page_count=1")  # SQLite never sets a limit below the current number of pages
        return db

    other = KEY._replace(bucket="2^11")
    big = Trial(B, tuple(map(float, range(1, 5000))))
    with monkeypatch.context() as full, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        full.setattr(database, "_connect", small)
        assert one.record(other, [big]) == B
        assert one.record(other, [big]) == B
        assert one.winner(KEY) == A
        assert one.winner(other) == B
        assert set(one.snapshot("H200")) == {KEY, other}
    assert len(caught) == 1
    assert "database or disk is full" in str(caught[0].message)
    assert Store(path).winner(other) is None
    assert one.record(other, [Trial(C, (1.0,))]) == C
    assert Store(path).winner(other) == C


def test_writer_that_never_ends_is_not_waited_for_for_ever(monkeypatch, one, path):
    one.record(KEY, [Trial(A, (1.0,))])
    monkeypatch.setattr(database, "PATIENCE_S", 0.2)
    stuck = sqlite3.connect(path, isolation_level=None)
    stuck.execute("BEGIN IMMEDIATE")
    assert one.winner(KEY) == A  # reading does not wait for a lock
    with pytest.warns(RuntimeWarning, match="database is locked"):
        assert one.record(KEY, [Trial(B, (0.5,))]) == B
    stuck.close()


# --- threads and forks


def test_threads(one):
    def work(n: int) -> None:
        for i in range(10):
            one.record(KEY, [Trial(dict(thread=n, row=i), (1.0,))])
            one.winner(KEY)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    rows = [(r.trial.config["thread"], r.trial.config["row"]) for r in one.trials()]
    assert sorted(rows) == [(n, i) for n in range(8) for i in range(10)]


FORKS = """
import signal, threading
from importlib.machinery import PathFinder
class Slow:  # the first children come while another thread imports
    def find_spec(self, name, path=None, target=None):
        if name == "sqlite3.dbapi2":
            spec = PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (time.sleep(0.2), run(module))
            return spec
sys.meta_path.insert(0, Slow())
stop = threading.Event()
def busy(t):
    i = 0
    while not stop.is_set():
        store.record(KEY._replace(bucket=f"t{t}"), [Trial(dict(i=i), (1.0,))])
        i += 1
    counts.append(i)
counts = []
threads = [threading.Thread(target=busy, args=(t,)) for t in range(3)]
[t.start() for t in threads]
children = []
for i in range(20):
    pid = os.fork()
    if not pid:
        signal.alarm(40)  # one that hangs must not outlive the test
        store.record(KEY._replace(bucket="child"), [Trial(dict(i=i), (1.0,))])
        os._exit(0 if store.winner(KEY._replace(bucket="child")) else 1)
    children.append(pid)
    time.sleep(0.01)
codes = [os.waitpid(pid, 0)[1] for pid in children]
stop.set()
[t.join() for t in threads]
print(sum(counts), codes.count(0))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_amid_the_work_of_threads(one, path):
    """A forked child neither uses its parent's connection nor hangs on a lock that another thread held at the fork."""
    count, fine = map(int, finish(start("import warnings; warnings.simplefilter('ignore')\n" + FORKS, path)).split())
    assert fine == 20
    assert count > 0
    assert len(one.trials()) == count + 20
