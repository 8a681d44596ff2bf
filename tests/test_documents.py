"""Links within the documents: every file and every heading that they point to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("*.md", "docs/**/*.md", "template/**/*.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))


def prose(path: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings: lower case, without punctuation, with hyphens for blanks; a second one of a name gets -1."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {name if name not in found[:i] else f"{name}-{found[:i].count(name)}" for i, name in enumerate(found)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links(path):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(path)):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_documents_are_found():
    assert {"README.md", "power.md"} <= {path.name for path in DOCUMENTS}
    assert sum(len(re.findall(r"\]\(", prose(path))) for path in DOCUMENTS) > 60
    assert "how-exact-it-is" in anchors(ROOT / "docs" / "power.md")
