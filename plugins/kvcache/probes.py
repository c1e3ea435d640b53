"""What was found out about requests that wait, so that one that is probed in every plan costs little."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hotswap.core.interfaces.page_keys import TOKEN_BYTES, pack

T = TypeVar("T")

WAITING = 128
"""Requests that wait of which something is kept, at least: orders by cached prefix ask for many in every plan."""


class Probes(Generic[T]):
    """At most ``size`` things, each made of a list of tokens, the least recently asked for going first.

    A list is recognised by identity; since it may have changed, whoever asks says whether the thing still ``fits``.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: OrderedDict[int, tuple[Sequence[int], T]] = OrderedDict()

    def get(self, tokens: Sequence[int], fits: Callable[[T], bool], make: Callable[[], T]) -> T:
        known = self._made.get(id(tokens))
        if known is not None and known[0] is tokens and fits(known[1]):
            self._made.move_to_end(id(tokens))
            return known[1]
        made = make()
        self._made[id(tokens)] = tokens, made  # holding the list keeps its id from being used again
        self._made.move_to_end(id(tokens))
        if len(self._made) > self._size:
            self._made.popitem(last=False)
        return made

    def clear(self) -> None:
        self._made.clear()


class Packed:
    """Tokens, which must not change, and their packed pages, as far as anybody has asked."""

    __slots__ = ("_bytes", "_hints", "_page_size", "tokens")

    def __init__(self, tokens: list[int], page_size: int) -> None:
        self.tokens, self._page_size = tokens, page_size
        self._bytes = b""
        self._hints: list[int] = []

    def pages(self, begin: int, end: int) -> bytes:
        size = self._page_size
        if end * size * TOKEN_BYTES > len(self._bytes):
            self._bytes += pack(self.tokens[len(self._bytes) // TOKEN_BYTES:end * size])
        return self._bytes[begin * size * TOKEN_BYTES:end * size * TOKEN_BYTES]

    def hint(self, page: int) -> int:
        """Of a full page and all before it: the same where the tokens are, in this process, and hardly ever else."""
        hints, size = self._hints, self._page_size
        if page >= len(hints):
            upto = min(len(self.tokens) // size, 2 * page + 1)
            self.pages(0, upto)  # packs them at once
            previous = hints[-1] if hints else 0
            for index in range(len(hints), upto):
                previous = hash((previous, self.pages(index, index + 1)))
                hints.append(previous)
        return hints[page]
