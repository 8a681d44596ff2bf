"""The README as a package index shows it: every image and link works."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from hatch_build import published  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")


def test_without_an_address_only_words_are_left():
    text = published(README, None)
    assert not TARGETS.findall(text)
    assert "kernels of other libraries" in text
    assert len(text.splitlines()) == len(README.splitlines())


def test_with_an_address_everything_points_there():
    text = published(README, "https://example.org/sonde/")
    found = TARGETS.findall(text)
    assert len(found) == len(TARGETS.findall(README)) > 10
    for image, target in found:
        assert re.fullmatch(rf"https://example\.org/sonde/{'raw' if image else 'blob'}/main/\S+", target), target
        assert (ROOT / target.split("/main/")[1].split("#")[0]).exists(), target


def test_other_links_stay():
    assert published("[a](https://b.org/c) and [d](#e)", None) == "[a](https://b.org/c) and [d](#e)"
