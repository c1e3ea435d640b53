"""A timeline for Chrome's and Perfetto's viewers, in the Trace Event Format (JSON object form).

One process an engine: tracks for plans, for steps (as many as are in flight), and for each request; counters for
requests and for pages. Times are microseconds from the first event of the earliest log.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hotswap.core.errors import ConfigError
from hotswap.lab.decisions.lives import Life, Lives
from hotswap.lab.decisions.log import Event, Log

PLANS, STEPS, REQUESTS = 1, 2, 1000
"""Numbers of tracks: plans, the first of the steps, the first of the requests."""

TraceEvent = dict[str, Any]


class _Timeline:
    """Of one engine."""

    def __init__(self, log: Log, process: int, begin: float) -> None:
        self._process, self._begin = process, begin
        self._name = f"engine {log.replica}" if log.replica else "engine"
        self._lives = Lives(log.replica)
        self._depth = int(log.header["engine"]["depth"])
        self._submitted: dict[int, tuple[float, Event]] = {}
        self._requests = 0

    def head(self) -> Iterator[TraceEvent]:
        yield self._meta("process_name", 0, name=self._name)
        yield self._meta("thread_name", PLANS, name="plans")
        for lane in range(self._depth):
            yield self._meta("thread_name", STEPS + lane, name="steps" if self._depth == 1 else f"steps {lane + 1}")
        for track in (PLANS, *range(STEPS, STEPS + self._depth)):
            yield self._meta("thread_sort_index", track, sort_index=track)

    def take(self, event: Event) -> Iterator[TraceEvent]:
        time, duration = event["t"], event.get("duration", 0.0)
        life = self._lives.take(event)
        match event["event"]:
            case "step":
                yield self._slice("plan", PLANS, time, time + duration, step=event["step"], holds=event["holds"])
                self._submitted[event["step"]] = time + duration, event
                for id, mode, reason in event["suspensions"]:
                    yield self._instant(f"suspended: {id}", time + duration, mode=mode, reason=reason)
            case "idle":
                yield self._instant("nothing planned", time, holds=event["holds"])
            case "plan_failed":
                yield self._instant("plan failed", time, component=event["component"], error=event["error"])
            case "verdict":
                yield from self._step(event)
            case "finish" if life is not None:
                yield from self._request(life)
            case "reset" | "exchange" | "leak":
                told = {key: value for key, value in event.items() if key not in ("n", "t", "event")}
                yield self._instant(event["event"], time, **told)
        if event["event"] in ("arrival", "step", "finish"):
            running = self._lives.running
            yield self._counter("requests", time, running=running, waiting=len(self._lives.live) - running)

    def tail(self, time: float) -> Iterator[TraceEvent]:
        for life in self._lives.close(time):
            yield from self._request(life)

    def _step(self, event: Event) -> Iterator[TraceEvent]:
        begin, step = self._submitted.pop(event["step"])
        rows = {id: {"tokens": n_tokens, "drafts": drafts} for id, n_tokens, drafts in step["rows"]}
        for id, n_kept, _, accepted, *_ in event["rows"]:
            rows.setdefault(id, {}).update(kept=n_kept, accepted=accepted)
        tokens = sum(n_tokens + drafts for _, n_tokens, drafts in step["rows"])
        more = {"error": event["error"]} if event["error"] else {}
        yield self._slice(
            f"step {event['step']}", STEPS + event["step"] % self._depth, begin, event["t"], tokens=tokens, rows=rows,
            worker=event["worker"], **more)
        held, fenced, cached, free = event["usage"]
        yield self._counter("pages", event["t"], held=held, fenced=fenced, cached=cached, free=free)

    def _request(self, life: Life) -> Iterator[TraceEvent]:
        track = REQUESTS + self._requests
        self._requests += 1
        yield self._meta("thread_name", track, name=life.id)
        yield self._meta("thread_sort_index", track, sort_index=track)
        told = {
            "prompt_tokens": life.prompt_length, "output_tokens": life.output_length,
            "cached_tokens": life.cached_tokens, "preemptions": life.preemptions, "ended": life.reason}
        for span in life.spans:
            yield self._slice(span.phase.value, track, span.begin, span.end, request=life.id, **told)

    def _slice(self, name: str, track: int, begin: float, end: float, /, **told: Any) -> TraceEvent:
        return {"name": name, "ph": "X", "pid": self._process, "tid": track, "ts": self._us(begin),
                "dur": max(0.0, round(1e6 * (end - begin), 3)), "args": told}

    def _instant(self, name: str, time: float, /, **told: Any) -> TraceEvent:
        return {"name": name, "ph": "i", "s": "p", "pid": self._process, "tid": PLANS, "ts": self._us(time),
                "args": told}

    def _counter(self, name: str, time: float, /, **values: int) -> TraceEvent:
        return {"name": name, "ph": "C", "pid": self._process, "tid": 0, "ts": self._us(time), "args": values}

    def _meta(self, name: str, track: int, /, **told: Any) -> TraceEvent:
        return {"name": name, "ph": "M", "pid": self._process, "tid": track, "ts": 0, "args": told}

    def _us(self, time: float) -> float:
        return round(1e6 * (time - self._begin), 3)


def trace_events(logs: Sequence[Log]) -> Iterator[TraceEvent]:
    """Everything that the logs tell, one engine after the other."""
    begin = min(log.header["t"] for log in logs)
    for process, log in enumerate(logs, 1):
        timeline, time = _Timeline(log, process, begin), begin
        yield from timeline.head()
        for event in log.events():
            time = event["t"]
            yield from timeline.take(event)
        yield from timeline.tail(time)


def write(logs: Sequence[Log], path: Path) -> int:
    """Write the timeline as it is made; returns the number of events. ConfigError where it cannot be written."""
    if path.exists() and any(path.samefile(part) for log in logs for part in log.paths):
        raise ConfigError(f"{path} is the log that is read; write the timeline elsewhere.", "--perfetto")
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            count = 0
            for count, event in enumerate(trace_events(logs), 1):
                file.write(",\n" if count > 1 else "\n")
                json.dump(event, file)
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", "--perfetto") from error
    return count
