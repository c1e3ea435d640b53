"""Ranks tell each other drafts and tokens; here they are threads that meet at a barrier."""

import contextlib
import queue
import threading

import pytest
import torch

from hotswap.core.execution.accord import Accord, ProposalEndedError, StepFailedTogether
from hotswap.core.execution.choosing import Choices
from hotswap.core.execution.speculation import Proposal
from hotswap.core.interfaces.speculator import Drawn
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


def on_two(work, meets=False, **stage):
    """``work(accord, leads)`` on two ranks of a stage; what each returned or raised. Who waits for nobody breaks the
    barrier."""
    meeting, results = (threading.Barrier(2, timeout=10), {}), [None, None]

    def run(rank):
        mesh = Shared(rank == 0, meeting, **stage)
        try:
            results[rank] = work(Accord(mesh, "cpu", 3, meets), mesh.leads)
        except (StepFailedTogether, ValueError, threading.BrokenBarrierError) as error:
            results[rank] = error
            if not isinstance(error, StepFailedTogether):
                meeting[0].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def fail():
    raise ValueError("planted")


def said(*drafts, dropped=0):
    return Proposal(list(drafts), None, dropped)


def drawing(accord, count, own, times=2, end=None):
    """A proposal of so many rounds of ``count`` drafts each; ``own`` is what this rank would draw."""
    rounds = [accord.draw(count, lambda: Drawn([own] * count, None)).tokens for _ in range(times)]
    if end is not None:
        end()
    return said(*map(list, zip(*rounds, strict=True)))


def test_a_rank_that_is_alone_takes_its_own_word():
    accord = Accord(Mesh(), "cpu", 0)
    choices = Choices([[1]], [0])
    assert accord.choices(1, lambda: choices) is choices
    assert accord.drafts(1, lambda: said([])) == said([])
    assert accord.draw(1, lambda: Drawn([4], None)) == Drawn([4], None)
    assert accord.drafts(2, fail) == Proposal([[], []], None, 1, failed=True)
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
        return accord.drafts(2, lambda: said([1, 2], [], dropped=1) if leads else said([9], [9, 9]))

    assert on_two(work) == [said([1, 2], [], dropped=1)] * 2


def test_the_draws_of_the_leading_rank_are_everybodys():
    def work(accord, leads):
        return accord.drafts(2, lambda: drawing(accord, 2, own=7 if leads else 9))

    assert on_two(work) == [said([7, 7], [7, 7])] * 2


NOTHING = Proposal([[], []], None, 1, failed=True)


@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("meets", [False, True])
def test_a_leading_rank_that_fails_drops_this_proposal_on_every_rank_however_far_they_are(rounds, meets):
    """In the draw after so many rounds, where the other has two; and the next step is as any other."""
    def work(accord, leads):
        own = 7 if leads else 9

        def propose():
            return drawing(accord, 2, own, rounds, lambda: accord.draw(2, fail)) if leads else drawing(accord, 2, own)

        return accord.drafts(2, propose), accord.drafts(1, lambda: drawing(accord, 1, own))

    assert on_two(work, meets) == [(NOTHING, said([7, 7]))] * 2


def test_a_leading_rank_that_fails_before_it_draws_leaves_nobody_waiting():
    def work(accord, leads):
        first = accord.drafts(2, fail if leads else lambda: drawing(accord, 2, 9))
        return first, accord.drafts(2, lambda: drawing(accord, 2, own=7 if leads else 9))

    assert on_two(work) == [(NOTHING, said([7, 7], [7, 7]))] * 2


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_rank_that_fails_alone_takes_the_drafts_of_the_leading_one(rounds):
    def work(accord, leads):
        def propose():
            return drawing(accord, 2, 7) if leads else drawing(accord, 2, 9, rounds, fail)

        return accord.drafts(2, propose), accord.drafts(2, lambda: drawing(accord, 2, own=7 if leads else 9))

    whole = said([7, 7], [7, 7])
    assert on_two(work) == [(whole, whole), (whole._replace(failed=True), whole)]


def test_a_rank_that_would_draw_more_often_than_the_leading_one_takes_its_drafts():
    def work(accord, leads):
        return accord.drafts(2, lambda: drawing(accord, 2, 7, 1) if leads else drawing(accord, 2, 9, 3))

    assert on_two(work) == [said([7], [7]), said([7], [7])._replace(failed=True)]


def test_a_speculator_that_goes_on_although_its_draws_end_waits_for_nobody():
    def work(accord, leads):
        def stubborn():
            for _ in range(3):
                with contextlib.suppress(ProposalEndedError):
                    accord.draw(1, fail)
            return said([9])

        return accord.drafts(1, fail if leads else stubborn)

    leader, follower = on_two(work)
    assert leader.failed and follower.failed and leader.drafts == follower.drafts == [[]]


def test_where_ranks_may_meet_in_the_target_one_that_fails_between_draws_is_lost_rather_than_wrong():
    """Another may wait in a collective that this rank's next one would be taken for."""
    for failing in (True, False):
        results = on_two(
            lambda accord, leads, failing=failing: accord.drafts(
                2, fail if leads is failing else lambda: said([1], [2])), meets=True)
        assert [isinstance(result, ValueError) for result in results] == [failing, not failing]


def test_more_drafts_at_once_than_the_step_has_places_are_refused_on_every_rank():
    assert on_two(lambda accord, leads: accord.drafts(2, lambda: drawing(accord, 7, 1))) == [NOTHING] * 2


def test_a_rank_that_fails_to_choose_fails_the_step_on_every_rank_together():
    leader, follower = on_two(lambda accord, leads: accord.choices(2, fail))
    assert isinstance(leader, StepFailedTogether) and isinstance(leader.__cause__, ValueError)
    assert isinstance(follower, StepFailedTogether) and follower.__cause__ is None


def test_a_proposer_that_fails_is_told_to_later_stages_too():
    line = queue.SimpleQueue()
    first = on_two(lambda accord, leads: accord.drafts(2, fail), last=False, line=line)
    later = on_two(lambda accord, leads: accord.drafts(2, fail), first=False, line=line)
    assert [*first, *later] == [NOTHING] * 4


def test_drafts_reach_later_stages_with_their_lengths_and_how_many_were_dropped():
    line, told = queue.SimpleQueue(), said([4, 5, 6], [], [7], dropped=2)
    on_two(lambda accord, leads: accord.drafts(3, lambda: told), last=False, line=line)
    assert on_two(lambda accord, leads: accord.drafts(3, fail), first=False, line=line) == [told] * 2


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
    seen.clear()
    accord.drafts(2, lambda: drawing(accord, 2, 7))
    accord.drafts(2, fail)
    assert seen == [(torch.Size([2, 5]), torch.int64)] * 4
