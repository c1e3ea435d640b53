"""A KV transfer that tells the fake device which pages are being filled, so that they are poisoned before they are."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kv_transfer import Attachment, Kept, KVTransfer, Saving, TransferLayout, TransferWorker
from hotswap.core.interfaces.kvcache import Grant
from hotswap.core.interfaces.scheduler import Answer, SuspendMode
from hotswap.core.request import Request
from hotswap.core.testing.fakes import LateExecutor
from hotswap.core.testing.wrapping import noting


class Watched(KVTransfer):
    """Hands everything on to ``inner``. What it must not do in between, it checks: a message holds plain values, and a
    transfer ends once. ``errors``: what was raised while a plan was made."""

    def __init__(self, inner: KVTransfer, executor: LateExecutor) -> None:
        super().__init__()
        self.inner, self.executor = inner, executor
        self.ends: list[str] = []
        self.errors: list[str] = []

    def describe(self) -> Description:
        return self.inner.describe()

    def worker(self) -> TransferWorker:
        return self.inner.worker()

    def configure(self, layout: TransferLayout) -> Any:
        return _plain(self.inner.configure(layout))

    def lookup(
        self, request: Request, tokens: Sequence[int], cached: int, limit: int, tail: int = 0,
    ) -> int | Answer:
        with noting(self.errors, "lookup"):
            before = self.counters(), self.pending
            found = self.inner.lookup(request, tokens, cached, limit, tail)
            again = self.inner.lookup(request, tokens, cached, limit, tail)
            assert (found, *before) == (again, self.counters(), self.pending), "lookup has a side effect"
            most = max(cached, limit)
            assert isinstance(found, Answer) or found <= most, f"{found} tokens found, at most {limit} asked"
            return found

    def attach(
        self, request: Request, tokens: Sequence[int], table: Grant, cached: int, upto: int,
    ) -> Attachment:
        self.executor.cached[request.id] = cached
        with noting(self.errors, "attach"):
            return self.inner.attach(request, tokens, table, cached, upto)

    def save(
        self, request: Request, tokens: Sequence[int], table: Grant, bound: int, mode: SuspendMode,
    ) -> Saving | None:
        with noting(self.errors, "save"):
            return self.inner.save(request, tokens, table, bound, mode)

    def suspended(self, request: Request, tokens: Sequence[int], computed: int) -> None:
        self.inner.suspended(request, tokens, computed)

    def finished(self, request: Request, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        kept = self.inner.finished(request, tokens, table, reason)
        return kept._replace(handle=_plain(kept.handle))

    def forget(self, request: Request) -> None:
        self.inner.forget(request)

    def undo(self, entry: Any) -> None:
        self.inner.undo(entry)

    def message(self, step_id: int) -> Any:
        return _plain(self.inner.message(step_id))

    @property
    def pending(self) -> bool:
        return self.inner.pending

    def ended(self, name: str, tokens: int | None) -> None:
        assert name not in self.ends, f"transfer {name} has ended twice"
        self.ends.append(name)
        self.inner.ended(name, tokens)

    def reset(self) -> int:
        return self.inner.reset()

    def counters(self) -> Mapping[str, int]:
        return self.inner.counters()

    def close(self) -> None:
        self.inner.close()

    def check(self) -> None:
        self.inner.check()

    def leaks(self) -> Mapping[str, int]:
        return self.inner.leaks()


def _plain(value: Any) -> Any:
    """``value`` as another process would get it; TypeError where it is not plain."""
    return json.loads(json.dumps(value))
