"""The decision log: one JSON line an event, enough to replay every decision without the model and the prompts."""

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field

from hotswap.core.engine.pool import RequestState
from hotswap.core.engine.setup import EngineSetup, SwitchSetup
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.kvcache import CacheUsage
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.plugins.observers.files import of_replica

FORMAT = 2


class DecisionLog(Observer):
    """Writes arrivals, plans with reasons, verdicts, endings and exchanges, each with a clock reading, in one sequence.

    Choose it to find out why a request waited (``hotswap explain``), or to replay a server's traffic on a laptop
    (``hotswap replay``). Prompts and outputs appear as digests of their pages, keyed with a secret that is drawn anew
    for each log, so that equal prefixes can be seen and nothing else.
    """

    class Options(ComponentOptions):
        path: Path
        """Where to write; an existing file is replaced. Of several replicas each writes its own: the name gets the
        replica's before its suffix."""
        tokens: bool = False
        """Write token ids instead of page digests. Prompts can then be read from the log."""
        page_size: Annotated[int, Field(ge=1)] | None = None
        """Tokens a digest covers; by default the KV manager's page size, so that a replay finds the same prefix
        hits."""
        flush: bool = True
        """Hand each line to the operating system at once."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._file: TextIO | None = None
        self._sequence, self._page_size = 0, 0
        self._key = secrets.token_bytes(32)
        self._named: set[str] = set()
        self._told: dict[str, _Told] = {}

    @hookimpl
    def hotswap_engine_started(
        self, versions: dict[str, str], config: dict[str, Any], replica: str, setup: EngineSetup, time: float,
    ) -> None:
        path = of_replica(self.options.path, replica)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._page_size = self.options.page_size or math.gcd(*(group.page_size for group in setup.groups.values()))
        self._named = set(_strings(config))
        self._file = path.open("w", encoding="utf-8")
        self._write("header", time, format=FORMAT, versions=versions, config=config, replica=replica,
                    tokens=self.options.tokens, page_size=self._page_size, engine=setup.plain())

    @hookimpl
    def hotswap_engine_stopped(self, time: float) -> None:
        if self._file is not None:
            self._write("end", time)
            self._file.close()
            self._file = None

    @hookimpl
    def hotswap_request_arrived(self, request: RequestState, time: float) -> None:
        continued, key = request.request.continued, repr(request.request.cache_key)
        self._told[request.id] = _Told(key)
        self._write(
            "arrival", time, id=request.id, prompt_length=request.prompt_length, max_new=request.max_new,
            priority=request.priority, tenant=self._tenant(request.tenant), deadline=request.deadline,
            cache_key=self._digest(key.encode()), prompt_logprobs=request.prompt_logprobs is not None,
            fork_of=request.request.fork_of, continued=len(continued.tokens) if continued else 0,
            content=self._content(request),
        )

    @hookimpl
    def hotswap_request_finished(self, request: RequestState, reason: str, time: float) -> None:
        self._write("finish", time, id=request.id, reason=reason, output_length=request.output_length,
                    preemptions=request.preemptions, cached_tokens=request.cached_tokens,
                    content=self._content(request))
        self._told.pop(request.id, None)

    @hookimpl
    def hotswap_step_planned(
        self, message: StepMessage, holds: Sequence[tuple[str, str]], suspensions: Sequence[tuple[str, str, str]],
        time: float, duration: float,
    ) -> None:
        self._write(
            "step", time, step=message.step_id, rows=message.rows, resumes=message.resumes, drops=message.drops,
            pages=[(request, {group: len(change.pages) for group, change in grant.groups.items()})
                   for request, grant in message.grants],
            suspensions=suspensions, holds=holds, duration=duration,
        )

    @hookimpl
    def hotswap_nothing_planned(self, holds: Sequence[tuple[str, str]], time: float) -> None:
        self._write("idle", time, holds=holds)

    @hookimpl
    def hotswap_plan_failed(self, component: str, error: str, time: float) -> None:
        self._write("plan_failed", time, component=component, error=error)

    @hookimpl
    def hotswap_step_finished(
        self, verdict: Verdict, requests: Sequence[RequestState], voided: Sequence[str], usage: CacheUsage,
        time: float, duration: float,
    ) -> None:
        content = [(request.id, new) for request in requests if (new := self._content(request))]
        self._write(
            "verdict", time, step=verdict.step_id, duration=duration, worker=verdict.durations, error=verdict.error,
            rows=[(row.request, len(row.kept), row.drafted, row.accepted, row.computed, row.error, row.lag)
                  for row in verdict.rows],
            own=[row.request for row in verdict.rows if row.own],
            suspended=verdict.suspended, transfers=verdict.finished_transfers, voided=voided, content=content,
            usage=(usage.held, usage.fenced, usage.cached, usage.free),
        )

    @hookimpl
    def hotswap_cache_reset(self, time: float) -> None:
        self._write("reset", time)

    @hookimpl
    def hotswap_pages_leaked(self, owners: dict[str, int], time: float) -> None:
        self._write("leak", time, owners=owners)

    @hookimpl
    def hotswap_switch_begins(self, switch: SwitchSetup, time: float) -> None:
        self._write("switch", time, **switch.plain())

    @hookimpl
    def hotswap_switch_undone(self, time: float) -> None:
        self._write("switch_undone", time)

    @hookimpl
    def hotswap_component_exchanged(
        self, path: str, kind: str, old: str, new: str, options: dict[str, Any], pause: float, handed_over: int,
        recomputed: int, problem: str, time: float,
    ) -> None:
        self._write("exchange", time, path=path, kind=kind, old=old, new=new, options=options, pause=pause,
                    handed_over=handed_over, recomputed=recomputed, problem=problem)

    def _write(self, event: str, time: float, **fields: Any) -> None:
        if self._file is None:
            return
        json.dump({"n": self._sequence, "t": time, "event": event, **fields}, self._file, separators=(",", ":"))
        self._file.write("\n")
        self._sequence += 1
        if self.options.flush:
            self._file.flush()

    def _content(self, request: RequestState) -> list[Any]:
        """What has become known since the last time: tokens, or the chained digests of the pages that are full now."""
        told, tokens, size = self._told.get(request.id), request.tokens, self._page_size
        if told is None:  # it has ended, or arrived before this observer
            return []
        if self.options.tokens:
            new, told.length = tokens[told.length :], len(tokens)
            return new
        digests = []
        while told.length + size <= len(tokens):
            page = tokens[told.length : told.length + size]
            told.parent = self._digest(f"{told.parent}{page}".encode())
            told.length += size
            digests.append(told.parent)
        return digests

    def _tenant(self, name: str) -> str:
        """Those that the config names, which stands in the header, are told by name: a policy may know them."""
        return name if not name or name in self._named else self._digest(name.encode())

    def _digest(self, data: bytes) -> str:
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()[:32]


class _Told:
    """Of one live request: how many of its tokens the log has, and the digest of the last page among them."""

    __slots__ = ("length", "parent")

    def __init__(self, parent: str) -> None:
        self.length, self.parent = 0, parent


def _strings(value: Any) -> Iterator[str]:
    """Every key and every text in a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
