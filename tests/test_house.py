"""Layering rules: which part may import which, checked in the sources, imports inside functions included.

``op`` and ``jit`` know no family, families do not know each other, an engine (a folder of a family whose name begins with ``_``)
knows no operator, and an operator knows no other. So each can be read alone.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "src"
SONDE = ROOT / "sonde"
LAYERS = ("op", "jit", "cli", "compat", "nn", "testing")
FAMILIES = sorted(p.name for p in SONDE.iterdir() if (p / "__init__.py").exists() and p.name not in LAYERS)


class Import(NamedTuple):
    file: str  # below src/sonde
    line: int
    target: str  # a module
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def imports(file: Path) -> list[Import]:
    """Every sonde module that a file imports, at the top or lazily."""
    tree, name = ast.parse(file.read_text(encoding="utf-8")), file.relative_to(SONDE).as_posix()
    package = file.relative_to(ROOT).parent.parts
    inside = {
        id(x) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) for x in ast.walk(f)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names]
        else:
            continue
        found += [Import(name, node.lineno, t, id(node) in inside) for t in targets if t.split(".")[0] == "sonde"]
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


ALL = [found for file in sorted(SONDE.rglob("*.py")) for found in imports(file)]


def place(x: str) -> tuple[str, str]:
    """(family or layer, its subfolder) of a file below src/sonde or of a module."""
    parts = x.removesuffix(".py").split("/") if "/" in x or x.endswith(".py") else x.split(".")[1:]
    return (parts[0] if parts else "", parts[1] if len(parts) > 1 and (SONDE / parts[0] / parts[1]).is_dir() else "")


def is_engine(folder: str) -> bool:
    return folder.startswith("_")


def op_and_jit_know_no_family(found: Import) -> bool:
    """They know neither families nor what is built on them; only building a release imports the table of operators, lazily."""
    (here, _), (there, _) = place(found.file), place(found.target)
    return here in ("op", "jit") and (
        there in (*FAMILIES, "cli", "compat", "nn", "testing") or (there == "operators" and not found.lazy)
    )


def families_do_not_know_each_other(found: Import) -> bool:
    (here, _), (there, _) = place(found.file), place(found.target)
    return here in FAMILIES and there in (*FAMILIES, "cli", "compat", "nn", "testing", "operators") and here != there


def engines_know_no_operator(found: Import) -> bool:
    (here, engine), (there, folder) = place(found.file), place(found.target)
    return here in FAMILIES and here == there and is_engine(engine) and bool(folder) and not is_engine(folder)


def operators_know_no_other(found: Import) -> bool:
    (here, operator), (there, folder) = place(found.file), place(found.target)
    mine = here in FAMILIES and bool(operator) and not is_engine(operator)
    return mine and here == there and bool(folder) and not is_engine(folder) and folder != operator


def device_code_knows_no_engine(found: Import) -> bool:
    (here, engine), (there, folder) = place(found.file), place(found.target)
    return (here, engine) == ("grid", "_device") and there == here and is_engine(folder) and folder != "_device"


def only_the_command_line_knows_commands(found: Import) -> bool:
    return place(found.target)[0] == "cli" and place(found.file)[0] not in ("cli", "__main__")


def what_users_build_on_knows_no_family(found: Import) -> bool:
    """``sonde.testing`` and ``sonde.memory`` work for any operator: they import none of ours, and nothing of ours imports them."""
    (here, _), (there, _) = place(found.file), place(found.target)
    mine = ("testing", "memory")
    return (here in mine and there not in ("", "op", "jit", *mine)) or (there in mine and here not in (*mine, "_public"))


def the_table_loads_nothing(found: Import) -> bool:
    return found.file == "operators.py" and not found.lazy


RULES = [
    op_and_jit_know_no_family,
    families_do_not_know_each_other,
    engines_know_no_operator,
    operators_know_no_other,
    device_code_knows_no_engine,
    only_the_command_line_knows_commands,
    what_users_build_on_knows_no_family,
    the_table_loads_nothing,
]


@pytest.mark.parametrize("broken", RULES, ids=lambda rule: rule.__name__)
def test_imports(broken):
    found = [str(x) for x in ALL if broken(x)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("broken", "file", "target"),
    [
        (op_and_jit_know_no_family, "op/plan.py", "sonde.grid.sample_sum"),
        (op_and_jit_know_no_family, "jit/release.py", "sonde.operators"),
        (families_do_not_know_each_other, "points/knn/gpu.py", "sonde.grid._device.taps"),
        (engines_know_no_operator, "points/_search/index/api.py", "sonde.points.knn.api"),
        (operators_know_no_other, "grid/sample_sum/cpu.py", "sonde.grid.sample_dot"),
        (device_code_knows_no_engine, "grid/_device/taps.py", "sonde.grid._pyramid"),
        (only_the_command_line_knows_commands, "__init__.py", "sonde.cli"),
        (what_users_build_on_knows_no_family, "testing/values.py", "sonde.points"),
        (what_users_build_on_knows_no_family, "grid/sample_sum/api.py", "sonde.memory"),
        (the_table_loads_nothing, "operators.py", "sonde.grid"),
    ],
)
def test_rules_can_be_broken(broken, file, target):
    assert broken(Import(file, 1, target, False))


def test_imports_are_found():
    """Finds relative and absolute imports, of modules and of names, at the top and in functions."""
    assert {"grid", "points"} <= set(FAMILIES)
    assert len(ALL) > 300
    there = {(x.file, x.target, x.lazy) for x in ALL}
    assert ("grid/sample_sum/api.py", "sonde.op.register", False) in there
    assert ("grid/sample_sum/api.py", "sonde.grid.sample_sum.reference", False) in there
    assert ("jit/release.py", "sonde.operators", True) in there
