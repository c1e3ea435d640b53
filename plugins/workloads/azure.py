"""The traces of Azure's LLM inference service."""

from collections.abc import Iterator
from datetime import UTC, datetime

from hotswap.plugins.workloads.trace import Lines, Row, Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureTrace(Trace):
    """Azure's traces of 2023 and 2024 (AzurePublicDataset; Patel et al., "Splitwise", ISCA 2024): a CSV file with
    TIMESTAMP, ContextTokens and GeneratedTokens.

    Choose it for the arrivals and lengths of a large service, conversation or code. It tells nothing of shared
    prefixes, so that each prompt is its own.
    """

    def rows(self, lines: Lines) -> Iterator[Row]:
        for row in lines.rows(COLUMNS):
            prompt, output = (lines.number_of(row[name], name) for name in COLUMNS[1:])
            yield Row(self._seconds(row["TIMESTAMP"], lines), prompt, output)

    def _seconds(self, text: str, lines: Lines) -> float:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            lines.refuse(f"TIMESTAMP should be a date and time such as 2023-11-16 18:15:46.6805900, not {text!r}.")
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
