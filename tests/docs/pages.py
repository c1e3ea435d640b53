"""What the tests of the documentation share: the pages, and the code blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FENCES = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """``mark``: what stands behind the language, such as "run" or "plugin=name.py"."""

    page: Path
    line: int
    language: str
    mark: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str, page: Path | None = None) -> list[Block]:
    return [
        Block(source, text.count("\n", 0, found.start()) + 1, found[1], found[2].strip(), found[3])
        for source in ([page] if page else PAGES) for text in [source.read_text("utf-8")]
        for found in _FENCE.finditer(text) if found[1] == language
    ]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCES.sub("", page.read_text("utf-8"))


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page.read_text("utf-8")
    level = heading.split(" ")[0]
    found = re.search(rf"^{re.escape(heading)}$\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page.name} has no heading '{heading}'"
    return found[1]


def table(text: str) -> list[list[str]]:
    """The cells of every row of the tables in ``text``, heads left out."""
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in text.splitlines() if line.startswith("|")]
    heads = {index - 1 for index, row in enumerate(rows) if set("".join(row)) <= set("-: ")}
    return [row for index, row in enumerate(rows) if index not in heads and index - 1 not in heads]


def names(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)
