"""The worker half of every transfer between engines: keeps pages for others, and reads those of others into its own."""

import contextlib
import logging
import os
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from hotswap.core.interfaces.kv_transfer import CachePages, TransferWorker
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.plugins.kv_transfer.peer import Ticket
from hotswap.plugins.kv_transfer.rank_card import RankCard, Read, card_from, plan_reads
from hotswap.plugins.kv_transfer.remembered import Remembered

logger = logging.getLogger(__name__)

READERS = 2
"""Requests whose pages are read at a time."""


class Span(NamedTuple):
    """Logical pages of one group, from ``first`` on, and the page ids that belong to them."""

    first: int
    ids: tuple[int, ...]


class PeerWorker(TransferWorker):
    """A rank is found by its card, a file in its engine's folder. What a reader cannot have, for whatever reason, is
    reported as a transfer that failed; the keeper hears that a reader is done in either case."""

    def __init__(self) -> None:
        self._closing = contextlib.ExitStack()

    def register(self, cache: CachePages, terms: Any) -> None:
        self.cache, self.rank = cache, secrets.token_hex(4)
        self.folder, self.readers = Path(terms["folder"]), int(terms["ranks"])
        self.secret, self.timeout_s = bytes.fromhex(terms["secret"]), float(terms["timeout_s"])
        self._ended: SimpleQueue[EndedTransfer] = SimpleQueue()
        self._known: Remembered[str, list[RankCard]] = Remembered()  # by engine
        self._pool = ThreadPoolExecutor(READERS, "hotswap-kv")
        address = self.open(terms)
        file = self.folder / f"{self.rank}.card"
        self._closing.callback(file.unlink, missing_ok=True)
        self._closing.callback(self.shut)
        self._closing.callback(self._pool.shutdown, wait=False, cancel_futures=True)
        self.card = RankCard.of(cache, terms["engine"], self.rank, terms["model"], address)
        write_private(file, self.card.text())

    def begin(self, message: Any) -> None:
        if self.cache.device.startswith("cuda"):  # what is kept must have been written, and by another stream
            torch.cuda.current_stream(self.cache.device).synchronize()
        for work in message:
            if "keep" in work:
                spans = {group: Span(first, tuple(ids)) for group, (first, ids) in work["pages"].items()}
                self.keep(work["keep"], work["key"], spans)
            elif "fetch" in work:
                spans = {group: Span(first, tuple(ids)) for group, (first, ids) in work["pages"].items()}
                self._pool.submit(self._fetch, work["fetch"], Ticket(**work["ticket"]), work["cached"], spans)
            elif "release" in work:
                self._pool.submit(self._done, Ticket(**work["release"]), True)
            else:
                self.expire(work["expire"])

    def report(self, wait_s: float) -> list[EndedTransfer]:
        self.look()
        ended: list[EndedTransfer] = []
        with contextlib.suppress(Empty):
            if wait_s:
                ended.append(self._ended.get(timeout=wait_s))
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def close(self) -> None:
        """Ends as much as has begun: an engine that could not start was perhaps never registered."""
        self._closing.close()

    def told(self, name: str, tokens: int | None = None) -> None:
        """Report a transfer's end; from any thread."""
        self._ended.put(EndedTransfer(name, tokens))

    # what a way of moving bytes does

    @abstractmethod
    def open(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        """Get ready; returns the rank's address."""

    @abstractmethod
    def keep(self, name: str, key: str, spans: Mapping[str, Span]) -> None:
        """Keep pages for who knows ``key``. Reports ``name`` when every reader is done."""

    @abstractmethod
    def expire(self, key: str) -> None:
        """Nobody may read what is kept under ``key`` any more; reports its transfer with 0 tokens if it has not ended.
        Whoever reads at this time gets what was kept, or fails."""

    @abstractmethod
    def read(self, ticket: Ticket, peer: RankCard, wanted: Sequence[tuple[Read, Span]]) -> None:
        """Fill own pages (``Span.ids``) with the peer's of the same logical numbers. Raises whatever goes wrong."""

    @abstractmethod
    def done(self, ticket: Ticket, peers: Sequence[RankCard], all_readers: bool) -> None:
        """Tell the ``peers`` that this reader, or all of them, need no more of what the ticket is for. OSError for one
        that cannot be told: it finds out when the time has passed."""

    def look(self) -> None:
        """Called before each report."""

    @abstractmethod
    def shut(self) -> None:
        """End threads, give back what was opened."""

    # reading

    def _fetch(self, name: str, ticket: Ticket, cached: int, spans: Mapping[str, Span]) -> None:
        try:
            peers = self._peers(ticket)
            reads = [read for read in plan_reads(self.card, peers) if spans[read.group].ids]
            for peer in peers:
                wanted = [(read, spans[read.group]) for read in reads if read.rank == peer.rank]
                if wanted:
                    with torch.inference_mode():
                        self.read(ticket, peer, wanted)
            if self.cache.device.startswith("cuda"):
                torch.cuda.synchronize(self.cache.device)
        except Exception as error:
            logger.error("pages could not be read from engine %s, they are computed again: %s", ticket.engine, error)
            self.told(name, cached)
        else:
            self.told(name)
        finally:
            self._done(ticket, False)

    def _done(self, ticket: Ticket, all_readers: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.done(ticket, self._peers(ticket), all_readers)

    def _peers(self, ticket: Ticket) -> list[RankCard]:
        """The cards of every rank of the other engine. OSError, ValueError."""
        if ticket.engine not in self._known:
            cards = [card_from(path.read_text("utf-8")) for path in sorted(Path(ticket.folder).glob("*.card"))]
            if len(cards) != ticket.ranks:
                raise ValueError(f"{len(cards)} of {ticket.ranks} ranks of engine {ticket.engine} can be found")
            self._known[ticket.engine] = cards
        return self._known[ticket.engine]


def write_private(path: Path, text: str) -> None:
    """A file of mode 0600 that is whole as soon as it can be seen."""
    draft = path.with_name(f"{path.name}.draft")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
