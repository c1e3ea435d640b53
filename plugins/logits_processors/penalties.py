"""Presence, frequency and repetition penalties."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams
from hotswap.plugins.logits_processors.scatter import Ids, as_ids, index_pairs, repeat


class _History:
    """What one request has said: for each token that occurred, how often in the output and whether in the prompt.

    Arrays with room to grow, so that a step costs no conversion; ``size`` entries are in use, in order of appearance.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self.output: list[int] = []
        self.ids: Ids = np.unique(as_ids(prompt))
        self.size = len(self.ids)
        self.counts: np.ndarray[Any, np.dtype[np.float32]] = np.zeros(self.size, dtype=np.float32)
        self.in_prompt: np.ndarray[Any, np.dtype[np.bool_]] = np.ones(self.size, dtype=np.bool_)
        self.slots = {token: slot for slot, token in enumerate(self.ids.tolist())}

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            slot = self._slot(token)  # first: it may replace the arrays
            self.counts[slot] += 1
        self.output.extend(tokens)

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self.counts[self.slots[self.output.pop()]] -= 1

    def _slot(self, token: int) -> int:
        slot = self.slots.get(token)
        if slot is None:
            if self.size == len(self.ids):
                self._grow()
            slot = self.slots[token] = self.size
            self.ids[slot], self.counts[slot], self.in_prompt[slot] = token, 0, False
            self.size += 1
        return slot

    def _grow(self) -> None:
        room = (0, max(64, self.size))
        self.ids = np.pad(self.ids, room)
        self.counts = np.pad(self.counts, room)
        self.in_prompt = np.pad(self.in_prompt, room)

    def seen(self, drafts: Sequence[int]) -> tuple[Ids, "np.ndarray[Any, np.dtype[np.float32]]"]:
        """Ids and output counts of all tokens of prompt and output, each once, as if ``drafts`` had been kept."""
        self.accept(drafts)
        occurs = self.in_prompt[: self.size] | (self.counts[: self.size] > 0)
        result = self.ids[: self.size][occurs], self.counts[: self.size][occurs]
        self.rollback(len(drafts))
        return result


class Penalties(LogitsProcessor):
    """Makes tokens that occurred already less likely. Loaded by default; costs nothing for requests without penalties.

    Repetition (Keskar et al., "CTRL", 2019) divides a positive logit and multiplies a negative one, for tokens of the
    prompt or the output. Then, as OpenAI defines them, frequency is subtracted once per occurrence in the output and
    presence once if there is any. The prompt counts for repetition only.
    """

    honours = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"})

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._histories: dict[str, _History] = {}

    def wants(self, request: NewRequest) -> bool:
        params = request.sampling
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def begin(self, request: NewRequest) -> None:
        prompt = request.tokens[: request.prompt_length] if request.sampling.repetition_penalty != 1.0 else ()
        history = self._histories[request.id] = _History(request.sampling, prompt)
        history.accept(request.tokens[request.prompt_length :])

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        histories = [self._histories[row.request] for row in rows]
        seen = [history.seen(row.drafts) for history, row in zip(histories, rows, strict=True)]
        ids, params = [each[0] for each in seen], [history.params for history in histories]
        if not any(len(each) for each in ids):
            return
        pairs = index_pairs([row.index for row in rows], ids, logits.device)
        counts = torch.from_numpy(np.concatenate([each[1] for each in seen])).to(logits.device)
        repetition = repeat([each.repetition_penalty for each in params], ids, logits.device)
        frequency = repeat([each.frequency_penalty for each in params], ids, logits.device)
        presence = repeat([each.presence_penalty for each in params], ids, logits.device)
        values = logits[pairs]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[pairs] = values - frequency * counts - presence * (counts > 0)

    def accept(self, request: str, kept: Sequence[int]) -> None:
        self._histories[request].accept(kept)

    def rollback(self, request: str, count: int) -> None:
        self._histories[request].rollback(count)

    def end(self, request: str) -> None:
        self._histories.pop(request, None)
