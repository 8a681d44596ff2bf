"""The README as a package index shows it, where paths in the repository lead nowhere.

With `Repository` under `[project.urls]`, links and images point there. Without it, links become plain text and images are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


class PublishedReadme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = published(text, metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def published(text: str, repository: str | None) -> str:
    def link(found: re.Match[str]) -> str:
        image, words, path = found.groups()
        if repository is None:
            return "" if image else words
        return f"{image}[{words}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/main/{path})"

    return LINK.sub(link, text)
