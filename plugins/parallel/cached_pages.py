"""Which cached pages lie at which engine, from the events of their KV managers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.interfaces.page_keys import TOKEN_BYTES, key_digest, pack, page_digest
from hotswap.core.request import Request


class CachedPages:
    """Page digests by engine, cache group and page size. As large as the engines' caches have pages."""

    def __init__(self) -> None:
        self._held: defaultdict[int, dict[tuple[str, int], set[str]]] = defaultdict(dict)
        self._page_sizes: set[int] = set()

    def apply(self, engine: int, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if event.page_size:
                self._page_sizes.add(event.page_size)
            held = self._held[engine].setdefault((event.group, event.page_size), set())
            if event.kind == "stored":
                held.update(event.keys)
            elif event.kind == "evicted":
                held.difference_update(event.keys)
            else:
                held.clear()

    def count(self, engine: int) -> int:
        """Pages that ``engine`` has cached."""
        return sum(map(len, self._held[engine].values()))

    def digests(self, request: Request) -> dict[int, list[str]]:
        """Of the prompt's pages, for each page size that has been told of; from any thread."""
        return {page_size: prompt_digests(request, page_size) for page_size in tuple(self._page_sizes)}

    def reusable(self, request: Request, engines: Iterable[int], digests: dict[int, list[str]]) -> dict[int, int]:
        """Per engine: how many tokens of the prompt's beginning it has cached, in its fullest group. ``digests`` is
        completed where a page size has been told of since."""
        found = {}
        for engine in engines:
            found[engine] = 0
            for (_, page_size), held in self._held[engine].items():
                if not held or not page_size:
                    continue
                if page_size not in digests:
                    digests[page_size] = prompt_digests(request, page_size)
                pages = sum(1 for _ in takewhile(held.__contains__, digests[page_size]))
                found[engine] = max(found[engine], pages * page_size)
        return found

    def elsewhere(self, engine: int, group: tuple[str, int], keys: Sequence[str]) -> set[str]:
        """Those of ``keys`` that an engine other than ``engine`` has cached."""
        others = [held.get(group, set()) for other, held in self._held.items() if other != engine]
        return {key for key in keys if any(key in held for held in others)}

    def groups(self, engine: int) -> list[tuple[str, int]]:
        return list(self._held[engine])

    def of(self, engine: int, group: tuple[str, int]) -> set[str]:
        return self._held[engine].get(group, set())


def prompt_digests(request: Request, page_size: int) -> list[str]:
    """Of the prompt's full pages, as the KV managers index them."""
    digest, width = key_digest(request.cache_key), page_size * TOKEN_BYTES
    packed = pack(request.prompt_token_ids)
    found = []
    for begin in range(0, len(packed) - width + 1, width):
        digest = page_digest(digest, packed[begin:begin + width])
        found.append(digest.hex())
    return found


class Union:
    """Turns the events of several engines into those of one that has whatever any of them has."""

    def __init__(self) -> None:
        self._pages = CachedPages()

    def merge(self, engine: int, events: Sequence[CacheEvent]) -> list[CacheEvent]:
        merged = []
        for event in events:
            group = (event.group, event.page_size)
            keys = sorted(self._pages.of(engine, group)) if event.kind == "reset" else event.keys
            others = self._pages.elsewhere(engine, group, keys)
            self._pages.apply(engine, [event])
            changed = tuple(key for key in keys if key not in others)
            if changed:
                kind = "stored" if event.kind == "stored" else "evicted"
                merged.append(CacheEvent(kind, event.group, changed, event.page_size))
        return merged

    def lose(self, engine: int) -> list[CacheEvent]:
        """An engine has ended: what nobody else has is gone."""
        groups = self._pages.groups(engine)
        return self.merge(engine, [CacheEvent("reset", group, page_size=page_size) for group, page_size in groups])
