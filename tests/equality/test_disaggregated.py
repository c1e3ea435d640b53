"""Prompts at one engine, the rest at another: the same tokens, and nothing that a client could tell."""

from collections import Counter
from typing import Any

import pytest

from hotswap.core.errors import QueueFullError
from hotswap.core.request import FinishReason


def disaggregated(tiny: Any, prefill: int = 1, decode: int = 1, **changes: Any) -> dict[str, Any]:
    return tiny.config("chunked", "prefix", changes.pop("speculator", "none"), changes.pop("depth", 2), **{
        "parallel": [{"use": "disaggregated", "prefill": prefill, "decode": decode}], **changes})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2)])
def test_the_tokens_are_those_of_one_engine(
    deploy: Any, book: Any, tiny: Any, prefill: int, decode: int, depth: int,
) -> None:
    running = deploy(disaggregated(tiny, prefill, decode, depth=depth))
    prompts = tiny.prompts()
    for abort in ({}, {}, {1: 3, 4: 3}):
        for prompt, output in zip(prompts, running.generate(prompts, 24, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    first, second = running.seen[:prefill], running.seen[prefill:]
    assert sum(seen["handoff"] for seen in first) == 3 * len(prompts)
    assert sum(seen["length"] for seen in first) == 0
    assert sum(seen["length"] for seen in second) == 3 * len(prompts) - 2
    assert all(seen["length"] for seen in second)


def test_a_request_of_one_token_stays_where_its_prompt_was_computed(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))
    running.generate(tiny.prompts(), 1)
    assert [seen["length"] for seen in running.seen] == [len(tiny.prompts()), 0]


def test_a_first_token_that_ends_the_request_ends_it_at_once(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))
    [[token, *_]] = running.generate([[5, 6, 7]], 4)
    answer = running.wait(running.submit([[5, 6, 7]], 4, stop_token_ids=[token]))[0]
    assert (answer.token_ids, answer.finish_reason) == ([token], FinishReason.STOP)
    assert [seen["stop"] for seen in running.seen] == [1, 0]


def test_seeds_penalties_and_logprobs_go_on_where_they_stopped(deploy: Any, run: Any, tiny: Any) -> None:
    """The position decides a draw, and penalties count what the other engine has kept."""
    fields = {
        "temperature": 0.9, "seed": 7, "presence_penalty": 1.5, "repetition_penalty": 1.2, "logprobs": 2,
        "prompt_logprobs": 1, "max_tokens": 16, "ignore_eos": True}
    prompts = tiny.prompts()
    alone = run(tiny.config("chunked", "prefix", "none", 1)).answer(*({"prompt": p, **fields} for p in prompts))
    running = deploy(disaggregated(tiny))
    answers = running.wait(running.submit(prompts, **fields))
    for mine, theirs in zip(answers, alone, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert [entry.token_id for entry in mine.logprobs] == mine.token_ids
        assert [entry.logprob for entry in mine.logprobs] == pytest.approx(
            [entry.logprob for entry in theirs.logprobs], abs=1e-4)
        assert len(mine.prompt_logprobs or []) == len(theirs.prompt_logprobs or [])


def test_text_goes_on_within_a_character_and_a_stop_string_is_found_across_the_engines(deploy: Any, tiny: Any) -> None:
    from hotswap.core.request import TextDelta

    class Spelling:
        """Gives text for every second token, and stops at the fourth."""

        def __init__(self) -> None:
            self.held: list[int] = []
            self.pushed = self.finished = 0

        def push(self, token_ids: list[int], search_stops_after: int = 0) -> TextDelta:
            self.held += token_ids
            self.pushed += len(token_ids)
            if self.pushed == 4:
                return TextDelta("end", "stop here", len(token_ids))
            if len(self.held) < 2:
                return TextDelta("", None, len(token_ids))
            text, self.held = f"{len(self.held)} ", []
            return TextDelta(text, None, len(token_ids))

        def finish(self) -> str:
            self.finished += 1
            return "finished"

    running, detokenizer = deploy(disaggregated(tiny)), Spelling()
    boxes = running.submit([[5, 6, 7]], 12, detokenizer=detokenizer)
    answer = running.wait(boxes)[0]
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("2 end", FinishReason.STOP, 4)
    assert detokenizer.finished == 0, "the first engine flushes nothing"


def test_either_role_does_all_where_the_other_is_lost(deploy: Any, book: Any, tiny: Any) -> None:
    prompts = tiny.prompts()
    for lost in (1, 0):
        running = deploy(disaggregated(tiny))
        engine = running.built.engine
        boxes = running.submit(prompts, 60)
        running.lose(lost)
        reasons = Counter(answer.finish_reason for answer in running.wait(boxes))
        assert reasons.keys() <= {FinishReason.ERROR, FinishReason.LENGTH}
        assert (engine.health(), engine.failure) == (None, None)
        for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
            book.compare(tiny.reference, prompt, output)
        running.lose(1 - lost)
        assert engine.failure
        assert engine.health()


def test_a_decode_engine_that_is_full_leaves_requests_where_they_are(deploy: Any, book: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))

    def full(request: Any, sink: Any) -> None:
        raise QueueFullError("planted")

    running.built.engines[1].engine.add = full
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert running.built.engine.loads().extra["kept_back"] == len(prompts)
    assert running.seen[0]["length"] == len(prompts)
    running.assert_clean()


def test_an_abort_reaches_a_request_at_either_engine(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))
    with running.halted():
        boxes = running.submit([[5, 6, 7]] * 3, 40)
        running.built.engine.abort(running.name(1))
    answers = running.wait(boxes)
    assert [answer.finish_reason for answer in answers] == ["length", "abort", "length"]
    assert [len(output) for output in running.generate([[5, 6, 7]], 40, abort={0: 1})] == [1]
    running.assert_clean()


def test_deployments_of_pairs_and_pairs_of_deployments(deploy: Any, book: Any, tiny: Any) -> None:
    pair = {"use": "disaggregated"}
    two = {"use": "data", "replicas": 2}
    prompts = tiny.prompts()
    for parallel, names in (
        ([two, pair], ["0.prefill0", "0.decode0", "1.prefill0", "1.decode0"]),
        ([pair, two], ["prefill0.0", "prefill0.1", "decode0.0", "decode0.1"]),
    ):
        running = deploy(disaggregated(tiny, parallel=parallel))
        assert [built.replica.name for built in running.built.engines] == names
        for prompt, output in zip(prompts, running.generate(prompts, 8), strict=True):
            book.compare(tiny.reference, prompt, output)
        running.assert_clean()
        assert sum(seen["handoff"] for seen in running.seen) == len(prompts)
