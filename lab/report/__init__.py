"""Reports of experiments: a table for the terminal, all data as JSON, one page that needs nothing else."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hotswap.core.errors import ConfigError
from hotswap.lab.records import Result
from hotswap.lab.report.data import read_result, write_result
from hotswap.lab.report.terminal import render_table

__all__ = ["Report", "read_result", "render_table", "write_report", "write_result"]

DATA, PAGE = "result.json", "report.html"


@dataclass(frozen=True)
class Report:
    """What was written. ``page`` None: ``note`` says why there is none."""

    data: Path
    page: Path | None
    note: str | None = None


def write_report(result: Result, folder: Path) -> Report:
    """``result.json`` and ``report.html`` in ``folder``, which is made where it is missing. ConfigError where it cannot
    be written."""
    data, page = folder / DATA, folder / PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_result(result, data)
        if not find_spec("plotly"):
            return Report(data, None, "the page needs plotly: pip install 'hotswap[lab]'; the data is complete.")
        from hotswap.lab.report.page import render_page

        page.write_text(render_page(result), "utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror or error}", "out") from error
    return Report(data, page)
