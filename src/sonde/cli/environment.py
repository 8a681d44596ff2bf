"""The machine and its software, for ``doctor`` and for every benchmark record."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def environment(device: torch.device) -> dict:
    """What a reader needs to judge a figure or to reproduce it."""
    from .. import __version__

    gpu = device.type == "cuda"
    return dict(
        device=torch.cuda.get_device_name(device) if gpu else cpu_model(),
        kind=device.type,
        threads=torch.get_num_threads(),
        driver=driver() if gpu else None,
        cuda=torch.version.cuda or torch.version.hip,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version("triton"),
        numba=version("numba"),
        sonde=__version__,
        commit=commit(),
    )


def slug(environment: dict) -> str:
    """The name of the folder with a device's results; for a CPU it includes the number of threads."""
    name = environment["device"] if environment["kind"] == "cuda" else f"{environment['device']} {environment['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """The version of the NVIDIA driver, from NVML."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1" if os.name == "posix" else "nvml.dll")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode()


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of these sources, with ``-dirty`` if they differ from it; else ``$SONDE_COMMIT``, else None."""
    package = Path(__file__).resolve().parents[1]
    try:
        top = _git(package, "rev-parse", "--show-toplevel")
        if Path(top).resolve() / "src" / "sonde" == package:  # not a repository that merely contains our installation
            return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        pass  # no git, or no repository
    return os.environ.get("SONDE_COMMIT")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
