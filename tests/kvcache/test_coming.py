"""What a match says of pages that running requests compute: whose they are, how far they reach, and until when."""

from typing import Any

import pytest

from hotswap.core.interfaces.kvcache import CacheKey, Coming, Grant, KVCacheManager
from hotswap.core.interfaces.scheduler import Answer
from hotswap.core.testing.kvcache_harness import KEY, PAGE, Harness, prompt
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.radix import RadixKVCache

each_manager = pytest.mark.parametrize("make", [PrefixKVCache, RadixKVCache])

LONG = 10 * PAGE
TOKENS = prompt(1, LONG)
OTHER_END = TOKENS[:6 * PAGE] + prompt(2, 4 * PAGE)


def harness(make: type[KVCacheManager], least: int | None = PAGE, usable: int = 64, **windows: int | None) -> Harness:
    options: Any = make.Options(share_pending=least)  # type: ignore[call-arg]
    return Harness(make(options), usable, windows or {"full": None}, LONG)


def coming(h: Harness, tokens: list[int], key: CacheKey = KEY, tail: int = 0) -> tuple[int, Coming | None]:
    h.kv.check()
    match = h.match(tokens, key, tail)
    return match.cached, match.coming


@each_manager
def test_what_is_reserved_is_coming_until_it_has_been_committed(make: type[KVCacheManager]) -> None:
    h = harness(make)
    assert coming(h, OTHER_END) == (0, None)
    h.ask("a", TOKENS)
    assert coming(h, OTHER_END) == (0, Coming("a", 6 * PAGE))
    h.kv.commit("a", [], 2 * PAGE + 1)
    assert coming(h, OTHER_END) == (2 * PAGE, Coming("a", 6 * PAGE))
    h.kv.commit("a", [], 6 * PAGE)
    assert coming(h, OTHER_END) == (6 * PAGE, None), "behind the sixth page they are not alike"
    assert coming(h, TOKENS) == (6 * PAGE, Coming("a", 9 * PAGE)), "the last token is never reused"
    h.kv.commit("a", [7] * PAGE, LONG)
    assert coming(h, TOKENS) == (9 * PAGE, None)
    assert coming(h, [*TOKENS, 7, 7, 7, 7, 7]) == (LONG, None), "what is generated is nobody's before it is known"


@each_manager
def test_another_key_another_beginning_and_a_limit_of_nothing_have_nothing_to_wait_for(
    make: type[KVCacheManager],
) -> None:
    h = harness(make)
    h.ask("a", TOKENS)
    assert coming(h, TOKENS, CacheKey(salt="another"))[1] is None
    assert coming(h, [5, *TOKENS[1:]])[1] is None
    assert h.kv.match(TOKENS, KEY, 0).coming is None
    assert h.kv.match(TOKENS, KEY, 3 * PAGE).coming == Coming("a", 3 * PAGE)


@each_manager
def test_a_tail_that_must_be_computed_again_does_not_count(make: type[KVCacheManager]) -> None:
    h = harness(make)
    h.ask("a", TOKENS)
    assert coming(h, OTHER_END, tail=1) == (0, Coming("a", 5 * PAGE))
    h.kv.commit("a", [], 5 * PAGE)
    assert coming(h, OTHER_END, tail=1) == (4 * PAGE, Coming("a", 5 * PAGE))
    assert coming(h, OTHER_END, tail=PAGE + 1) == (3 * PAGE, Coming("a", 4 * PAGE))
    assert coming(h, OTHER_END, tail=LONG) == (0, None)


@each_manager
def test_little_is_not_worth_waiting_for_and_with_none_nothing_is(make: type[KVCacheManager]) -> None:
    h = harness(make, least=6 * PAGE)
    h.ask("a", TOKENS)
    assert coming(h, OTHER_END)[1] == Coming("a", 6 * PAGE)
    assert coming(h, OTHER_END[:6 * PAGE])[1] is None, "five pages are less than six"
    h.kv.commit("a", [], 5 * PAGE)
    assert coming(h, OTHER_END) == (5 * PAGE, Coming("a", 6 * PAGE)), "who waits waits until the end"
    h.kv.commit("a", [], 6 * PAGE)
    h.ask("b", OTHER_END)
    assert coming(h, OTHER_END) == (6 * PAGE, None), "b computes four pages"
    h = harness(make, least=None)
    h.ask("a", TOKENS)
    assert coming(h, TOKENS) == (0, None)


@each_manager
def test_what_is_undone_released_or_forgotten_does_not_come(make: type[KVCacheManager]) -> None:
    h = harness(make)
    grant = h.ask("a", TOKENS)
    assert isinstance(grant, Grant)
    h.kv.undo(grant.entry)
    assert coming(h, TOKENS) == (0, None)
    h.ask("a", TOKENS)
    h.kv.commit("a", [], PAGE)
    entry = h.kv.release("a", {1})
    assert coming(h, TOKENS) == (PAGE, None)
    h.kv.undo(entry)
    assert coming(h, TOKENS) == (PAGE, Coming("a", 9 * PAGE)), "it has its table again, and goes on"
    h.kv.reset()
    assert coming(h, TOKENS) == (0, None), "what it computes will not be shared any more"
    h.kv.commit("a", [], LONG)
    assert coming(h, TOKENS) == (0, None)


@each_manager
def test_the_first_that_computes_a_page_is_waited_for_and_what_another_adds_is_another_s(
    make: type[KVCacheManager],
) -> None:
    h = harness(make)
    h.ask("a", OTHER_END[:5 * PAGE])
    h.ask("b", TOKENS)
    assert coming(h, TOKENS) == (0, Coming("a", 5 * PAGE))
    h.kv.commit("a", [], 5 * PAGE)
    assert coming(h, TOKENS) == (5 * PAGE, Coming("b", 9 * PAGE))
    h.kv.release("b", ())
    assert coming(h, TOKENS) == (5 * PAGE, None)


@each_manager
@pytest.mark.parametrize("windows", [{"full": None, "window": 6}, {"window": 6}])
def test_with_windows_what_was_said_to_come_is_found_when_it_has_come(
    make: type[KVCacheManager], windows: dict[str, int | None],
) -> None:
    h = harness(make, **windows)
    h.ask("a", TOKENS)
    for done in range(1, 6):
        assert coming(h, OTHER_END)[1] == Coming("a", 6 * PAGE)
        h.kv.commit("a", [], done * PAGE)
        assert coming(h, OTHER_END)[0] == done * PAGE
    h.kv.commit("a", [], LONG)
    assert coming(h, OTHER_END) == (6 * PAGE, None)
    assert not isinstance(h.ask("b", OTHER_END), Answer)


@each_manager
@pytest.mark.parametrize("successor", [PrefixKVCache, RadixKVCache])
def test_a_successor_knows_what_the_tables_that_it_takes_over_will_bring(
    make: type[KVCacheManager], successor: type[KVCacheManager],
) -> None:
    h = harness(make)
    h.ask("a", TOKENS)
    h.kv.commit("a", [], 2 * PAGE)
    state, h = h.kv.handover(), harness(successor)
    h.kv.adopt(state)
    assert coming(h, OTHER_END) == (2 * PAGE, Coming("a", 6 * PAGE))
