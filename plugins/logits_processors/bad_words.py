"""Words that must not be generated."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.plugins.logits_processors.scatter import Ids, as_ids, mask


class _Watch:
    """One request's words as {all tokens but the last: the possible last ones}, and its output."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        endings: dict[tuple[int, ...], set[int]] = {}
        for *prefix, last in words:
            endings.setdefault(tuple(prefix), set()).add(last)
        self.endings = {prefix: as_ids(lasts) for prefix, lasts in endings.items()}
        self.lengths = sorted({len(prefix) for prefix in endings})
        self.output: list[int] = []

    def banned(self, drafts: tuple[int, ...]) -> list[Ids]:
        """The tokens that would complete a word after the output and ``drafts``."""
        longest = self.lengths[-1]
        tail = (*self.output[len(self.output) - longest if longest < len(self.output) else 0 :], *drafts)
        prefixes = (tail[len(tail) - length :] for length in self.lengths if length <= len(tail))
        return [self.endings[prefix] for prefix in prefixes if prefix in self.endings]


class BadWords(LogitsProcessor):
    """Excludes the token that would complete one of ``bad_words``. Loaded by default; costs nothing for other requests.

    A word is a sequence of tokens, and all of it must be output: a word that begins in the prompt may be completed.
    The same letters spelt with other tokens are another word.
    """

    honours = frozenset({"bad_words"})

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._vocab_size: int | None = None
        self._watches: dict[str, _Watch] = {}

    def configure(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def _words(self, request: NewRequest) -> list[tuple[int, ...]]:
        """Those that the model can generate: a tokenizer may have ids that the logits lack."""
        limit = self._vocab_size
        return [
            word for word in request.bad_words_token_ids if word and (limit is None or all(t < limit for t in word))
        ]

    def wants(self, request: NewRequest) -> bool:
        return bool(self._words(request))

    def begin(self, request: NewRequest) -> None:
        watch = self._watches[request.id] = _Watch(self._words(request))
        watch.output += request.tokens[request.prompt_length :]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        banned = [(row.index, ids) for row in rows for ids in self._watches[row.request].banned(row.drafts)]
        mask(logits, [index for index, _ in banned], [ids for _, ids in banned])

    def accept(self, request: str, kept: Sequence[int]) -> None:
        self._watches[request].output.extend(kept)

    def rollback(self, request: str, count: int) -> None:
        output = self._watches[request].output
        del output[len(output) - count :]

    def end(self, request: str) -> None:
        self._watches.pop(request, None)
