"""The host tier's storage as the host sees it: slots of one page each, found by the keys of their pages.

A slot is *pinned* while a transfer writes or reads it or a suspended request needs it; *idle* when it is published and
not pinned, and then the least recently used is evicted first; else *empty*. What is evicted leaves the index before
anybody else gets the slot.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping

from hotswap.core.errors import KVInvariantError
from hotswap.plugins.kvcache.chain import Chain, Node


class Slot:
    """Room for one logical page in every cache group; ``groups`` are those whose page it holds. ``node``: what it is
    published for, None where it is not."""

    __slots__ = ("groups", "node", "number", "pins")

    def __init__(self, number: int) -> None:
        self.number, self.pins = number, 0
        self.node: Node | None = None
        self.groups: frozenset[str] = frozenset()


class SlotStore:
    """``total`` slots. Every operation costs the same however many there are."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.evictions = 0
        self._opened = 0  # an untouched store of a million slots costs nothing
        self._empty: list[Slot] = []
        self._published: dict[bytes, Slot] = {}
        self._idle: OrderedDict[int, Slot] = OrderedDict()

    def find(self, chain: Chain, page: int, groups: Collection[str]) -> Slot | None:
        """The slot with logical page ``page`` of ``chain`` in all of ``groups``. Compares the tokens from the first."""
        slot = self._published.get(chain.nodes[page + 1].digest)
        if slot is None or not slot.groups.issuperset(groups):
            return None
        assert slot.node is not None
        return slot if chain.unify(page, slot.node) else None

    def take(self) -> Slot | None:
        """A slot with nothing in it, pinned once; evicts where none is empty. None: all are pinned."""
        if self._empty:
            slot = self._empty.pop()
        elif self._opened < self.total:
            slot, self._opened = Slot(self._opened), self._opened + 1
        elif self._idle:
            _, slot = self._idle.popitem(last=False)
            self.evictions += 1
            self._withdraw(slot)
        else:
            return None
        slot.pins, slot.groups = 1, frozenset()
        return slot

    def pin(self, slot: Slot) -> None:
        if not slot.pins:
            del self._idle[slot.number]
        slot.pins += 1

    def unpin(self, slots: Collection[Slot]) -> None:
        """Give up pins, last page first, so that what hangs on others is evicted before them."""
        for slot in reversed(list(slots)):
            slot.pins -= 1
            if slot.pins < 0:
                raise KVInvariantError(f"slot {slot.number} of the host tier is given up once too often")
            if not slot.pins:
                self._rest(slot)

    def publish(self, slot: Slot, node: Node) -> None:
        """A pinned slot whose copies have ended can be found from now on, unless another has as much under that key."""
        standing = self._published.get(node.digest)
        if standing is slot or standing is not None and standing.groups.issuperset(slot.groups):
            return
        if standing is not None:
            self.retract(standing)
        self._published[node.digest], slot.node = slot, node

    def retract(self, slot: Slot) -> None:
        """It cannot be found any more; once nobody needs it, it is empty."""
        if slot.node is None:
            return
        self._withdraw(slot)
        if not slot.pins:
            del self._idle[slot.number]
            self._rest(slot)

    def reset(self) -> int:
        """Nothing can be found any more. Returns how many slots that nobody needs were dropped."""
        before = len(self._idle)
        for slot in list(self._published.values()):
            self.retract(slot)
        return before

    @property
    def in_use(self) -> int:
        """Pinned slots."""
        return self._opened - len(self._empty) - len(self._idle)

    def check(self, pins: Mapping[int, int]) -> None:
        """``pins``: how often slots should be pinned, by number; only those that are."""
        resting = {slot.number for slot in (*self._empty, *self._idle.values())}
        if len(resting) != len(self._empty) + len(self._idle):
            raise KVInvariantError("a slot of the host tier is idle or empty twice")
        if wrong := sorted(resting & pins.keys()):
            raise KVInvariantError(f"slots {wrong} of the host tier are needed, and yet idle or empty")
        if len(resting) + len(pins) != self._opened:
            raise KVInvariantError(
                f"of {self._opened} slots of the host tier {len(resting)} rest and {len(pins)} are needed")
        for digest, slot in self._published.items():
            if slot.node is None or slot.node.digest != digest or not slot.groups:
                raise KVInvariantError(f"slot {slot.number} of the host tier is published for what it does not hold")
            if slot.pins != pins.get(slot.number, 0) or (not slot.pins) != (slot.number in self._idle):
                raise KVInvariantError(
                    f"slot {slot.number} of the host tier has {slot.pins} pins, {pins.get(slot.number, 0)} are needed")

    def _rest(self, slot: Slot) -> None:
        if slot.node is not None:
            self._idle[slot.number] = slot
        else:
            self._empty.append(slot)

    def _withdraw(self, slot: Slot) -> None:
        assert slot.node is not None
        del self._published[slot.node.digest]
        slot.node = None
