"""What each request has cost: tokens, pages held over time, and its share of the steps."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field

from hotswap.core.engine.pool import RequestState
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.kvcache import CacheUsage, Grant
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.plugins.observers.files import of_replica


@dataclass
class Invoice:
    """``computed_tokens``: positions that steps have computed for it, those after a preemption again, rejected drafts
    too. ``page_seconds``: pages in its tables, integrated over time. ``step_seconds``: its share, by tokens, of the
    time in which the device worked on its steps. Rows that were void when their step ended are not billed."""

    id: str
    tenant: str
    finish_reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    total_seconds: float = 0.0
    page_seconds: float = 0.0
    step_seconds: float = 0.0


class _Pages:
    """One request's pages, per cache group, and since when."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.since = 0.0

    def advance(self, time: float) -> float:
        """Page-seconds since the last call."""
        spent = sum(self.held.values()) * (time - self.since) if self.held else 0.0
        self.since = time
        return spent

    def grant(self, grant: Grant) -> None:
        for group, change in grant.groups.items():
            begin = max(change.truncate_to, change.first_live)
            self.held[group] = begin + len(change.pages) - change.first_live


class Bill(Observer):
    """Writes one JSON line when a request ends, and keeps the newest ones in memory.

    Choose it to charge tenants, or to see which requests a scheduler or a cache makes expensive. The sum of
    ``step_seconds`` over all requests is the time in which steps ran, less what void rows took.
    """

    class Options(ComponentOptions):
        path: Path | None = None
        """Where to append the lines; by default nowhere. Of several replicas each writes its own: the name gets the
        replica's before its suffix."""
        keep: Annotated[int, Field(ge=0)] = 1000
        """How many invoices stay in memory."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.invoices: deque[Invoice] = deque(maxlen=self.options.keep)
        self._open: dict[str, Invoice] = {}
        self._pages: dict[str, _Pages] = {}
        self._steps: dict[int, dict[str, int]] = {}  # rows in flight: step -> request -> tokens
        self._busy_until = 0.0
        self._late: dict[str, Invoice] = {}  # ended in the step that is being collected: its share comes next
        self._file: TextIO | None = None

    @hookimpl
    def hotswap_engine_started(
        self, versions: dict[str, str], config: dict[str, Any], replica: str, time: float,
    ) -> None:
        if self.options.path is not None:
            path = of_replica(self.options.path, replica)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    @hookimpl
    def hotswap_engine_stopped(self, time: float) -> None:
        self._send()
        if self._file is not None:
            self._file.close()
            self._file = None

    @hookimpl
    def hotswap_request_arrived(self, request: RequestState, time: float) -> None:
        self._open[request.id] = Invoice(request.id, request.tenant, prompt_tokens=request.prompt_length)
        self._pages[request.id] = _Pages()

    @hookimpl
    def hotswap_step_planned(
        self, message: StepMessage, holds: Sequence[tuple[str, str]],
        suspensions: Sequence[tuple[str, str, str]], time: float, duration: float,
    ) -> None:
        for request, _ in message.suspensions:
            if (pages := self._pages.get(request)) is not None:
                self._open[request].page_seconds += pages.advance(time)
                pages.held.clear()
        for request, grant in message.grants:
            if (pages := self._pages.get(request)) is not None:
                self._open[request].page_seconds += pages.advance(time)
                pages.grant(grant)
        self._steps[message.step_id] = {request: tokens + drafts for request, tokens, drafts in message.rows}

    @hookimpl
    def hotswap_step_finished(
        self, verdict: Verdict, requests: Sequence[RequestState], voided: Sequence[str], usage: CacheUsage,
        time: float, duration: float,
    ) -> None:
        rows = self._steps.pop(verdict.step_id, {})
        # Steps overlap: each is charged from where the one before it ended.
        seconds, self._busy_until = min(duration, time - self._busy_until), time
        total = sum(rows.values())
        void = set(voided)
        for request, tokens in rows.items():
            invoice = self._open.get(request) or self._late.get(request)
            if invoice is not None and request not in void:
                invoice.computed_tokens += tokens
                invoice.step_seconds += seconds * tokens / total
        self._send()

    @hookimpl
    def hotswap_request_finished(self, request: RequestState, reason: str, time: float) -> None:
        invoice, pages = self._open.pop(request.id, None), self._pages.pop(request.id, None)
        if invoice is None or pages is None:
            return
        invoice.page_seconds += pages.advance(time)
        invoice.finish_reason, invoice.output_tokens = reason, request.output_length
        invoice.reused_tokens, invoice.preemptions = request.cached_tokens or 0, request.preemptions
        begun = request.first_scheduled_at
        invoice.queue_seconds = (time if begun is None else begun) - request.arrival
        invoice.total_seconds = time - request.arrival
        self._late[request.id] = invoice
        if not self._steps:
            self._send()

    def _send(self) -> None:
        for invoice in self._late.values():
            self.invoices.append(invoice)
            if self._file is not None:
                self._file.write(json.dumps(asdict(invoice)) + "\n")
        if self._late and self._file is not None:
            self._file.flush()
        self._late.clear()
