"""Rows of the tuning store: validation of every field, wherever a row comes from.

Files can be edited, damaged or made by others. Reading the store, importing a document and reading shipped winners all go through
`winner` or `record`, which raise `Invalid` and nothing else; the caller leaves that row out and counts it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .timing import Trial

T = TypeVar("T")
FORMAT = 1  # of exported documents
SHORTEST_US, LONGEST_US = 1e-3, 1e12  # a launch takes more than a nanosecond, and less than eleven days
YEAR_10000 = 253402300800.0
MOST = 2**31 - 1  # limit for counts and for the numbers of a configuration
LONGEST_TEXT = 1 << 20
DEEPEST = 8  # an exported document has four levels


class Invalid(ValueError):
    """Why a row is left out."""


class Key(NamedTuple):
    """What a winner is valid for."""

    kernel: str
    source: str  # hash of the kernel's source
    device: str
    torch: str
    triton: str
    dtypes: str
    constants: str
    bucket: str  # the runtime sizes, rounded to powers of two


class Winner(NamedTuple):
    key: Key
    config: dict[str, Any]
    median_us: float
    timings: int
    at: float  # seconds since 1970


class Record(NamedTuple):
    key: Key
    trial: Trial
    at: float


def winner(key: Sequence[Any], config: Any, median_us: Any, timings: Any, at: Any) -> Winner:
    number = _number("median_us", median_us, SHORTEST_US, LONGEST_US)
    if type(timings) is not int or not 0 <= timings <= MOST:  # 0 for a winner that was derived from others
        raise Invalid(f"timings must be a whole number of 0 to {MOST}, got {shown(timings)}")
    return Winner(_key(key), _config(config), number, timings, _at(at))


def record(key: Sequence[Any], config: Any, times_us: Any, cause: Any, error: Any, compile_s: Any, at: Any) -> Record:
    if not isinstance(times_us, list):
        raise Invalid(f"times_us must be a list, got {shown(times_us)}")
    times = tuple([_number("times_us", t, 0.0, LONGEST_US) for t in times_us])
    error = None if error is None else _number("error", error, 0.0, math.inf)
    compile_s = None if compile_s is None else _number("compile_s", compile_s, 0.0, LONGEST_US)
    if cause is not None and not (isinstance(cause, str) and is_encodable(cause)):
        raise Invalid(f"cause must be text, got {shown(cause)}")
    return Record(_key(key), Trial(_config(config), times, cause, error, compile_s), _at(at))


def valid(rows: Iterable[T], make: Callable[[T], Any]) -> tuple[list, list[str]]:
    """The rows converted by `make`, and a reason for each invalid one."""
    found, left_out = [], []
    for i, row in enumerate(rows):
        try:
            found.append(make(row))
        except Invalid as problem:
            left_out.append(f"row {i}: {problem}")
    return found, left_out


def parse(document: Any) -> tuple[list[Winner], list[str]]:
    """The winners of an exported document and a reason for each invalid one; ValueError if this is not such a document."""
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is not int or found != FORMAT:
        text = f"document must have format {FORMAT}, as `sonde cache export` of this version writes"
        raise ValueError(f"{text}, got {shown(found)}")
    rows = document.get("winners")
    if not isinstance(rows, list):
        raise ValueError(f"document: winners must be a list, got {type(rows).__name__}")
    return valid(rows, _imported)


def _imported(row: Any) -> Winner:
    if not isinstance(row, Mapping):
        raise Invalid(f"must be an object with every name once, got {shown(row)}")
    missing = [name for name in (*Key._fields, *Winner._fields[1:]) if name not in row]
    if missing:
        raise Invalid(f"has no {', '.join(missing)}")
    return winner([row[name] for name in Key._fields], *[row[name] for name in Winner._fields[1:]])


def parse_json(data: Any) -> Any:
    """Parse JSON from any bytes; ValueError if it is not JSON. Oddities become values that validation then refuses.

    An object with a repeated name becomes None, bytes that are not UTF-8 become lone surrogates, and nesting too deep for the
    parser becomes null.
    """
    if isinstance(data, bytes):
        try:
            return parse_json(data.decode())
        except UnicodeDecodeError as problem:
            try:
                return parse_json(data.decode(errors="surrogateescape"))
            except ValueError:
                raise problem from None
    if not isinstance(data, str):
        raise ValueError(f"JSON must be text, got {type(data).__name__}")
    try:
        return json.loads(data, object_pairs_hook=_object, parse_int=_int)
    except RecursionError:
        return json.loads(_shallow(data), object_pairs_hook=_object, parse_int=_int)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


def _int(text: str) -> int | float:
    return int(text) if len(text) < 400 else math.inf  # int() raises on thousands of digits, which would lose the whole document


def _shallow(text: str) -> str:
    kept, depth, end = [], 0, 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        if token[0] in "[{":
            depth += 1
            if depth == DEEPEST + 1:
                kept += [text[end : token.start()], "null"]
        elif token[0] in "]}":
            if depth == DEEPEST + 1:
                end = token.end()
            depth -= 1
    return "".join([*kept, text[end:]]) if depth <= DEEPEST else ""


def _key(parts: Sequence[Any]) -> Key:
    for name, part in zip(Key._fields, parts):
        if not is_word(part):
            raise Invalid(f"{name} must be a line of text, got {shown(part)}")
    return Key(*parts)


def _config(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise Invalid(f"config must be an object, got {shown(found)}")
    for name, value in found.items():
        plain = value is None or isinstance(value, bool) or is_word(value)
        number = type(value) in (int, float) and -MOST <= value <= MOST
        if not (is_word(name) and (plain or number)):
            raise Invalid(f"config must have names with plain values, got {shown(value)} for {shown(name)}")
    return dict(found)


def _at(found: Any) -> float:
    return _number("at", found, 0.0, YEAR_10000)


def _number(name: str, found: Any, least: float, most: float) -> float:
    if type(found) not in (int, float) or not least <= found <= most:  # no bool, no NaN
        raise Invalid(f"{name} must be a number of {least:g} to {most:g}, got {shown(found)}")
    return float(found)


def is_time(found: float) -> bool:
    return SHORTEST_US <= found <= LONGEST_US


def is_word(found: Any) -> bool:
    """Text that a terminal can show: no control characters, no lone surrogates."""
    return isinstance(found, str) and len(found) <= LONGEST_TEXT and found.isprintable()


def is_encodable(found: str) -> bool:
    try:
        return len(found.encode()) <= LONGEST_TEXT
    except UnicodeEncodeError:
        return False


def shown(found: Any) -> str:
    """A short text for an error message; the value may be anything, of any size."""
    if found is None or isinstance(found, (bool, float)) or (isinstance(found, int) and abs(found) < 10**30):
        return repr(found)
    return ascii(found[:30]) if isinstance(found, str) else type(found).__name__
