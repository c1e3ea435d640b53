"""A result in the terminal."""

from collections.abc import Iterator, Sequence

from hotswap.lab.records import Result
from hotswap.lab.report.content import Row, Tally, base_of, confidence, headline, outputs, rows, tallies, uncompared

DIVERGENCES = 3
FAILURES = "in the latencies that are compared, a request that failed is without end"
HEADER = ("metric", "base", "arm", "effect", "{} interval", "verdict")
LEFT = {0, 5}


def render_table(result: Result) -> str:
    """Verdicts arm by arm, and beneath them what one has to know to trust them."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    if result.partial:
        yield f"PARTIAL: {result.stopped}. What was measured until then:"
        yield ""
    for arm, lines in rows(result).items():
        yield f"{arm} against {base_of(result)}"
        yield from _columns(lines, confidence(result))
        yield headline(lines)
        yield ""
    yield from _beneath(result)


def _columns(lines: Sequence[Row], confidence: str) -> Iterator[str]:
    cells = [[cell.upper().format(confidence) for cell in HEADER]]
    cells += [[row.metric, row.base, row.arm, row.effect, row.interval, row.verdict] for row in lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    for line in cells:
        padded = (cell.ljust(width) if column in LEFT else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
        yield "  ".join(padded).rstrip()


def _beneath(result: Result) -> Iterator[str]:
    told = tallies(result)
    for tally in told:
        yield f"{tally.arm}: {_told(tally)}"
    if any(tally.statuses for tally in told):
        yield FAILURES
    yield from uncompared(result)
    yield from outputs(result, DIVERGENCES)
    if not result.partial:
        yield f"Ended: {result.stopped}."


def _told(tally: Tally) -> str:
    parts = [f"{tally.succeeded} requests in {tally.blocks} blocks", f"failed: {tally.failures}"]
    if tally.cut:
        parts.append(f"{tally.cut} still under way at the end of a block")
    if tally.hit_rate is not None:
        parts.append(f"hit rate {tally.hits}")
    if tally.disturbed:
        parts.append(f"{tally.disturbed} blocks beside busy neighbours")
    return ", ".join(parts)
