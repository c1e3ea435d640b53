"""The host half of every transfer between engines: who keeps which pages for whom, and for how long."""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.kv_transfer import (
    HANDOFF,
    NOTHING_KEPT,
    REUSE,
    Attachment,
    Kept,
    KVTransfer,
    TransferLayout,
)
from hotswap.core.interfaces.kvcache import Grant
from hotswap.core.interfaces.page_keys import key_digest, pack
from hotswap.core.request import FinishReason, Request
from hotswap.plugins.kv_transfer.remembered import Remembered

logger = logging.getLogger(__name__)

FOLDER, UNFINISHED, LOCK = "hotswap-kv-", "hotswap-new-", "lock"
COUNTERS = ("kept", "read", "expired", "fetched", "failed", "refused", "shunned", "fetched_tokens")

FAILURES, SHUN_S = 3, 30.0
"""After so many reads from an engine have failed in a row, none is tried for so long: each may have taken its whole
timeout. Then one is, and the next failure counts at once."""

SECRET = secrets.token_bytes(32)
"""Of this process: its engines prove to one another that they are of one server. Worker halves get it with the terms,
over their own channel."""


@dataclass
class _Troubles:
    """Of reading from an engine. ``failures``: in a row. ``shunned_until``: no read is tried before."""

    failures: int = 0
    shunned_until: float = 0.0


@dataclass(frozen=True)
class Ticket:
    """What a request carries to the next engine: where its pages are, and what they hold.

    ``first``: per group the first logical page that is kept. ``digest``: of the cache key and the tokens.
    """

    wire: str
    folder: str
    engine: str
    ranks: int
    key: str
    tokens: int
    digest: str
    first: dict[str, int]


@dataclass(frozen=True)
class _Carried:
    """What a request brings along: a ticket, or a ``problem`` with what should have been one."""

    ticket: Ticket | None
    problem: str | None = None


class PeerOptions(ComponentOptions):
    hold_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long pages are kept for an engine that does not read them."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """How long a read may stand still before it has failed."""


class PeerTransfer(KVTransfer):
    """Common to transfers between engines. ``wire`` names the way in which bytes travel; both ends must have the same.

    The pages of a request that is handed over stay behind a fence until every rank of the next engine has read them, or
    ``hold_s`` seconds have passed. The next engine reads what its own cache does not have; where that fails, it keeps
    what it had and computes the rest.
    """

    Options = PeerOptions
    options: PeerOptions
    wire: str

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self.folder: Path | None = None
        self._engine = secrets.token_hex(8)
        self._keeping: dict[str, tuple[str, float]] = {}  # transfer -> key, deadline
        self._fetching: dict[str, tuple[str, int]] = {}  # transfer -> engine, tokens
        self._troubles: Remembered[str, _Troubles] = Remembered()  # by engine
        self._carried: dict[str, _Carried | None] = {}  # by request that was looked up; None: its ticket was used
        self._work: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._names = 0

    def describe(self) -> Description:
        why = "it reads the pages of requests that are handed over"
        return Description(frozenset({REUSE, HANDOFF}), (Requirement("kvcache", "tables", why),))

    @abstractmethod
    def address(self) -> dict[str, Any]:
        """What worker halves must know beyond the common terms; plain values."""

    def configure(self, layout: TransferLayout) -> Any:
        self._now, self._ranks = layout.now, layout.ranks
        self._page_size = {group: share.page_size for group, share in layout.plan.groups.items()}
        self._windows = {spec.group: spec.window for spec in layout.specs if spec.window is not None}
        self.folder, self._lock = make_folder(self.place())
        return {
            "folder": str(self.folder), "engine": self._engine, "ranks": layout.ranks, "model": layout.model,
            "secret": SECRET.hex(), "timeout_s": self.options.timeout_s, **self.address()}

    def place(self) -> Path:
        """Where the folder with the ranks' cards is made."""
        return Path(tempfile.gettempdir())

    def settled(self, key: str) -> None:
        """No rank keeps anything under ``key`` any more."""

    def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    # ------------------------------------------------------------------ what others have kept

    def lookup(self, request: Request, tokens: Sequence[int], cached: int, limit: int, tail: int = 0) -> int:
        carried = self._carried_by(request, tokens)
        if carried is None or not self._is_readable(carried):
            return 0
        ticket = carried.ticket
        assert ticket is not None
        upto = min(ticket.tokens, limit)
        if tail:
            size = max(self._page_size.values())
            upto = max(0, upto - tail) // size * size
        reaches = all(ticket.first.get(group, 0) <= self._first_page(group, upto) for group in self._page_size)
        return upto if reaches else 0

    def attach(self, request: Request, tokens: Sequence[int], table: Grant, cached: int, upto: int) -> Attachment:
        carried = self._carried_by(request, tokens)
        if carried is None:
            return Attachment(None)
        self._carried[request.id] = None
        name, ticket = None, carried.ticket
        if ticket is None:
            work, counted = None, "refused"
            logger.error("the pages of request %s are not read: %s", request.id, carried.problem)
        elif upto > cached:
            name, counted = self._name("in"), ""
            self._fetching[name] = ticket.engine, upto - cached
            pages = self._to_fill(ticket, table, cached, upto)
            work = {"fetch": name, "ticket": _plain(ticket), "cached": cached, "pages": pages}
        else:
            work, counted = {"release": _plain(ticket)}, "shunned" if self._is_shunned(ticket.engine) else ""
        if work is not None:
            self._work.append(work)
        if counted:
            self._counts[counted] += 1
        return Attachment((request.id, carried, name, work, counted), name)

    def undo(self, entry: Any) -> None:
        request_id, carried, name, work, counted = entry
        self._work = [item for item in self._work if item is not work]
        self._fetching.pop(name, None)
        self._carried[request_id] = carried
        if counted:
            self._counts[counted] -= 1

    def _to_fill(self, ticket: Ticket, table: Grant, cached: int, upto: int) -> dict[str, Any]:
        """Per group the first logical page and the ids of those that are to be read."""
        pages = {}
        for group, change in table.groups.items():
            size = self._page_size[group]
            first = max(change.first_live, cached // size, ticket.first.get(group, 0))
            last = -(-upto // size)
            pages[group] = [first, list(change.pages[first - change.first_live : last - change.first_live])]
        return pages

    def _carried_by(self, request: Request, tokens: Sequence[int]) -> _Carried | None:
        """What a request brings along and has not used yet. It is looked at once: tokens take time to digest."""
        pages = request.continued.pages if request.continued is not None else None
        if pages is None:
            return None
        if request.id not in self._carried:
            self._carried[request.id] = self._check(pages, request, tokens)
        return self._carried[request.id]

    def _check(self, pages: Any, request: Request, tokens: Sequence[int]) -> _Carried:
        ticket = _ticket(pages)
        if ticket is None:
            return _Carried(None, "it has no ticket of a transfer between engines")
        if ticket.wire != self.wire:
            return _Carried(None, f"it was written for {ticket.wire!r}, and this engine reads {self.wire!r}")
        if _digest(request, tokens[: ticket.tokens]) != ticket.digest:
            return _Carried(None, "its tokens, model or cache key are others")
        if ticket.first.keys() != self._page_size.keys():
            return _Carried(None, f"it has the cache groups {sorted(ticket.first)}, and this engine "
                                  f"{sorted(self._page_size)}")
        return _Carried(ticket)

    def _is_readable(self, carried: _Carried) -> bool:
        """One that has come back is not: what it needs is in this cache, or computed soon."""
        ticket = carried.ticket
        return ticket is not None and ticket.engine != self._engine and not self._is_shunned(ticket.engine)

    def _is_shunned(self, engine: str) -> bool:
        troubles = self._troubles.get(engine)
        return troubles is not None and self._now() < troubles.shunned_until

    def _first_page(self, group: str, position: int) -> int:
        """The first logical page that a query behind ``position`` tokens sees."""
        window = self._windows.get(group)
        return 0 if window is None else max(0, position - window + 1) // self._page_size[group]

    # ------------------------------------------------------------------ what is kept for others

    def finished(self, request: Request, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        if reason != FinishReason.HANDOFF:
            return NOTHING_KEPT
        name, key = self._name("out"), secrets.token_hex(16)
        self._keeping[name] = key, self._now() + self.options.hold_s
        self._counts["kept"] += 1
        groups = {group: [change.first_live, list(change.pages)] for group, change in table.groups.items()}
        self._work.append({"keep": name, "key": key, "pages": groups})
        first = {group: change.first_live for group, change in table.groups.items()}
        return Kept(name, _plain(Ticket(
            self.wire, str(self.folder), self._engine, self._ranks, key, len(tokens), _digest(request, tokens), first)))

    def forget(self, request: Request) -> None:
        pages = request.continued.pages if request.continued is not None else None
        carried = self._carried.pop(request.id, _Carried(_ticket(pages)))
        if carried is not None and carried.ticket is not None:  # it was never read
            self._work.append({"release": _plain(carried.ticket)})

    def message(self, step_id: int) -> Any:
        now = self._now()
        for name, (key, deadline) in self._keeping.items():
            if now > deadline:
                self._work.append({"expire": key})
                self._keeping[name] = key, float("inf")
                logger.warning("the pages of a request that was handed over were not read within %g s",
                               self.options.hold_s)
        work, self._work = self._work, []
        return work or None

    @property
    def pending(self) -> bool:
        return bool(self._work or self._keeping or self._fetching)

    def ended(self, name: str, tokens: int | None) -> None:
        if name in self._keeping:
            self.settled(self._keeping.pop(name)[0])
            self._counts["read" if tokens is None else "expired"] += 1
            return
        engine, count = self._fetching.pop(name)
        if tokens is None:
            self._counts["fetched"] += 1
            self._counts["fetched_tokens"] += count
            self._troubles.pop(engine, None)
            return
        self._counts["failed"] += 1
        troubles = self._troubles.setdefault(engine, _Troubles())
        troubles.failures += 1
        if troubles.failures >= FAILURES:
            troubles.shunned_until = self._now() + SHUN_S
            logger.error("%d reads from engine %s have failed in a row; none is tried for %g s",
                         troubles.failures, engine, SHUN_S)

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def leaks(self) -> Mapping[str, int]:
        held = {"kept": len(self._keeping), "fetching": len(self._fetching), "tickets": len(self._carried)}
        return {name: count for name, count in held.items() if count}

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{self.wire}-{what}-{self._names}"


def make_folder(place: Path) -> tuple[Path, IO[str]]:
    """A folder of mode 0700 and the lock that says that its owner lives. Those of owners that do not are removed: a
    process that was killed could not, be it while it made one."""
    for old in [*place.glob(f"{FOLDER}*"), *place.glob(f"{UNFINISHED}*")]:
        with contextlib.suppress(OSError):  # it has just gone, or its owner lives
            found = old.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():  # nobody else can have put anything there
                _remove_if_left(old)
    while True:
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=place))
        with contextlib.suppress(FileNotFoundError):  # somebody took it for one that was left
            return _claim(made)


def _claim(made: Path) -> tuple[Path, IO[str]]:
    lock = (made / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return made.rename(made.with_name(made.name.replace(UNFINISHED, FOLDER))), lock
    except FileNotFoundError:
        lock.close()
        raise


def _remove_if_left(folder: Path) -> None:
    """BlockingIOError where its owner lives."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        folder.rmdir()  # nothing has been put there
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(handle)


def _digest(request: Request, tokens: Sequence[int]) -> str:
    return sha256(key_digest(request.cache_key) + pack(tokens)).hexdigest()


def _ticket(pages: Any) -> Ticket | None:
    """Of what a request carries; None where that is something else."""
    try:
        return Ticket(**pages)
    except TypeError:
        return None


def _plain(ticket: Ticket) -> dict[str, Any]:
    return dict(vars(ticket))
