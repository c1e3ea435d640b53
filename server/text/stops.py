"""Finding stop strings in a text that arrives in pieces (Aho and Corasick, 1975)."""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """One automaton over all stop strings of a request: each character costs the same, however many there are.

    The match that ends first wins, and of two that end together the longer, so that the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Node 0 is the empty string; each node stands for a prefix of some stop string.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            if stop:
                self._insert(stop)
        self._link()
        self._node = 0

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._fail.append(0)
                self._match.append(None)
            node = child
        self._match[node] = stop

    def _link(self) -> None:
        """Point each node to its longest proper suffix in the automaton, shallow nodes first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(character, 0)

    @property
    def open(self) -> int:
        """How many of the last characters could still become a stop string."""
        return self._depth[self._node]

    def feed(self, text: str, enabled: bool = True) -> tuple[int, str] | None:
        """Read ``text``; returns the index in it just behind the first stop string that is complete, and that string.

        Without ``enabled`` complete stop strings are passed over; one that has begun may still be completed later.
        """
        node = self._node
        for index, character in enumerate(text):
            node = self._step(node, character)
            stop = self._match[node]
            if stop is not None and enabled:
                self._node = node
                return index + 1, stop
        self._node = node
        return None
