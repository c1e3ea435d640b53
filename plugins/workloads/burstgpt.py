"""The BurstGPT traces."""

from collections.abc import Iterator

from hotswap.plugins.workloads.trace import Lines, Row, Trace

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


class BurstGPTTrace(Trace):
    """BurstGPT (Wang et al., 2024, arXiv:2401.17644): a CSV file, months of requests to GPT-3.5 and GPT-4 with
    Timestamp in seconds, Request tokens and Response tokens; other columns are not read.

    Choose it for bursts, and for long stretches of time. Lines with 0 response tokens are requests that failed; what
    they asked for is unknown, and they are left out. It tells nothing of shared prefixes.
    """

    def rows(self, lines: Lines) -> Iterator[Row]:
        for row in lines.rows(COLUMNS):
            time, prompt, output = (lines.number_of(row[name], name) for name in COLUMNS)
            if output:
                yield Row(time, prompt, output)
