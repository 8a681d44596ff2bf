"""Known winners: those stored on this machine and those shipped with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..op.cache import warn_once
from . import rows, settings
from .policies import PickAny
from .store import Key, open_store

SHIPPED = Path(__file__).parent / "shipped"
_more: list[Path] = []  # folders of other packages
_any = PickAny()
_version = 0  # incremented whenever a winner may have changed


def state() -> tuple[Any, ...]:
    """What a choice depends on besides the call itself; every cache of choices has it in its key."""
    policy = settings.current().policy
    return (policy if type(policy) is PickAny or not _capturing() else _any), _version


def token() -> Any:
    """The same in a form that hashes fast, for keys that are looked up on every call: hashing a policy runs Python code."""
    now = settings.current()
    return _version if type(now.policy) is PickAny else (now, *state())


def forget() -> None:
    """Drop what was read from the store, because the store has changed."""
    global _version
    _version += 1
    stored.cache_clear()


def _capturing() -> bool:
    """True while a CUDA graph is captured, when nothing may be timed."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # is_available() would ask the driver
    return started and torch.cuda.is_current_stream_capturing()


@lru_cache(64)
def stored(device: str) -> Mapping[Key, Mapping[str, Any]]:
    return open_store().snapshot(device)


def ship(folder: str | Path) -> None:
    """Use the winners in a folder of your own package in the same way as Sonde's own: where nothing better is stored.

    The folder has one file per device, written by ``sonde cache export --device NAME FILE`` and named like the device, in lower
    case with hyphens: ``nvidia-h200-sm_90.json``. Winners apply to kernels of the same name whose configurations fit.

    Example:
        >>> import sonde
        >>> sonde.jit.ship("mylib/winners")
    """
    if Path(folder) not in _more:
        _more.append(Path(folder))
    shipped.cache_clear()
    forget()


@lru_cache(64)
def shipped(device: str) -> Mapping[tuple[Any, ...], Mapping[str, Any]]:
    """The winners shipped for a device. They apply to every version of torch and Triton; a stored winner comes first."""
    return {key: config for folder in (*_more, SHIPPED) for key, config in _of_folder(folder, device).items()}


def _of_folder(folder: Path, device: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    file = folder / f"{slug(device)}.json"
    if not file.is_file():
        return {}
    try:
        found, left_out = rows.parse(rows.parse_json(file.read_bytes()))
    except (OSError, ValueError) as problem:
        found, left_out = [], [str(problem)]
    if left_out:
        warn_once(f"shipped {file}", f"{file} is damaged; of its winners, these are ignored: {'; '.join(left_out[:3])}")
    return {portable(w.key): w.config for w in found}


def portable(key: Key) -> tuple[Any, ...]:
    """The part of a key that does not depend on versions."""
    return key.kernel, key.dtypes, key.constants, key.bucket


def slug(device: str) -> str:
    return "-".join(device.lower().split())


_pretended: str | None = None


def pretend(device: str | None) -> None:
    """Act as if this were the device: a release can be built for one that is not here."""
    global _pretended
    _pretended = device
    forget()


def device_name(device: torch.device) -> str:
    return _pretended or _device_name(device)


@lru_cache(64)
def _device_name(device: torch.device) -> str:
    """The device's name with its architecture, which a release is built for."""
    if device.type != "cuda":
        return "interpreter"
    if not torch.cuda.is_available():  # fake CUDA tensors exist without a GPU
        return "no GPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} sm_{properties.major}{properties.minor}" if torch.version.cuda else properties.name


def read(kind: type, found: Any) -> Any:
    """A configuration of this class from what was stored; None if the fields differ, as after an upgrade."""
    if isinstance(found, kind):
        return found
    names = {f.name for f in fields(kind)} if is_dataclass(kind) else set(kind._fields)  # type: ignore[attr-defined]
    try:
        return kind(**found) if isinstance(found, Mapping) and set(found) == names else None
    except Exception:  # the class may check its values
        return None


def write(config: Any) -> dict[str, Any]:
    return asdict(config) if is_dataclass(config) else config._asdict()  # type: ignore[arg-type]
