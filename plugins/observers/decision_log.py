"""The decision log: one JSON line an event, enough to replay every decision without the model and the prompts."""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field

from hotswap.core.engine.pool import RequestState
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.kvcache import CacheUsage
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.plugins.observers.files import of_replica

FORMAT = 1


class DecisionLog(Observer):
    """Writes arrivals, plans with reasons, verdicts, endings and exchanges, each with a clock reading, in one sequence.

    Choose it to find out why a request waited, or to replay a server's traffic on a laptop. Prompts appear as digests
    of their pages, keyed with a secret that is drawn anew for each log, so that equal prefixes can be seen and nothing
    else.
    """

    class Options(ComponentOptions):
        path: Path
        """Where to write; an existing file is replaced. Of several replicas each writes its own: the name gets the
        replica's before its suffix."""
        tokens: bool = False
        """Write token ids instead of page digests. Prompts can then be read from the log."""
        page_size: Annotated[int, Field(ge=1)] = 16
        """Tokens a digest covers. A replay finds the same prefix hits when this is the KV manager's page size."""
        flush: bool = True
        """Hand each line to the operating system at once."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._file: TextIO | None = None
        self._sequence = 0
        self._key = secrets.token_bytes(32)

    @hookimpl
    def hotswap_engine_started(
        self, versions: dict[str, str], config: dict[str, Any], replica: str, time: float,
    ) -> None:
        path = of_replica(self.options.path, replica)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._write("header", time, format=FORMAT, versions=versions, config=config, replica=replica,
                    tokens=self.options.tokens, page_size=self.options.page_size)

    @hookimpl
    def hotswap_engine_stopped(self, time: float) -> None:
        if self._file is not None:
            self._write("end", time)
            self._file.close()
            self._file = None

    @hookimpl
    def hotswap_request_arrived(self, request: RequestState, time: float) -> None:
        self._write(
            "arrival", time, id=request.id, prompt_length=request.prompt_length, max_new=request.max_new,
            priority=request.priority, tenant=self._digest(request.tenant.encode()) if request.tenant else "",
            deadline=request.deadline, cache_key=self._digest(repr(request.request.cache_key).encode()),
            prompt_logprobs=request.prompt_logprobs is not None, fork_of=request.request.fork_of,
            content=self._content(request, 0),
        )

    @hookimpl
    def hotswap_request_finished(self, request: RequestState, reason: str, time: float) -> None:
        full_pages = request.prompt_length // self.options.page_size
        self._write("finish", time, id=request.id, reason=reason, output_length=request.output_length,
                    preemptions=request.preemptions, cached_tokens=request.cached_tokens,
                    content=self._content(request, full_pages * self.options.page_size))

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
    def hotswap_plan_failed(self, component: str, error: str, time: float) -> None:
        self._write("plan_failed", time, component=component, error=error)

    @hookimpl
    def hotswap_step_finished(
        self, verdict: Verdict, requests: Sequence[RequestState], voided: Sequence[str], usage: CacheUsage,
        time: float, duration: float,
    ) -> None:
        self._write(
            "verdict", time, step=verdict.step_id, duration=duration, worker=verdict.durations, error=verdict.error,
            rows=[(row.request, len(row.kept), row.drafted, row.accepted, row.computed, row.error)
                  for row in verdict.rows],
            suspended=verdict.suspended, transfers=verdict.finished_transfers, voided=voided,
            usage=(usage.held, usage.fenced, usage.cached, usage.free),
        )

    @hookimpl
    def hotswap_pages_leaked(self, owners: dict[str, int], time: float) -> None:
        self._write("leak", time, owners=owners)

    @hookimpl
    def hotswap_component_exchanged(self, kind: str, old: str, new: str, time: float) -> None:
        self._write("exchange", time, kind=kind, old=old, new=new)

    def _write(self, event: str, time: float, **fields: Any) -> None:
        if self._file is None:
            return
        json.dump({"n": self._sequence, "t": time, "event": event, **fields}, self._file, separators=(",", ":"))
        self._file.write("\n")
        self._sequence += 1
        if self.options.flush:
            self._file.flush()

    def _content(self, request: RequestState, begin: int) -> list[Any]:
        """The tokens from ``begin`` on, or the chained digests of the full pages among them."""
        if self.options.tokens:
            return request.tokens[begin:]
        size, tokens = self.options.page_size, request.tokens
        digests, parent = [], repr(request.request.cache_key)
        for page in range(len(tokens) // size):
            parent = self._digest(f"{parent}{tokens[page * size : (page + 1) * size]}".encode())
            if page * size >= begin:
                digests.append(parent)
        return digests

    def _digest(self, data: bytes) -> str:
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()[:32]
