"""Plain tables for the terminal."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; the header in capitals."""
    lines = [[cell.upper() for cell in header], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def counted(number: int, noun: str) -> str:
    """``1 step``, ``1,200 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
