"""Engines in lock-step: as many turns on every rank, steps together where they can be, and one end for all."""

import itertools
from collections import deque
from queue import SimpleQueue

import pytest
import torch

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.execution.channel import Frame, Kind
from hotswap.core.interfaces.parallel import Across, Meeting, RankPlan, Replica
from hotswap.core.modeling.mesh import Routed
from hotswap.plugins.parallel import exchange
from hotswap.plugins.parallel.lockstep import Lockstep, lockstep_of
from hotswap.plugins.parallel.rank import next_frame

EXECUTE, JOIN, REPORT = (Frame(kind, b"") for kind in (Kind.EXECUTE, Kind.JOIN, Kind.REPORT))


class Recorded:
    """In place of a crew."""

    def __init__(self):
        self.frames, self.problem = [], None

    def send(self, kind, payload, rank):
        if self.problem is not None:
            raise EngineStoppedError(self.problem)
        self.frames.append(kind)

    def fail(self, problem):
        self.problem = problem


@pytest.fixture
def three():
    lockstep, crews = Lockstep(3), [Recorded() for _ in range(3)]
    for index, crew in enumerate(crews):
        lockstep.enter(index, crew)
    return lockstep, crews


def test_a_step_of_one_engine_is_joined_by_every_other_and_all_see_one_order(three):
    lockstep, crews = three
    for index in (0, 2, 2, 1):
        lockstep.submit(index, lambda index=index: crews[index].send(Kind.EXECUTE, b"", 0))
    assert [crew.frames for crew in crews] == [
        [Kind.EXECUTE, Kind.JOIN, Kind.JOIN, Kind.JOIN],
        [Kind.JOIN, Kind.JOIN, Kind.JOIN, Kind.EXECUTE],
        [Kind.JOIN, Kind.EXECUTE, Kind.EXECUTE, Kind.JOIN]]


def test_an_engine_that_is_gone_ends_the_others_once(three):
    lockstep, crews = three
    lockstep.leave(1, "rank 0 was killed by SIGKILL")
    lockstep.leave(0, "because of the other")
    assert [crew.problem and "SIGKILL" in crew.problem for crew in crews] == [True, None, True]
    with pytest.raises(EngineStoppedError, match="is gone"):
        lockstep.submit(0, lambda: None)


def test_an_engine_that_is_told_to_stop_ends_no_other_but_nothing_can_run_without_it(three):
    lockstep, crews = three
    lockstep.leave(1, None)
    assert [crew.problem for crew in crews] == [None] * 3
    with pytest.raises(EngineStoppedError, match="is gone"):
        lockstep.submit(0, lambda: None)


@pytest.mark.parametrize("arrived, expected", [
    ([JOIN], [JOIN]), ([EXECUTE], [EXECUTE]), ([JOIN, EXECUTE], [EXECUTE, JOIN]),
    ([JOIN, JOIN, EXECUTE, JOIN], [EXECUTE, JOIN, JOIN, JOIN]), ([JOIN, REPORT, EXECUTE], [EXECUTE, REPORT, JOIN]),
    ([EXECUTE, JOIN, EXECUTE], [EXECUTE, EXECUTE, JOIN]),
])
def test_a_step_of_our_own_that_waits_runs_in_place_of_a_join(arrived, expected):
    frames, held = SimpleQueue(), deque()
    for frame in arrived:
        frames.put(frame)
    assert [next_frame(frames, held) for _ in arrived] == expected


@pytest.mark.parametrize("arrived", list(itertools.product([JOIN, EXECUTE], repeat=4)))
def test_however_they_come_no_turn_is_lost_and_steps_keep_their_order(arrived):
    numbered = [Frame(frame.kind, bytes([number])) for number, frame in enumerate(arrived)]
    frames, held = SimpleQueue(), deque()
    for frame in numbered:
        frames.put(frame)
    taken = [next_frame(frames, held) for _ in numbered]
    assert sorted(taken) == sorted(numbered)
    steps = [frame.payload for frame in taken if frame.kind is Kind.EXECUTE]
    assert steps == sorted(steps)


def test_experts_over_engines_need_a_deployment_and_at_most_as_many_engines_as_experts():
    across = Across("expert", ("expert",), 3)
    assert lockstep_of(RankPlan(), None) is None
    with pytest.raises(ConfigError, match=r"parallel: \[{use: data, replicas: 2}, expert\]"):
        lockstep_of(RankPlan(across=across), Meeting())
    with pytest.raises(ConfigError, match="4 engines cannot share 3 of expert"):
        lockstep_of(RankPlan(across=across, replica=Replica("0", 0, 4)), Meeting())
    meeting = Meeting()
    found = [lockstep_of(RankPlan(across=across, replica=Replica(str(i), i, 2, i)), meeting) for i in range(2)]
    assert found[0] is found[1] is not None


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_tokens_go_once_to_each_rank_that_has_an_expert_of_theirs_and_come_back_added(tokens, monkeypatch):
    """Two ranks; this one alone has tokens, and the other's answers are computed here."""
    torch.manual_seed(0)
    x, experts = torch.randn(tokens, 4), torch.stack([torch.randperm(6)[:2] for _ in range(tokens)]) if tokens else (
        torch.zeros(0, 2, dtype=torch.int64))
    owner, sent = experts // 3, []

    def loopback(output, given, received=None, splits=None, group=None):
        """Whatever goes to a rank comes back from it, as if it had the same tokens to send here."""
        output.copy_(given)
        sent.append(given.shape)

    monkeypatch.setattr(exchange.dist, "all_to_all_single", loopback)
    routed = exchange.dispatch(Routed(x, experts, torch.rand(tokens, 2)), owner, 2, None, lambda x: None)
    per_rank = [int((owner == rank).any(1).sum()) for rank in (0, 1)]
    assert routed.back.sent == per_rank and len(routed.x) == sum(per_rank) <= 2 * tokens
    for rank, rows in enumerate(routed.back.order.split(per_rank)):
        assert (owner[rows] == rank).any(1).all()
    total = exchange.combine(routed.x, routed, None, lambda x: None)
    times = (owner == 0).any(1).float() + (owner == 1).any(1).float()
    torch.testing.assert_close(total, x * times[:, None])
