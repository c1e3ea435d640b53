"""A KV transfer: moves pages between the cache and somewhere else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.kv_transfer import (
    NOTHING_KEPT,
    SWAP,
    Attachment,
    CachePages,
    Kept,
    KVTransfer,
    Saving,
    TransferLayout,
    TransferWorker,
)
from hotswap.core.interfaces.kvcache import Grant
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.interfaces.scheduler import Answer, SuspendMode
from hotswap.core.request import Request


@dataclass
class Record:
    """A suspended request's pages in host memory. ``computed``: how many tokens they hold, once the worker has said."""

    name: str
    pages: int
    computed: int | None = None


class MyPart(KVTransfer):
    """Suspended requests are swapped to host memory, and go on where they were instead of being computed again.

    Choose it ... (where memory is short, and moving pages is faster than computing them again). Copies are made within
    the step: simple, and nobody computes meanwhile. hotswap's `host` copies beside the steps, and shares prefixes, too.
    """

    class Options(ComponentOptions):
        max_pages: Annotated[int, Field(ge=1)] = 4096
        """Most pages that are kept; a request that does not fit is computed again."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.records: dict[str, Record] = {}
        self.work: list[dict[str, Any]] = []  # for the worker halves, in order
        self.saved = 0

    def describe(self) -> Description:
        needs = Requirement("kvcache", "tables", "it copies the pages of suspended requests", "kvcache.use")
        return Description(offers=frozenset({SWAP}), requires=(needs,))

    def worker(self) -> TransferWorker:
        return PageCopies()

    def configure(self, layout: TransferLayout) -> Any:
        """What it returns, every worker half gets in ``register``."""
        self.page_sizes = {group: share.page_size for group, share in layout.plan.groups.items()}
        return None

    # Out: a request is suspended.

    def save(
        self, request: Request, tokens: Sequence[int], table: Grant, bound: int, mode: SuspendMode,
    ) -> Saving | None:
        pages = sum(len(change.pages) for change in table.groups.values())
        if sum(record.pages for record in self.records.values()) + pages > self.options.max_pages:
            return None
        self.saved += 1
        record = self.records[request.id] = Record(f"{request.id}#{self.saved}", pages)
        self._do("save", record, table)
        return Saving(partial(self._undo_save, request.id))  # without a fence: it is over when the step is

    def _undo_save(self, request_id: str) -> None:
        self.work.pop()
        del self.records[request_id]

    def suspended(self, request: Request, tokens: Sequence[int], computed: int) -> None:
        """Only now is it known how far the steps in flight came."""
        if request.id in self.records:
            self.records[request.id].computed = computed

    # In: it starts again.

    def lookup(
        self, request: Request, tokens: Sequence[int], cached: int, limit: int, tail: int = 0,
    ) -> int | Answer:
        record = self.records.get(request.id)
        if record is None:
            return 0
        if record.computed is None:
            return Answer.LATER
        return record.computed if record.computed <= limit and not tail else 0

    def attach(self, request: Request, tokens: Sequence[int], table: Grant, cached: int, upto: int) -> Attachment:
        record = self.records.pop(request.id, None)
        if record is None:
            return Attachment(lambda: None)
        if upto > cached:
            self._do("load", record, table, cached, upto)
        else:
            self._do("drop", record)
        return Attachment(partial(self._undo_attach, request.id, record))

    def _undo_attach(self, request_id: str, record: Record) -> None:
        self.work.pop()
        self.records[request_id] = record

    def forget(self, request: Request) -> None:
        """Every request's end: nobody will ask for its pages any more."""
        if record := self.records.pop(request.id, None):
            self._do("drop", record)

    def finished(self, request: Request, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        return NOTHING_KEPT

    # Plans may fail, and are undone, last in, first out. What is left is sent with the step, as plain values.

    def _do(self, what: str, record: Record, table: Grant | None = None, begin: int = 0, end: int = 0) -> None:
        groups = {} if table is None else {
            group: [change.first_live, list(change.pages), begin // self.page_sizes[group],
                    -(-end // self.page_sizes[group])]
            for group, change in table.groups.items()}
        self.work.append({"do": what, "name": record.name, "groups": groups})

    def undo(self, entry: Callable[[], None]) -> None:
        entry()

    def message(self, step_id: int) -> Any:
        work, self.work = self.work, []
        return work or None

    @property
    def pending(self) -> bool:
        return bool(self.work)

    def ended(self, name: str, tokens: int | None) -> None:
        raise AssertionError("nothing here ends later than its step")

    def leaks(self) -> Mapping[str, int]:
        return {request: record.pages for request, record in self.records.items()}


class PageCopies(TransferWorker):
    """The half that runs where the pages are. It holds copies by name: per group, logical page -> a copy a tensor."""

    def __init__(self) -> None:
        self.copies: dict[str, dict[str, dict[int, list[Any]]]] = {}

    def register(self, cache: CachePages, terms: Any) -> None:
        self.tensors = {
            group: [tensor for layer in pages.layers for tensor in layer.tensors]
            for group, pages in cache.groups.items()}

    def begin(self, message: Any) -> None:
        for work in message:
            if work["do"] == "save":
                self.copies[work["name"]] = {
                    group: {first + i: [tensor[page].to("cpu", copy=True) for tensor in self.tensors[group]]
                            for i, page in enumerate(pages)}
                    for group, (first, pages, _, _) in work["groups"].items()}
                continue
            copies = self.copies.pop(work["name"])
            for group, (first, pages, begin, end) in work["groups"].items():  # none where it is dropped
                for logical in range(max(first, begin), end):
                    for tensor, copy in zip(self.tensors[group], copies[group][logical], strict=True):
                        tensor[pages[logical - first]].copy_(copy)

    def report(self, wait_s: float) -> list[EndedTransfer]:
        return []
