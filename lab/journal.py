"""The raw records on disk, a JSON line each, written as blocks end: what was measured outlives whatever comes after."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hotswap.core.errors import ConfigError, HotswapError
from hotswap.lab.records import BlockRecord, RequestRecord

FILE = "records.jsonl"


class JournalError(HotswapError):
    """No more can be written down: the disk is full, or gone."""


class Journal:
    """Lines are a header, one a block, and an end that says why the run ended. ``path``, whose folder is made; None:
    nothing is kept. After a JournalError nothing more is."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror or error}", "out") from error

    def header(self, experiment: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self._write("header", experiment=experiment, environment=environment)

    def block(self, block: BlockRecord) -> None:
        self._write("block", **asdict(block))

    def end(self, stopped: str, partial: bool) -> None:
        self._write("end", stopped=stopped, partial=partial)

    def _write(self, event: str, **values: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"event": event, **values}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            name = self._file.name
            self._close()
            raise JournalError(f"{name} cannot be written any more: {error.strerror or error}") from error

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written before cannot be now
                file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None,
    ) -> None:
        self._close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Its lines; a block's record is under ``block``. A last line that was cut off, by whatever ended the run, is left
    out. ValueError for any other that is no JSON."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise ValueError(f"{path}:{number} is no line of a journal: {error}") from error
        if values["event"] == "block":
            values = {"event": "block", "block": block_of(values)}
        yield values


def block_of(values: Mapping[str, Any]) -> BlockRecord:
    """A block from its JSON."""
    known = {field.name for field in fields(BlockRecord)} - {"requests", "timeline"}
    return BlockRecord(
        **{name: value for name, value in values.items() if name in known},
        requests=tuple(_request(request) for request in values["requests"]),
        timeline=tuple((point[0], point[1], point[2], point[3]) for point in values["timeline"]))


def _request(values: Mapping[str, Any]) -> RequestRecord:
    chunks = tuple((time, tokens) for time, tokens in values["chunks"])
    tokens = None if values["tokens"] is None else tuple(values["tokens"])
    return RequestRecord(**{**values, "chunks": chunks, "tokens": tokens})
