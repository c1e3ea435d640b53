"""What the host tier has under way, and what it keeps for suspended requests."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from hotswap.core.interfaces.kvcache import Grant
from hotswap.plugins.kv_transfer.slots import Slot
from hotswap.plugins.kvcache.chain import Node


@dataclass(eq=False)
class Record:
    """What was saved of a suspended request: the slot of each logical page, from the first live one of each group on.
    Pins each once. ``nodes``: what full pages can be published for. ``computed`` is None before the verdict has told
    it; ``saved``: the copies have ended; ``shared`` becomes False when nothing may be published any more."""

    request: str
    first: dict[str, int]
    slots: dict[int, Slot] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    computed: int | None = None
    saved: bool = False
    shared: bool = True

    @property
    def ready(self) -> bool:
        return self.saved and self.computed is not None


@dataclass(eq=False)
class Work:
    """A transfer under way. Pins ``slots`` once each. ``fills``: for which groups it writes them, empty where it reads;
    ``nodes``: what they are published for, by slot. ``record``: it writes for a suspended request."""

    slots: list[Slot] = field(default_factory=list)
    fills: dict[int, frozenset[str]] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    record: Record | None = None


class Moves:
    """``by_group``: page ids, and the slots that belong to them."""

    def __init__(self) -> None:
        self.by_group: dict[str, tuple[list[int], list[int]]] = {}
        self.pages: Counter[str] = Counter()

    def add(self, table: Grant, groups: Collection[str], page: int, slot: Slot) -> None:
        for group in groups:
            change = table.groups[group]
            pages, slots = self.by_group.setdefault(group, ([], []))
            pages.append(change.pages[page - change.first_live])
            slots.append(slot.number)
            self.pages[group] += 1
