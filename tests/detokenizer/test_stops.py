"""Stop strings in a text that comes in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from hotswap.server.text.stops import StopMatcher

SMALL = st.text("ab", min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By trying everything: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(st.lists(SMALL, min_size=1, max_size=4), st.lists(st.text("abc", max_size=5), max_size=8))
def test_the_first_match_is_found_however_the_text_is_cut(stops, pieces):
    matcher, done = StopMatcher(stops), 0
    for piece in pieces:
        if match := matcher.feed(piece):
            assert first_match("".join(pieces), stops) == (done + match[0], match[1])
            return
        done += len(piece)
    assert first_match("".join(pieces), stops) is None


@given(st.lists(SMALL, min_size=1, max_size=4), st.text("abc", max_size=12))
def test_open_counts_exactly_the_characters_that_could_become_a_stop(stops, text):
    matcher = StopMatcher(stops)
    if matcher.feed(text) is None:
        could = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops)]
        assert matcher.open == max(could)


def test_a_stop_string_that_was_passed_over_can_still_begin_another():
    matcher = StopMatcher(["aa", "ab"])
    assert matcher.feed("aa", enabled=False) is None
    assert matcher.feed("b") == (1, "ab")
