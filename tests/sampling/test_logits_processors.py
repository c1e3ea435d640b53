"""The stock logits processors: the conformance kit, a plain reference each, and the faults that others met."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.execution.sampling import sample
from hotswap.core.execution.sampling_table import SamplingTable
from hotswap.core.execution.verification import verify
from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams
from hotswap.core.testing.logits import LogitsProcessorSuite
from hotswap.plugins.logits_processors.bad_words import BadWords
from hotswap.plugins.logits_processors.bias import Bias
from hotswap.plugins.logits_processors.min_tokens import MinTokens
from hotswap.plugins.logits_processors.penalties import Penalties

VOCAB = 12


def new_request(tokens: list[int], prompt_length: int, name: str = "r", **fields: Any) -> NewRequest:
    eos = fields.pop("eos", frozenset())
    words = fields.pop("words", ())
    return NewRequest(name, tokens, prompt_length, SamplingParams(**fields), 0, eos, words)


class TestPenaltiesConform(LogitsProcessorSuite):
    def make_processor(self) -> LogitsProcessor:
        return Penalties()

    def make_request(self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random) -> NewRequest:
        return new_request(
            tokens, prompt_length, request_id,
            presence_penalty=rng.choice([0.0, 1.5]),
            frequency_penalty=rng.choice([0.0, -0.5, 2.0]),
            repetition_penalty=rng.choice([1.0, 0.8, 1.3]),
        )  # fmt: skip


class TestBiasConforms(LogitsProcessorSuite):
    def make_processor(self) -> LogitsProcessor:
        return Bias()

    def make_request(self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random) -> NewRequest:
        bias = {rng.randrange(self.vocab_size): rng.uniform(-5, 5) for _ in range(rng.randint(0, 3))}
        allowed = [rng.randrange(self.vocab_size) for _ in range(rng.randint(1, 5))] if rng.random() < 0.5 else None
        return new_request(tokens, prompt_length, request_id, logit_bias=bias or None, allowed_token_ids=allowed)


class TestBadWordsConform(LogitsProcessorSuite):
    def make_processor(self) -> LogitsProcessor:
        return BadWords()

    def make_request(self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random) -> NewRequest:
        words = tuple(tuple(self.tokens(rng, rng.choice([1, 2, 2, 3]))) for _ in range(rng.randint(0, 8)))
        return new_request(tokens, prompt_length, request_id, words=words)


class TestMinTokensConform(LogitsProcessorSuite):
    def make_processor(self) -> LogitsProcessor:
        return MinTokens()

    def make_request(self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random) -> NewRequest:
        stops = [rng.randrange(self.vocab_size) for _ in range(rng.randint(0, 2))]
        eos = frozenset(rng.randrange(self.vocab_size + 10) for _ in range(rng.randint(0, 3)))
        return new_request(
            tokens, prompt_length, request_id, min_tokens=rng.randint(0, 8), stop_token_ids=stops, eos=eos
        )


def reference(request: NewRequest, logits: list[float], drafts: tuple[int, ...] = ()) -> list[float]:
    """All four processors on one row, by their definitions."""
    params, prompt = request.sampling, request.tokens[: request.prompt_length]
    output = [*request.tokens[request.prompt_length :], *drafts]
    result = list(logits)
    for token in set(prompt) | set(output):
        result[token] *= 1 / params.repetition_penalty if result[token] > 0 else params.repetition_penalty
    for token in set(output):
        result[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        result[token] += bias
    banned = set() if params.allowed_token_ids is None else set(range(VOCAB)) - set(params.allowed_token_ids)
    banned |= {
        word[-1] for word in request.bad_words_token_ids if [*word[:-1]] == output[len(output) - len(word) + 1 :]
    }
    if len(output) < params.min_tokens:
        banned |= request.eos_token_ids | set(params.stop_token_ids)
    return [-torch.inf if token in banned else value for token, value in enumerate(result)]


ids = st.integers(0, VOCAB - 1)
few = st.lists(st.integers(0, 4), max_size=5)
requests = st.builds(
    lambda prompt, output, eos, words, **fields: new_request(
        [*prompt, *output], len(prompt), eos=frozenset(eos), words=tuple(map(tuple, words)), **fields
    ),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    output=few,
    eos=st.lists(ids, max_size=2),
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=3),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 1.1, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.5]),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-9, 9, width=32), max_size=3),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=9),
    min_tokens=st.integers(0, 7),
    stop_token_ids=st.lists(ids, max_size=2),
)


@settings(deadline=None, max_examples=150)
@given(batch=st.lists(st.tuples(requests, few), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_batch_of_all_processors_equals_the_definitions_row_by_row(batch: list[Any], seed: int) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = [
        reference(request, row.tolist(), tuple(drafts)) for (request, drafts), row in zip(batch, logits, strict=True)
    ]
    for processor in (Penalties(), Bias(), BadWords(), MinTokens()):
        processor.configure(VOCAB)
        rows = []
        for index, (request, drafts) in enumerate(batch):
            named = NewRequest(str(index), *list(vars(request).values())[1:])
            if processor.wants(named):
                processor.begin(named)
                rows.append(LogitsRow(index, str(index), tuple(drafts)))
        processor.apply(logits, rows)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_presence_and_frequency_count_the_output_only_and_repetition_the_prompt_too() -> None:
    prompt = [3] * 10
    logits = torch.ones(1, VOCAB)
    for fields in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        processor = Penalties()
        processor.begin(new_request(prompt, 10, **fields))
        processor.apply(logits, [LogitsRow(0, "r")])
        assert logits[0, 3] == 1.0
        processor.accept("r", [3, 3])
        processor.apply(logits, [LogitsRow(0, "r")])
        assert logits[0, 3] == (-1.0 if "presence_penalty" in fields else -3.0)
        logits[0, 3] = 1.0
    processor = Penalties()
    processor.begin(new_request(prompt, 10, repetition_penalty=2.0))
    processor.apply(logits, [LogitsRow(0, "r")])
    assert logits[0, 3] == 0.5


def test_only_allowed_tokens_are_sampled_at_any_temperature() -> None:
    bias, table = Bias(), SamplingTable()
    names = [str(i) for i in range(50)]
    for i, name in enumerate(names):
        request = new_request([1], 1, name, temperature=2.0, allowed_token_ids=[10, 11, 10], logit_bias={3: 100.0})
        bias.begin(request)
        table.add(name, request.sampling, i)
    logits = torch.randn(50, VOCAB)
    bias.apply(logits, [LogitsRow(i, name) for i, name in enumerate(names)])
    tokens = sample(logits, table.batch(names, [1] * 50)).tokens
    assert set(tokens.tolist()) == {10, 11}


def test_allowed_tokens_that_are_all_banned_end_their_request_with_an_error() -> None:
    logits, table = torch.randn(2, VOCAB), SamplingTable()
    request = new_request([1], 1, allowed_token_ids=[5], words=((5,),))
    for name in ("r", "other"):
        table.add(name, request.sampling, 1)
    for processor in (Bias(), BadWords()):
        processor.begin(request)
        processor.apply(logits, [LogitsRow(0, "r")])
    _, faults = sample(logits, table.batch(["r", "other"], [1, 1])).to_host()
    assert list(faults) == [0]
    assert "no token is left" in faults[0]


def test_every_end_and_stop_id_within_the_logits_is_masked_until_the_minimum() -> None:
    processor = MinTokens()
    processor.configure(VOCAB)
    request = new_request([1], 1, min_tokens=3, stop_token_ids=[4], eos=frozenset({2, 3, VOCAB + 5}))
    assert processor.wants(request)
    processor.begin(request)
    for length in range(5):
        logits = torch.zeros(1, VOCAB)
        processor.apply(logits, [LogitsRow(0, "r")])
        assert (logits[0] == -torch.inf).nonzero().flatten().tolist() == ([2, 3, 4] if length < 3 else [])
        processor.accept("r", [7])


def test_bad_words_beyond_the_logits_are_left_out() -> None:
    processor = BadWords()
    processor.configure(VOCAB)
    assert not processor.wants(new_request([1], 1, words=((VOCAB,), (1, VOCAB + 3), ())))
    request = new_request([1], 1, words=((VOCAB,), (4,)))
    processor.begin(request)
    logits = torch.zeros(1, VOCAB)
    processor.apply(logits, [LogitsRow(0, "r")])
    assert (logits[0] == -torch.inf).nonzero().flatten().tolist() == [4]


def test_a_bad_word_counts_only_where_all_of_it_is_output() -> None:
    processor = BadWords()
    processor.begin(new_request([1, 2], 2, words=((2, 3),)))
    for kept, banned in (([], False), ([2], True), ([4], False)):
        processor.accept("r", kept)
        logits = torch.zeros(1, VOCAB)
        processor.apply(logits, [LogitsRow(0, "r")])
        assert bool(logits[0, 3] == -torch.inf) is banned


@pytest.mark.parametrize("fields", [
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_tokens": 20, "words": ((6, 0), (3,)), "eos": frozenset({4})},
    {"temperature": 0.8, "logit_bias": {1: 3.0}, "allowed_token_ids": [0, 1, 2, 5]},
])  # fmt: skip
def test_a_text_is_the_same_with_speculation_and_without(fields: dict[str, Any]) -> None:
    weight = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    request = new_request([1, 2, 2], 3, **fields)

    def generate(lookahead: int) -> list[int]:
        rng, table, tokens = random.Random(1), SamplingTable(), list(request.tokens)
        table.add("r", request.sampling, 42)
        processors = [p for p in (Penalties(), Bias(), BadWords(), MinTokens()) if p.wants(request)]
        for processor in processors:
            processor.begin(request)
        while len(tokens) < 43:
            drafts = [rng.randrange(VOCAB) if rng.random() < 0.3 else (plain or [0] * 99)[len(tokens) + i]
                      for i in range(lookahead)]  # fmt: skip
            logits = weight[[tokens[-1], *drafts]].clone()
            rows = [LogitsRow(i, "r", tuple(drafts[:i])) for i in range(lookahead + 1)]
            for processor in processors:
                processor.apply(logits, rows)
            batch = table.batch(["r"] * len(rows), [len(tokens) + i for i in range(len(rows))])
            kept = verify(logits, batch, [drafts]).kept[0]
            for processor in processors:
                processor.accept("r", kept)
            tokens += kept
        return tokens[:43]

    plain: list[int] = []
    plain = generate(0) + [0] * 9
    assert generate(3) == plain[:43]
    assert len(set(plain[3:43])) >= 2
