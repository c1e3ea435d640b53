"""Which device an engine of a deployment gets, and how much of its memory."""

import pytest

from hotswap.core.execution.device import place
from hotswap.core.interfaces.parallel import Replica


@pytest.mark.parametrize(("device", "index", "count", "ranks", "found", "expected"), [
    ("cpu", 1, 4, 1, 0, ("cpu", 4)),  # one memory for all
    ("cuda", 0, 1, 1, 8, ("cuda", 1)),
    ("cuda", 2, 4, 1, 8, ("cuda:2", 1)),
    ("cuda", 3, 4, 1, 2, ("cuda:1", 2)),
    ("cuda", 2, 3, 1, 2, ("cuda:0", 2)),
    ("cuda:5", 1, 2, 1, 8, ("cuda:5", 2)),  # as the config says
    ("cuda", 1, 2, 4, 8, ("cuda", 1)),  # its ranks have devices of their own
])
def test_engines_are_dealt_out_over_the_devices(device, index, count, ranks, found, expected):
    assert place(device, Replica(str(index), index, count, index * ranks), ranks == 1, found) == expected


def test_the_ranks_of_two_engines_on_one_machine_lie_side_by_side(monkeypatch):
    import torch

    from hotswap.core.errors import ConfigError
    from hotswap.core.interfaces.parallel import MeshDim, RankPlan
    from hotswap.plugins.parallel import rank

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def device(first, local, scratch="/tmp/x"):
        plan = RankPlan((MeshDim("tensor", 2, ()),), replica=Replica("1", 1, 2, first))
        return rank._device(rank.Job(
            rank=local, address="", secret="", store="", scratch=scratch, plan=plan, entry="", arguments={},
            device="cuda", timeout_s=1.0, log_level=0, local_rank=local, local_size=2))

    assert [device(first, local) for first in (0, 2) for local in (0, 1)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert device(2, 1, scratch=None) == "cuda:1", "on a cluster the launcher deals them out"
    with pytest.raises(ConfigError, match="5 ranks need as many CUDA devices"):
        device(4, 0)
