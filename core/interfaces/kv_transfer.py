"""Moving pages between an engine's cache and somewhere else: host memory, a disk, another engine. ``kv_transfer/1``.

One component, two halves. The *host half* is the component itself: it lives on the loop's thread beside the KV manager,
knows what lies elsewhere, and decides. The *worker half*, which it makes where a worker runs (perhaps in another
process, there from its options alone), moves bytes. They are joined by an opaque message a step, made of plain values,
and by the list of transfers that have ended, which comes back in the verdict.

Three uses:

- *Reuse.* ``lookup`` says how much of a request's tokens lies elsewhere; core reserves pages for them and ``attach``
  fills them. ``finished`` is where they come from: the pages of a request that has ended.
- *Swap.* ``save`` keeps the pages of a request that is being suspended. It may be in flight, so that the host does not
  know its true length: the pages are saved on the worker behind what is in flight, the verdict tells the length, and
  ``suspended`` hands it on. The request comes back as any other does that finds its tokens elsewhere.
- *Disaggregation.* ``finished`` on the engine that computed a prompt keeps the pages behind a fence until a peer has
  read them; on the peer ``lookup`` finds them by what the request carries, and ``attach`` reads them.

Pages are named by their ids, which are valid on every rank; each rank moves its own layers and heads of them.

A transfer has a name, unique for the engine's life: it is a fence. Core counts the ranks that have reported it and
passes the fence, and then calls ``ended``, when all have. Until then nobody gets the pages it reads or writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec, Grant
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.interfaces.scheduler import Answer, SuspendMode
from hotswap.core.request import Request

if TYPE_CHECKING:
    import torch

REUSE, SWAP, HANDOFF = "reuse", "swap", "handoff"
"""What a transfer may offer: core calls ``lookup``, ``attach`` and ``finished`` only with the first, ``save`` and
``suspended`` only with the second, which needs the first. With the third, too, ``finished`` keeps the pages of a
request that ends with the reason ``handoff``, and ``lookup`` finds them at the next engine by ``Request.continued``."""


@dataclass(frozen=True)
class TransferLayout:
    """What the host half is told once. ``specs`` are those of one rank; ``ranks`` is how many worker halves there are;
    ``now`` gives seconds by the engine's clock; ``model`` is the checkpoint's revision."""

    specs: tuple[CacheSpec, ...]
    plan: CachePlan
    ranks: int
    now: Callable[[], float]
    model: str = ""


class Attachment(NamedTuple):
    """``entry`` undoes it. ``fence``: the transfer that fills the pages; core plans no row of the request before it has
    ended. None: the worker half fills them in this very step before its rows, and cannot fail."""

    entry: Any
    fence: str | None = None


class Saving(NamedTuple):
    """``entry`` undoes it. ``fence``: the transfer that reads the pages; None: it is over when the step is."""

    entry: Any
    fence: str | None = None


class Kept(NamedTuple):
    """``fence``: the transfer that reads the pages, None where nothing does. ``handle``: what goes to the client in the
    request's last output, such as where a peer finds the pages; a plain value."""

    fence: str | None = None
    handle: Any = None


NOTHING_KEPT = Kept()


class KVTransfer(Component):
    """The host half. Called from the loop's thread only. Offers some of "reuse" and "swap".

    A table is given as a :class:`Grant` from nothing: per group, logical pages ``first_live ..`` and their ids.
    Everything that happens inside a plan (``attach``, ``save``) can be undone, last in, first out.
    """

    kind: ClassVar[str] = "kv_transfer"
    contract: ClassVar[str] = "kv_transfer/1"

    @abstractmethod
    def worker(self) -> "TransferWorker":
        """A worker half. Called where a worker is built, on a component that has its options and nothing else:
        ``configure`` was called in the engine's process, which may be another."""

    @abstractmethod
    def configure(self, layout: TransferLayout) -> Any:
        """Called once, when pages have been divided. Returns what every worker half is told in ``register``: a plain
        value. ConfigError for what cannot work."""

    @abstractmethod
    def lookup(
        self, request: Request, tokens: Sequence[int], cached: int, limit: int, tail: int = 0,
    ) -> int | Answer:
        """How many of ``tokens``, at most ``limit``, a request would have if ``attach`` brought all beyond the first
        ``cached``, which lie in the cache already: a number greater than ``cached``, else anything not greater. LATER:
        what it waits for is on its way. No side effect; asked for whenever the request is looked at.

        ``tail`` tokens at the end must be recomputed, as in ``KVCacheManager.match``. The number need not end at a
        page, but what lies elsewhere must reach back over the window of a query behind it, in every group that has one.
        Tokens are compared, whatever the keys say, and every field of ``request.cache_key`` counts.
        """

    @abstractmethod
    def attach(
        self, request: Request, tokens: Sequence[int], table: Grant, cached: int, upto: int,
    ) -> Attachment:
        """The request starts: fill the pages of ``table`` that hold ``tokens[cached:upto]``; ``upto`` is the last
        ``lookup``'s answer, or ``cached`` where there is nothing to bring. ``cached`` ends at a page. The pages belong
        to the request alone until the transfer has ended. Journaled: what was kept for the request may be wanted again.
        """

    def save(
        self, request: Request, tokens: Sequence[int], table: Grant, bound: int, mode: SuspendMode,
    ) -> Saving | None:
        """The request is being suspended (SWAP or AUTO): save what it has computed, at most ``bound`` tokens once all
        in flight is done; ``tokens`` are those that the host knows. None: there is no room, or, with AUTO, computing
        them again is cheaper; it is then suspended by recomputation. Journaled. Only where "swap" is offered."""
        raise NotImplementedError(f"{type(self).__name__} does not offer swap")

    def suspended(self, request: Request, tokens: Sequence[int], computed: int) -> None:
        """The verdict on a suspension with ``save``: the first ``computed`` of ``tokens`` lay in the pages."""

    @abstractmethod
    def finished(self, request: Request, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        """A running request has ended for ``reason`` and gives up its pages, in which all of ``tokens`` are computed
        and sure. Start to read the pages, or do not. Never inside a plan."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """The request has ended: nobody will ask for what was saved for it alone, or read what it carries. Comes for
        every request."""

    @abstractmethod
    def undo(self, entry: Any) -> None:
        """Take back an ``attach`` or a ``save``; last in, first out."""

    @abstractmethod
    def message(self, step_id: int) -> Any:
        """What the worker halves must do in this step, which will be submitted: a plain value, None for nothing. Called
        once a plan that has succeeded."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether a transfer has not ended, or a message waits. While it is true and nothing else happens, core submits
        empty steps, to hear of it."""

    @abstractmethod
    def ended(self, name: str, tokens: int | None) -> None:
        """A transfer has ended on every rank; see :class:`EndedTransfer`, ``tokens`` is the least of the ranks'. What
        it saved may be found from now on; core has not passed the fence yet."""

    def reset(self) -> int:
        """Forget what others might reuse, but not what was saved for a request. Returns the number of pages dropped."""
        return 0

    def counters(self) -> Mapping[str, int]:
        """Totals since the start, by name: what metrics show."""
        return {}

    def check(self) -> None:
        """Verify every invariant; raises KVInvariantError. Slow: for tests and doctors."""

    def close(self) -> None:
        """The engine has ended, its worker halves before it: give back what ``configure`` took."""

    def leaks(self) -> Mapping[str, int]:
        """What is still held by name though no request lives and no transfer runs; empty when all is well."""
        return {}


@dataclass(frozen=True)
class AxisShard:
    """Indices ``start <= i < start + count`` of an axis with ``total``. Ranks may hold the same part (replicated
    heads)."""

    start: int
    count: int
    total: int


@dataclass(frozen=True)
class LayerPages:
    """``tensors``: (keys, values) of one layer, ``layer`` counted over the whole model; the first dimension of each
    counts pages."""

    layer: int
    tensors: "tuple[torch.Tensor, ...]"


@dataclass(frozen=True)
class GroupPages:
    """One cache group on this rank. ``axes`` names the tensors' dimensions, "page" first, then some order of "token",
    "kv_heads" and "head_dim": with ``kv_heads``, and the layers' numbers, a peer with another tensor or pipeline size
    finds the slice it needs. Bytes may be copied as they are where all of that agrees."""

    group: str
    page_size: int
    num_pages: int
    axes: tuple[str, ...]
    kv_heads: AxisShard
    layers: tuple[LayerPages, ...]

    @property
    def page_bytes(self) -> int:
        """Of one page: all layers of this rank, keys and values."""
        return sum(tensor[0].nbytes for layer in self.layers for tensor in layer.tensors)


@dataclass(frozen=True)
class CachePages:
    """A rank's cache, by group. ``device`` and ``dtype`` are torch's names."""

    groups: dict[str, GroupPages]
    device: str
    dtype: str


class TransferWorker(ABC):
    """The worker half: one a rank, called from the worker's thread. It reads and writes pages only between ``begin``
    and the report that a transfer has ended, and only those that the transfer names.

    Each transfer is reported once. Whatever goes wrong with one is reported, not raised: a step's requests have nothing
    to do with it. What fills pages within the step (:class:`Attachment`) is the exception: it raises, and the step
    fails.
    """

    layerwise: ClassVar[bool] = False
    """Whether ``before_layer`` and ``after_layer`` are to be called. Such a transfer excludes captured graphs."""

    @abstractmethod
    def register(self, cache: CachePages, terms: Any) -> None:
        """Once, before the first step. ``terms`` is what the host half's ``configure`` returned."""

    @abstractmethod
    def begin(self, message: Any) -> None:
        """A step that has a message: after its grants and their copies, before its rows. Behind every step before it,
        so that what those wrote can be read."""

    def before_layer(self, layer: int) -> None:  # noqa: B027
        """Attention of ``layer`` is about to read and write pages; what must be there must be there now."""

    def after_layer(self, layer: int) -> None:  # noqa: B027
        """Attention of ``layer`` has written its pages."""

    def end(self) -> None:  # noqa: B027
        """The step's rows have run."""

    @abstractmethod
    def report(self, wait_s: float) -> list[EndedTransfer]:
        """Transfers that have ended since the last report; called after each step's rows. ``wait_s`` > 0: the step was
        empty, so that it may wait so long for one to end."""

    def close(self) -> None:  # noqa: B027
        """The worker ends: end threads, close connections, give memory back. Also where ``register`` has failed, or was
        never called, since the start failed before it."""
