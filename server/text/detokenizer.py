"""Output tokens to text, one step at a time: no half characters, no lost spaces, no leaked part of a stop string."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from hotswap.core.modeling.tokenizer import TokenBytes, Tokenizer
from hotswap.core.request import TextDelta
from hotswap.server.text.stops import StopMatcher

REPLACEMENT = "\ufffd"
"""What decoding makes of bytes that are not (yet) a character."""

_HELD = 3
"""An unfinished UTF-8 character has at most three bytes, and so lies in the last three tokens."""
_WINDOW = 8
"""Tokens decoded again with each new one, once there are more: left context decides about leading spaces."""
_LONGEST_WINDOW = 64
"""Bound on the window where no clean cut comes along, so that hostile output stays linear."""


class IncrementalDecoder(Protocol):
    """Decodes a growing list of tokens. What it returns, joined, equals decoding all of them at once."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that is certain."""

    def finish(self) -> str:
        """What was held back; half a character becomes U+FFFD."""


def incremental_decoder(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> IncrementalDecoder:
    table = tokenizer.token_bytes
    if table is None:
        return WindowDecoder(tokenizer, skip_special_tokens)
    return ByteDecoder(table, tokenizer.special_ids if skip_special_tokens else frozenset())


class ByteDecoder:
    """Of a byte-level vocabulary: joins bytes, without asking the tokenizer. ``hidden`` tokens have no text."""

    __slots__ = ("_begun", "_hidden", "_table")

    def __init__(self, table: TokenBytes, hidden: frozenset[int]) -> None:
        self._table, self._hidden = table, hidden
        self._begun = b""
        """What there is of a character whose end is to come."""

    def push(self, token_ids: Sequence[int]) -> str:
        table, hidden = self._table, self._hidden
        bytes_ = self._begun + b"".join([table[token] for token in token_ids if token not in hidden])
        text, whole = codecs.utf_8_decode(bytes_, "replace", False)
        self._begun = bytes_[whole:]
        return text

    def finish(self) -> str:
        bytes_, self._begun = self._begun, b""
        return bytes_.decode(errors="replace")


class WindowDecoder:
    """Of any vocabulary: decodes the last tokens again with each new one, and finds out what is new of the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that have been returned
        self._clean = 0  # a length of the window, before the present one, at which its text ended in a whole character

    def push(self, token_ids: Sequence[int]) -> str:
        hidden, known = self._hidden, self._tokenizer.vocab_size
        visible = [token for token in token_ids if token not in hidden and token < known]
        if not visible:
            return ""
        self._window += visible
        text = self._decode(self._window)
        # All replacement characters at the end are held: some tokenizers decode a run of bytes as a whole, so that half
        # a character makes replacement characters of the whole ones before it too.
        certain = len(text.rstrip(REPLACEMENT))
        delta = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(text):
            self._trim()
        elif len(self._window) > _LONGEST_WINDOW:
            delta += self._cut_inside(text)
        return delta

    def finish(self) -> str:
        text = self._decode(self._window)[self._sent :]
        self._window, self._sent, self._clean = [], 0, 0
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def _trim(self) -> None:
        """The text ends in a whole character: forget what lies before the last such point."""
        if len(self._window) > _WINDOW and self._clean:
            context = self._window[self._clean :]
            text = self._decode(context)
            # A context without text would be taken for the beginning, where some tokenizers strip a space.
            if text or len(self._window) > _LONGEST_WINDOW:
                self._window, self._sent = context, len(text)
        self._clean = len(self._window)

    def _cut_inside(self, text: str) -> str:
        """The window is long and still ends in something undecided: cut at a token where the text falls apart."""
        for kept in range(1, _HELD + 2):
            head, tail = self._decode(self._window[:-kept]), self._decode(self._window[-kept:])
            if head + tail == text:
                delta = text[self._sent : len(head)]
                self._window = self._window[-kept:]
                self._sent, self._clean = max(0, self._sent - len(head)), 0
                return delta
        delta = text[self._sent :]
        self._window, self._sent, self._clean = [], 0, 0
        return delta


class StreamDetokenizer:
    """One request's ``Detokenizer``: incremental decoding, then the search for stop strings.

    Text that may turn out to be the beginning of a stop string is held back until that is decided; what is returned
    never has to be taken back. Linear in the number of tokens and characters.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_pushed", "_stopped", "_stops")

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = incremental_decoder(tokenizer, skip_special_tokens)
        self._stops = StopMatcher(stop) if any(stop) else None
        self._include_stop = include_stop
        self._held = ""
        self._pushed = 0
        self._stopped: str | None = None

    def push(self, token_ids: list[int], search_stops_after: int = 0) -> TextDelta:
        if self._stopped is not None:
            return TextDelta("", self._stopped, 0)
        if self._stops is None:
            self._pushed += len(token_ids)
            return TextDelta(self._decoder.push(token_ids), None, len(token_ids))
        parts: list[str] = []
        for index, token in enumerate(token_ids):
            self._pushed += 1
            parts.append(self._search(self._stops, self._decoder.push([token]), self._pushed > search_stops_after))
            if self._stopped is not None:
                return TextDelta("".join(parts), self._stopped, index + 1)
        return TextDelta("".join(parts), None, len(token_ids))

    def finish(self) -> str:
        if self._stopped is not None:
            return ""
        text, self._held = self._held + self._decoder.finish(), ""
        return text

    def _search(self, stops: StopMatcher, text: str, enabled: bool) -> str:
        """The part of the text so far that may be returned now."""
        if not text:
            return ""
        begin = len(self._held)
        seen = self._held + text
        match = stops.feed(text, enabled)
        if match is None:
            cut = len(seen) - stops.open
            self._held = seen[cut:]
            return seen[:cut]
        end, self._stopped = match
        self._held = ""
        end += begin
        return seen[: end if self._include_stop else end - len(self._stopped)]
