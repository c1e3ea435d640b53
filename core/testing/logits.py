"""The conformance kit for logits processors. A plugin's whole test file::

    class TestMine(LogitsProcessorSuite):
        def make_processor(self):
            return MyProcessor()

        def make_request(self, request_id, tokens, prompt_length, rng):
            return NewRequest(request_id, tokens, prompt_length, SamplingParams(...), seed=0)

Every test uses random requests; those that ``wants`` refuses are not given to the processor, as in the worker.
"""

import random
from collections.abc import Iterator

import torch

from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams


def any_request(
    processor: LogitsProcessor, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random,
) -> NewRequest:
    """A request that asks for something of every sampling field that processors carry out, and of ``processor``'s own
    fields for their examples or defaults: for a processor of which nothing else is known."""
    asked = processor.RequestOptions.model_fields if processor.RequestOptions else {}
    extra = {
        name: field.examples[0] if field.examples else field.get_default(call_default_factory=True)
        for name, field in asked.items() if field.examples or not field.is_required()}
    params = SamplingParams(
        repetition_penalty=rng.uniform(1.1, 2.0), presence_penalty=rng.uniform(0.1, 1.0), min_tokens=rng.randint(1, 9),
        logit_bias={rng.randrange(8): rng.uniform(1.0, 5.0)}, bad_words=["x"],
        extra={processor.name: extra} if processor.RequestOptions else {})
    return NewRequest(request_id, tokens, prompt_length, params, 0, frozenset({1}), ((2, 5), (6,)))


class LogitsProcessorSuite:
    """Subclass it and provide ``make_processor`` and ``make_request``."""

    vocab_size: int = 40
    cases: int = 40

    def make_processor(self) -> LogitsProcessor:
        raise NotImplementedError("return a new instance of the processor under test")

    def make_request(self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random) -> NewRequest:
        """A request of these tokens whose parameters, drawn from ``rng``, want the processor."""
        raise NotImplementedError("return a request that the processor wants")

    def build(self) -> LogitsProcessor:
        processor = self.make_processor()
        processor.configure(self.vocab_size)
        return processor

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        """Few different ones, so that repeats and matches are common."""
        return [rng.randrange(min(8, self.vocab_size)) for _ in range(count)]

    def request(
        self, case: int, name: str = "r", output: list[int] | None = None, rng: random.Random | None = None
    ) -> NewRequest:
        """The same parameters for the same ``case``, whatever the output."""
        rng = rng or random.Random(case)
        prompt = self.tokens(rng, rng.randint(1, 6))
        return self.make_request(name, [*prompt, *(output or [])], len(prompt), rng)

    def wanted(self) -> Iterator[tuple[int, random.Random]]:
        """Cases whose request the processor wants, each with random numbers for the test."""
        processor, found = self.build(), 0
        for case in range(self.cases):
            if processor.wants(self.request(case)):
                found += 1
                yield case, random.Random(1000 + case)
        assert found, "the processor wants none of the requests that make_request makes"

    def logits(self, rows: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(rows, self.vocab_size, generator=torch.Generator().manual_seed(seed))

    def applied(self, processor: LogitsProcessor, request: str = "r", drafts: tuple[int, ...] = ()) -> torch.Tensor:
        """What becomes of one row of fixed logits."""
        logits = self.logits(1)
        processor.apply(logits, [LogitsRow(0, request, drafts)])
        return logits

    def started(self, case: int, output: list[int] | None = None) -> LogitsProcessor:
        processor = self.build()
        processor.begin(self.request(case, output=output))
        return processor

    def test_it_has_an_effect(self) -> None:
        changed = 0
        for case, rng in self.wanted():
            processor = self.started(case, self.tokens(rng, 3))
            changed += not torch.equal(self.applied(processor), self.logits(1))
        assert changed, "no request's logits were changed"

    def test_accepting_tokens_equals_beginning_with_them(self) -> None:
        """So that a request that was preempted goes on as if it had not been."""
        for case, rng in self.wanted():
            first, second, third = (self.tokens(rng, rng.randint(0, 4)) for _ in range(3))
            processor = self.started(case, first)
            processor.accept("r", second)
            self.applied(processor)
            processor.accept("r", third)
            fresh = self.started(case, [*first, *second, *third])
            assert torch.equal(self.applied(processor), self.applied(fresh)), "accept() differs from begin()"
            processor.begin(self.request(case, output=first))
            assert torch.equal(self.applied(processor), self.applied(self.started(case, first))), (
                "begin() keeps something of the time before"
            )

    def test_drafts_count_as_kept_and_leave_no_trace(self) -> None:
        for case, rng in self.wanted():
            output, drafts = self.tokens(rng, rng.randint(0, 4)), tuple(self.tokens(rng, rng.randint(1, 4)))
            processor = self.started(case, output)
            before = self.applied(processor)
            assumed = self.applied(processor, drafts=drafts)
            assert torch.equal(self.applied(processor), before), "drafts outlast apply()"
            kept = self.applied(self.started(case, [*output, *drafts]))
            assert torch.equal(assumed, kept), "drafts before a row differ from kept tokens"

    def test_a_rejected_draft_is_forgotten(self) -> None:
        for case, rng in self.wanted():
            drafts = self.tokens(rng, 4)
            processor = self.started(case)
            for count in range(5):
                self.applied(processor, drafts=tuple(drafts[:count]))
            kept = [*drafts[:2], *self.tokens(rng, 1)]
            processor.accept("r", kept)
            assert torch.equal(self.applied(processor), self.applied(self.started(case, kept)))

    def test_rollback_undoes_accept(self) -> None:
        for case, rng in self.wanted():
            output = self.tokens(rng, 3)
            processor = self.started(case, output)
            before = self.applied(processor)
            for count in (1, 2, 4):
                processor.accept("r", self.tokens(rng, count))
            processor.rollback("r", 5)
            processor.rollback("r", 2)
            assert torch.equal(self.applied(processor), before), "rollback() does not undo accept()"
            processor.rollback("r", 1)
            assert torch.equal(self.applied(processor), self.applied(self.started(case, output[:-1])))

    def test_rows_do_not_touch_each_other(self) -> None:
        cases = list(self.wanted())
        processor, rng = self.build(), random.Random(0)
        outputs = {case: self.tokens(rng, rng.randint(0, 4)) for case, _ in cases}
        for case, _ in cases:
            processor.begin(self.request(case, str(case), outputs[case]))
        drafts = {case: tuple(self.tokens(rng, rng.randint(0, 3))) for case, _ in cases}
        rows = [LogitsRow(2 * i + 1, str(case), drafts[case]) for i, (case, _) in enumerate(cases)]
        together = self.logits(2 * len(rows) + 1)
        untouched = together.clone()
        processor.apply(together, rng.sample(rows, len(rows)))
        assert torch.equal(together[::2], untouched[::2]), "rows that were not named have changed"
        for case, row in zip((case for case, _ in cases), rows, strict=True):
            alone = untouched[row.index : row.index + 1].clone()
            self.started(case, outputs[case]).apply(alone, [LogitsRow(0, "r", row.drafts)])
            assert torch.equal(alone[0], together[row.index]), "a row's logits depend on its neighbours"

    def test_several_rows_of_one_request_each_see_their_drafts(self) -> None:
        for case, rng in self.wanted():
            drafts = tuple(self.tokens(rng, 3))
            processor = self.started(case)
            together = self.logits(1).repeat(4, 1)
            processor.apply(together, [LogitsRow(i, "r", drafts[:i]) for i in range(4)])
            for i in range(4):
                assert torch.equal(together[i], self.applied(self.started(case), drafts=drafts[:i])[0])

    def test_an_ended_request_leaves_nothing_for_another_of_its_name(self) -> None:
        cases = list(self.wanted())
        for (case, rng), (other, _) in zip(cases, [*cases[1:], cases[0]], strict=True):
            processor = self.started(case, self.tokens(rng, 5))
            for following in (case, other):  # the same parameters, and others
                processor.end("r")
                processor.end("r")
                processor.begin(self.request(following))
                assert torch.equal(self.applied(processor), self.applied(self.started(following)))

    def test_no_rows_and_masked_logits_are_fine(self) -> None:
        for case, rng in self.wanted():
            processor = self.started(case, self.tokens(rng, 4))
            logits = self.logits(0)
            processor.apply(logits, [])
            masked = torch.full((1, self.vocab_size), -torch.inf)
            masked[0, self.vocab_size - 1] = 1.0
            processor.apply(masked, [LogitsRow(0, "r")])
            assert (masked[0, :-1] == -torch.inf).all(), "an excluded token came back"
            assert not masked.isnan().any()
