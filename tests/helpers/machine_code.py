"""Checks of a kernel's machine code, without a GPU: registers, stack, and factors of products that are overwritten too early.

Hopper's matrix units (HGMMA) may read their left factor from registers while the program goes on. An instruction that writes to
these registers before the program has waited for the product (WARPGROUP.DEPBAR) is a race: results are wrong in some runs only.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FACTOR = 4  # registers of a left factor
NO_RESULT = (  # instructions whose first operand is not a register that they write
    "ST", "BRA", "BAR", "EXIT", "SYNCS", "RED", "ATOM", "UTMA", "LDGSTS", "R2UR", "VOTEU", "ISETP", "FSETP", "DEPBAR", "WARP",
    "NOP",
)  # fmt: skip


def watch(seen: list[tuple]) -> None:
    """Append every kernel that is compiled from now on: its name, its constants, and the compiler's output."""
    real = triton.JITFunction.warmup

    def warmup(self, *args, **options):
        compiled = real(self, *args, **options)
        constants = {n: str(v) for n, v in zip(self.arg_names, args) if n.isupper()} | {"num_warps": options["num_warps"]}
        given = [str(getattr(v, "dtype", v)).removeprefix("torch.") for n, v in zip(self.arg_names, args) if not n.isupper()]
        seen.append((self.__name__, f"{constants} {given}", compiled.asm))
        return compiled

    triton.JITFunction.warmup = warmup


def resources(name: str, of: str, asm: dict, folder: str) -> dict:
    """A compiled kernel's registers, stack and local memory, and registers that it overwrites too early."""
    if "cubin" in asm:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        out = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        usage = " ".join(re.findall(r"REG:.*LOCAL:\d+ ", out))
        races = overwritten_early(cubin) if "wgmma" in asm["ptx"] else []
        memory = re.findall(r"(?:STACK|LOCAL):(\d+) ", usage)
        assert memory, out
        spills = sum(map(int, memory))
        return dict(name=name, of=of, usage=usage, spills=spills, races=races, widest=widest_access(asm["ptx"]))
    # scalar registers spilled to lanes of vector registers touch no memory and do not count
    found = re.findall(r"\.(vgpr_spill_count|private_segment_fixed_size): *(\d+)", asm["amdgcn"])
    assert found, name
    return dict(name=name, of=of, usage=str(found), spills=sum(int(n) for _, n in found), races=[])


def widest_access(ptx: str) -> int:
    """The largest number of bytes that one thread reads or writes in global memory at a time."""
    plain = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[busf](\d+)", ptx)
    copied = re.findall(r"cp\.async\.c[ag]\S* .*, 0x(\w+),", ptx)
    bulk = [16] if "cp.async.bulk" in ptx else []
    return max([int(n or 1) * int(bits) // 8 for n, bits in plain] + [int(n, 16) for n in copied] + bulk, default=0)


class Instruction(NamedTuple):
    address: str
    name: str
    operands: list[str]

    @property
    def writes(self) -> set[int]:
        if not self.operands or self.name.startswith(NO_RESULT):
            return set()
        found = re.match(r"R(\d+)", self.operands[0])
        if not found:
            return set()
        width = 4 if ".128" in self.name else 2 if ".64" in self.name or ".WIDE" in self.name else 1
        if self.name.startswith("LDSM"):
            width = int(self.name[-1]) if self.name[-1] in "24" else 1
        return set(range(int(found[1]), int(found[1]) + width))


def overwritten_early(cubin: Path) -> list[str]:
    """Every write that comes too early, with the products that may still be reading."""
    flying: list[tuple[str, set[int]]] = []  # groups of products, the oldest first
    open_group: set[int] = set()
    found: dict[str, str] = {}
    for each in in_order(*parsed(cubin)):
        if each.name.startswith("HGMMA"):
            left = re.match(r"R(\d+)", each.operands[1])
            open_group |= set(range(int(left[1]), int(left[1]) + FACTOR)) if left else set()
            if "gsb0" in each.operands:
                flying.append((each.address, open_group))
                open_group = set()
        elif each.name.startswith("WARPGROUP.DEPBAR"):
            left_over = int(each.operands[-1], 16)
            flying = flying[len(flying) - left_over :] if left_over < len(flying) else flying
        else:
            readers = [address for address, registers in [*flying, ("the open group", open_group)] if registers & each.writes]
            if readers:
                found[each.address] = f"{each.name} {each.operands[0]} at {each.address}, read by {', '.join(readers)}"
    return list(found.values())


def parsed(cubin: Path) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the position of each label."""
    text = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(?:@!?\S+\s+)?(\S+)\s*(.*?);", line):
            code.append(Instruction(found[1], found[2], [x.strip() for x in found[3].split(",")]))
    return code, labels


def in_order(code: list[Instruction], labels: dict[str, int]) -> Iterator[Instruction]:
    """Instructions in the order of execution, with every loop run twice."""
    again = {}
    for i, each in enumerate(code):
        target = re.search(r"`\((\.L_\S+)\)", ",".join(each.operands)) if each.name.startswith("BRA") else None
        if target and labels.get(target[1], len(code)) <= i:
            again[i] = labels[target[1]]
    i = 0
    while i < len(code):
        yield code[i]
        i = again.pop(i) if i in again else i + 1
