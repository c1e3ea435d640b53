"""Ranks tell each other drafts and tokens; here they are threads that meet at a barrier."""

import queue
import threading

import pytest
import torch

from hotswap.core.execution.accord import Accord, StepFailedTogether
from hotswap.core.execution.choosing import Choices
from hotswap.core.modeling.mesh import Mesh


class Shared(Mesh):
    """One rank of a stage of two. ``line`` joins it to the stage before or behind, by queues of one tensor."""

    alone = False

    def __init__(self, leads, meeting, first=True, last=True, line=None):
        self.leads, self.is_first, self.is_last = leads, first, last
        self.barrier, self.slot = meeting
        self.line = line

    def share(self, x):
        if self.leads:
            self.slot["x"] = x
        self.barrier.wait()
        x = self.slot["x"]
        self.barrier.wait()
        return x.clone()

    def receive(self, x):
        return x if self.is_first else self.line.get(timeout=10)

    def pass_on(self, x):
        if not self.is_last:
            self.line.put(x)


def on_two(work, **stage):
    """``work(accord, leads)`` on two ranks of a stage; what each returned or raised."""
    meeting, results = (threading.Barrier(2, timeout=10), {}), [None, None]

    def run(rank):
        mesh = Shared(rank == 0, meeting, **stage)
        try:
            results[rank] = work(Accord(mesh, "cpu", 3), mesh.leads)
        except StepFailedTogether as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def fail():
    raise ValueError("planted")


def test_a_rank_that_is_alone_takes_its_own_word():
    accord = Accord(Mesh(), "cpu", 0)
    choices = Choices([[1]], [0])
    assert accord.choices(1, lambda: choices) is choices
    assert accord.drafts(1, lambda: [[]]) == [[]]
    with pytest.raises(ValueError, match="planted"):
        accord.choices(1, fail)


def test_the_tokens_of_the_leading_rank_are_everybodys_and_only_it_is_asked():
    def work(accord, leads):
        return accord.choices(3, lambda: Choices([[5, 6], [7], []], [1, 0, 0], {2: "why"}) if leads else fail())

    leader, follower = on_two(work)
    assert (leader.kept, leader.accepted, leader.errors) == ([[5, 6], [7], []], [1, 0, 0], {2: "why"})
    assert (follower.kept, follower.accepted) == (leader.kept, leader.accepted)
    assert follower.errors.keys() == {2}


def test_the_drafts_of_the_leading_rank_are_everybodys_though_all_propose():
    def work(accord, leads):
        return accord.drafts(2, lambda: [[1, 2], []] if leads else [[9], [9, 9]])

    assert on_two(work) == [[[1, 2], []]] * 2


def test_a_rank_that_fails_to_choose_fails_the_step_on_every_rank_together():
    leader, follower = on_two(lambda accord, leads: accord.choices(2, fail))
    assert isinstance(leader, StepFailedTogether) and isinstance(leader.__cause__, ValueError)
    assert isinstance(follower, StepFailedTogether) and follower.__cause__ is None


def test_a_proposer_that_fails_is_told_to_later_stages_too():
    line = queue.SimpleQueue()
    first = on_two(lambda accord, leads: accord.drafts(2, fail), last=False, line=line)
    later = on_two(lambda accord, leads: accord.drafts(2, fail), first=False, line=line)
    assert all(isinstance(result, StepFailedTogether) for result in [*first, *later])
    assert isinstance(first[0].__cause__, ValueError)


def test_drafts_reach_later_stages_with_their_lengths():
    line = queue.SimpleQueue()
    on_two(lambda accord, leads: accord.drafts(3, lambda: [[4, 5, 6], [], [7]]), last=False, line=line)
    assert on_two(lambda accord, leads: accord.drafts(3, fail), first=False, line=line) == [[[4, 5, 6], [], [7]]] * 2


def test_what_is_told_has_a_shape_that_every_rank_knows_beforehand():
    seen = []

    class Watched(Shared):
        def share(self, x):
            seen.append((x.shape, x.dtype))
            return super().share(x)

    meeting = threading.Barrier(1), {}
    accord = Accord(Watched(True, meeting), "cpu", 3)
    accord.choices(2, lambda: Choices([[1], [1, 2, 3, 4]], [0, 3]))
    with pytest.raises(StepFailedTogether):
        accord.choices(2, fail)
    assert seen == [(torch.Size([2, 6]), torch.int64)] * 2
