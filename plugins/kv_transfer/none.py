"""The absence of a KV transfer, so that the config can name it."""

from collections.abc import Sequence
from typing import Any

from hotswap.core.interfaces.kv_transfer import (
    NOTHING_KEPT,
    Attachment,
    Kept,
    KVTransfer,
    TransferLayout,
    TransferWorker,
)
from hotswap.core.interfaces.kvcache import Grant
from hotswap.core.request import Request


class NoTransfer(KVTransfer):
    """Pages stay where they are computed. The default. It offers nothing, so that core never asks it."""

    def worker(self) -> TransferWorker:
        raise NotImplementedError("there is nothing to move")

    def configure(self, layout: TransferLayout) -> Any:
        return None

    def lookup(self, request: Request, tokens: Sequence[int], cached: int, limit: int, tail: int = 0) -> int:
        return 0

    def attach(
        self, request: Request, tokens: Sequence[int], table: Grant, cached: int, upto: int,
    ) -> Attachment:
        return Attachment(None)

    def finished(self, request: Request, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        return NOTHING_KEPT

    def forget(self, request: Request) -> None:
        pass

    def undo(self, entry: Any) -> None:
        pass

    def message(self, step_id: int) -> Any:
        return None

    @property
    def pending(self) -> bool:
        return False

    def ended(self, name: str, tokens: int | None) -> None:
        pass
