"""What every workload must do. The whole test file of a workload::

    class TestMine(WorkloadSuite):
        def make_workload(self) -> Workload:
            return Mine()

A workload that reads a file is given one in ``make_workload``. ``seeded``: whether another seed makes other requests.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext

PATIENCE = 100_000
"""Of items that are asked for, how many a workload may take to refuse a context in which nothing fits."""


def context(seed: int = 1, max_model_len: int = 4096, vocab_size: int = 1000) -> WorkloadContext:
    """A model whose tokens are the bytes of a text."""
    def encode(text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(messages: Sequence[Any]) -> list[int]:
        return [token for message in messages for token in encode(f"{message['role']}:{message['content']};")]

    return WorkloadContext(seed, vocab_size, max_model_len, encode, encode_chat)


class WorkloadSuite:
    """Subclass it and provide ``make_workload``."""

    seeded = True
    sample = 60
    """How many requests are looked at, where there are so many."""

    def make_workload(self) -> Workload:
        raise NotImplementedError("return a new workload")

    def drawn(self, given: WorkloadContext | None = None) -> list[WorkItem]:
        """The first ``sample`` requests."""
        return list(islice(self.make_workload().items(given or context()), self.sample))

    def test_it_has_requests(self) -> None:
        assert self.drawn()

    def test_the_same_seed_gives_the_same_requests(self) -> None:
        workload = self.make_workload()
        first = list(islice(workload.items(context()), self.sample))
        assert list(islice(workload.items(context()), self.sample)) == first, "a second call does not begin anew"
        assert self.drawn() == first, "another instance of the same options draws other requests"

    def test_how_many_are_asked_for_changes_none_of_them(self) -> None:
        half = len(self.drawn()) // 2
        assert list(islice(self.make_workload().items(context()), half)) == self.drawn()[:half]

    def test_another_seed_gives_other_prompts(self) -> None:
        if self.seeded:
            assert [item.prompt for item in self.drawn(context(seed=2))] != [item.prompt for item in self.drawn()]

    def test_two_streams_of_one_workload_do_not_disturb_each_other(self) -> None:
        workload = self.make_workload()
        pairs = zip(workload.items(context()), workload.items(context()), strict=False)
        assert all(one == other for one, other in islice(pairs, self.sample))

    def test_requests_come_in_order_of_arrival(self) -> None:
        times = [item.at for item in self.drawn() if item.at is not None]
        assert all(time >= 0 for time in times), "a request is due before the start"
        assert times == sorted(times), "a request is due before the one before it"

    def test_a_request_waits_only_for_one_that_came_before_it(self) -> None:
        items = self.drawn()
        for index, item in enumerate(items):
            assert item.pause >= 0
            if item.after is not None:
                assert 0 <= item.after < index, f"item {index} waits for item {item.after}"
                assert item.at is None, f"item {index} has a time and waits for another"
                before = items[item.after].prompt
                assert item.prompt[: len(before)] == before, f"item {index} does not begin as item {item.after} does"

    def test_every_request_fits_the_model(self) -> None:
        self._fit(context(), self.drawn())

    @pytest.mark.parametrize(
        "given", [context(vocab_size=257), context(max_model_len=100)], ids=["vocabulary", "context"])
    def test_every_request_fits_a_smaller_model_or_it_is_refused(self, given: WorkloadContext) -> None:
        try:
            items = self.drawn(given)
        except ConfigError:
            return
        self._fit(given, items)

    def _fit(self, given: WorkloadContext, items: Sequence[WorkItem]) -> None:
        for index, item in enumerate(items):
            assert item.prompt, f"item {index} has an empty prompt"
            assert item.max_tokens >= 1, f"item {index} generates nothing"
            assert all(type(token) is int and 0 <= token < given.vocab_size for token in item.prompt), (
                f"item {index} has tokens outside the vocabulary of {given.vocab_size}")
            length = len(item.prompt) + item.max_tokens
            assert length <= given.max_model_len, f"item {index} has {length} tokens, the context {given.max_model_len}"

    def test_a_context_in_which_nothing_fits_is_refused(self) -> None:
        with pytest.raises(ConfigError):
            _exhaust(self.make_workload().items(context(max_model_len=1)))

    def test_requests_of_one_key_share_what_they_declare(self) -> None:
        known: dict[str, WorkItem] = {}
        for index, item in enumerate(self.drawn()):
            assert 0 <= item.shared <= len(item.prompt)
            assert item.key or not item.shared, f"item {index} shares a prefix with nobody"
            if item.key:
                other = known.setdefault(item.key, item)
                shared = min(item.shared, other.shared)
                assert item.prompt[:shared] == other.prompt[:shared], (
                    f"item {index} does not share {shared} tokens with the first of '{item.key}'")


def _exhaust(items: Iterator[WorkItem]) -> None:
    for _ in islice(items, PATIENCE):
        pass
