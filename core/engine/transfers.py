"""The engine's KV transfer, or none: who waits for which transfer, and how many ranks have reported it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotswap.core.blame import blame
from hotswap.core.engine.pool import RequestState
from hotswap.core.interfaces.kv_transfer import NOTHING_KEPT, REUSE, SWAP, Attachment, Kept, KVTransfer, Saving
from hotswap.core.interfaces.kvcache import Grant, KVCacheManager, Match
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.interfaces.scheduler import Answer, SuspendMode
from hotswap.core.request import FinishReason

logger = logging.getLogger(__name__)


class Transfers:
    """What context and loop ask of a KV transfer. Without one every answer is "nothing"."""

    def __init__(self, component: KVTransfer | None = None, ranks: int = 1) -> None:
        offers = component.describe().offers if component is not None else frozenset()
        self.component, self._ranks = component, ranks
        self.reuses, self.swaps = REUSE in offers, SWAP in offers
        self._brings = self.reuses or self.swaps
        self.filling: dict[str, RequestState] = {}
        """By transfer: the request whose pages it fills, and which cannot step before it has ended."""
        self._reports: dict[str, list[int | None]] = {}

    @property
    def pending(self) -> bool:
        return self.component is not None and self.component.pending

    def extend(self, state: RequestState, match: Match, limit: int, tail: int) -> Match | None:
        """``match`` with what lies elsewhere as pending tokens; None: that is on its way."""
        if not self._brings:
            return match
        assert self.component is not None
        found = self.component.lookup(state.request, state.tokens, match.cached, limit, tail)
        if isinstance(found, Answer):
            return None
        return match._replace(pending=found - match.cached) if found > match.cached else match

    def attach(self, state: RequestState, grant: Grant, match: Match) -> Attachment | None:
        """The request starts in the pages of ``grant``. None: nobody has to be told."""
        if not self._brings:
            return None
        assert self.component is not None
        attachment = self.component.attach(
            state.request, state.tokens, grant, match.cached, match.cached + match.pending)
        if attachment.fence is not None:
            self.filling[attachment.fence], state.filling = state, attachment.fence
        return attachment

    def detach(self, state: RequestState) -> str | None:
        """The request does not wait for its pages any more; returns the transfer that still writes them."""
        fence, state.filling = state.filling, None
        if fence is not None:
            del self.filling[fence]
        return fence

    def reattach(self, state: RequestState, fence: str | None) -> None:
        """Undo a :meth:`detach`."""
        state.filling = fence
        if fence is not None:
            self.filling[fence] = state

    def save(self, state: RequestState, kv: KVCacheManager, mode: SuspendMode) -> Saving | None:
        """Have the pages of a request saved that is being suspended; None: it will be computed again."""
        # Whose prompt logprobs are asked computes its whole prompt, and whose pages are on their way has computed none.
        if mode is SuspendMode.RECOMPUTE or not self.swaps or state.filling or state.prompt_logprobs is not None:
            return None
        assert self.component is not None
        return self.component.save(state.request, state.tokens, kv.table(state.id), state.computed, mode)

    def suspended(self, state: RequestState, computed: Mapping[str, int]) -> None:
        if self.component is not None:
            self.component.suspended(state.request, state.tokens, min(computed.values()))

    def finished(self, state: RequestState, kv: KVCacheManager, reason: FinishReason) -> Kept:
        """A running request gives up its pages. Of one that failed nothing is kept."""
        if not self.reuses or state.filling or not state.verified or reason is FinishReason.ERROR:
            return NOTHING_KEPT
        assert self.component is not None
        try:
            return self.component.finished(
                state.request, state.tokens[: state.verified], kv.table(state.id), reason.value)
        except Exception as error:  # its pages must come back all the same
            logger.exception("%s; nothing of request %s is kept", blame(error, self.component, "finished"), state.id)
            return NOTHING_KEPT

    def forget(self, state: RequestState) -> None:
        if self.component is None:
            return
        try:
            self.component.forget(state.request)
        except Exception as error:
            logger.exception("%s of request %s", blame(error, self.component, "forget"), state.id)

    def undo(self, entry: Any) -> None:
        if entry is not None and self.component is not None:
            self.component.undo(entry)

    def message(self, step_id: int) -> Any:
        return self.component.message(step_id) if self.component is not None else None

    def ended(self, reports: Sequence[EndedTransfer]) -> Iterator[EndedTransfer]:
        """Those that every rank has reported by now; of tokens that came, the fewest count."""
        for name, tokens in reports:
            told = self._reports.setdefault(name, [])
            told.append(tokens)
            if len(told) < self._ranks:
                continue
            counts = [count for count in self._reports.pop(name) if count is not None]
            ended = EndedTransfer(name, min(counts) if counts else None)
            if self.component is not None:
                self.component.ended(*ended)
            yield ended

    def reset(self) -> int:
        return self.component.reset() if self.component is not None else 0

    def close(self) -> None:
        if self.component is not None:
            self.component.close()

    def counters(self) -> Mapping[str, int]:
        return self.component.counters() if self.component is not None else {}
