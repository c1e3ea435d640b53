"""Reads decision logs: line by line, in one sequence, as far as they go."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotswap.core.errors import ConfigError

FORMAT = 2
"""Of the logs that are understood; docs/decision-log.md describes it."""

Event = dict[str, Any]

FIELDS: Mapping[str, Sequence[str]] = {
    "header": ("replica", "engine"),
    "arrival": ("id", "prompt_length", "max_new", "priority", "fork_of", "continued"),
    "step": ("step", "rows", "resumes", "suspensions", "holds", "duration"),
    "idle": ("holds",),
    "plan_failed": ("component", "error"),
    "verdict": ("step", "rows", "worker", "error", "suspended", "usage"),
    "finish": ("id", "reason", "output_length", "preemptions", "cached_tokens"),
    "exchange": ("old", "new", "recomputed", "problem"),
}
"""What is read of an event, by its name."""


class Log:
    """One engine's log, in one file or, where it was rotated, in several, the oldest first. What can only be known once
    it has been read is None before."""

    def __init__(self, paths: Sequence[Path], header: Event) -> None:
        self.paths, self.header = tuple(paths), header
        self.cut: str | None = None
        """Where and why reading has stopped before the end."""
        self.ended: bool | None = None
        """Whether the engine was stopped. Else it runs still, or was killed."""

    @property
    def replica(self) -> str:
        return str(self.header["replica"])

    @property
    def name(self) -> str:
        """For people: the replica's, or the file's where there is one engine only."""
        return self.replica or self.paths[0].name

    def notes(self) -> list[str]:
        """What a reader should know of a log that has been read."""
        if self.cut is not None:
            return [f"{self.cut}; what is before it is told"]
        return [] if self.ended else [f"{self.paths[-1]} has no end: the engine runs still, or was killed"]

    def events(self) -> Iterator[Event]:
        """Each event, the header first. ConfigError for a line that is no event of this log, unless it is the last one
        and incomplete: a process that was killed leaves such a line."""
        self.cut, self.ended, expected = None, False, 0
        for path in self.paths:
            with _open(path) as file:
                for number, line in enumerate(file, 1):
                    event = _event(line)
                    if event is None:
                        if not line.endswith("\n") and path == self.paths[-1]:
                            self.cut = f"{path}:{number}: the line is cut"
                            return
                        raise ConfigError(f"{path}:{number}: is no event of a decision log: {line.strip()[:60]!r}.")
                    if (field := _lacking(event)) is not None:
                        raise ConfigError(f"{path}:{number}: the event {event['event']!r} lacks its {field!r}.")
                    if event["n"] != expected:
                        raise ConfigError(
                            f"{path}:{number}: event {event['n']} follows event {expected - 1}: lines are missing, or "
                            "files of a rotated log are not in order, the oldest first.")
                    expected += 1
                    self.ended = event["event"] == "end"
                    yield event


def open_logs(paths: Sequence[Path]) -> list[Log]:
    """The logs in ``paths``, each of an engine of its own. A file that does not begin with a header goes on with the
    one before it. For a path that does not exist, those of its replicas. ConfigError for what is no log."""
    logs: list[Log] = []
    for path in (found for given in paths for found in _existing(given)):
        with _open(path) as file:
            first = _event(file.readline())
        if first is None:
            raise ConfigError(f"{path} is no decision log: its first line is no event. The observer decision_log "
                              "writes one.")
        if first["event"] == "header":
            if (given := first.get("format")) != FORMAT:
                raise ConfigError(f"{path} has format {given}, and this hotswap reads format {FORMAT}.")
            if (field := _lacking(first)) is not None:
                raise ConfigError(f"{path}: the header lacks its {field!r}.")
            logs.append(Log([path], first))
        elif logs:
            logs[-1] = Log([*logs[-1].paths, path], logs[-1].header)
        else:
            raise ConfigError(f"{path} begins with event {first['n']}: give the file with the beginning before it.")
    return logs


def _existing(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    replicas = sorted(path.parent.glob(f"{path.stem}.*{path.suffix}")) if path.suffix else []
    if not replicas:
        raise ConfigError(f"there is no file {path}.")
    return replicas


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    known = isinstance(event, dict) and isinstance(event.get("n"), int) and isinstance(event.get("event"), str)
    return event if known and isinstance(event.get("t"), (int, float)) else None


def _lacking(event: Event) -> str | None:
    return next((field for field in FIELDS.get(event["event"], ()) if field not in event), None)
