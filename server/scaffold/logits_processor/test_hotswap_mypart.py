"""The kit gives it random requests, drafts, suspensions and neighbours; then what is its own."""

import random

import torch

from hotswap.core.interfaces.logits import LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams
from hotswap.core.testing.logits import LogitsProcessorSuite
from hotswap_mypart import MyPart

NAME = "MyPart"  # of a component that no registry has built: the class's


class TestMyPart(LogitsProcessorSuite):
    def make_processor(self) -> MyPart:
        return MyPart()

    def make_request(self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random) -> NewRequest:
        asked = {"tokens": [rng.randrange(40), 999], "by": rng.uniform(1, 5)}
        return NewRequest(request_id, tokens, prompt_length, SamplingParams(extra={NAME: asked}), seed=0)

    def test_the_tokens_gain_and_no_others(self) -> None:
        processor = self.build()
        params = SamplingParams(extra={NAME: {"tokens": [2], "by": 3.0}})
        processor.begin(NewRequest("r", [1], 1, params, seed=0))
        logits = torch.zeros(1, self.vocab_size)
        processor.apply(logits, [LogitsRow(0, "r")])
        assert logits[0, 2] == 3.0
        assert logits.count_nonzero() == 1

    def test_nobody_adds_more_than_the_limit(self) -> None:
        processor = MyPart(MyPart.Options(limit=2.0))
        processor.configure(self.vocab_size)
        for request, by in (("up", 3.0), ("down", -3.0)):
            params = SamplingParams(extra={NAME: {"tokens": [2], "by": by}})
            processor.begin(NewRequest(request, [1], 1, params, seed=0))
        logits = torch.zeros(2, self.vocab_size)
        processor.apply(logits, [LogitsRow(0, "up"), LogitsRow(1, "down")])
        assert logits[:, 2].tolist() == [2.0, -2.0]
