"""What a step has come to reaches its requests, all of it, behind the last of them."""

from typing import Any

import pytest

from hotswap.core.engine.pool import RequestState
from hotswap.core.request import FinishReason, Request, SamplingParams
from hotswap.core.testing.rig import expected, make_rig


def test_the_outputs_of_a_step_leave_together_behind_its_last_row() -> None:
    rig, seen = make_rig(max_running=4), list[list[int]]()
    for i in range(4):
        request = Request(f"r{i}", [i] * 3, SamplingParams(temperature=0, max_tokens=4))
        rig.loop.add(request, lambda output: seen.append(
            [len(state.tokens) for state in rig.loop.pool.states.values()]))
    rig.run()
    steps = [seen[begin : begin + 4] for begin in range(0, len(seen), 4)]
    assert steps == [[[length] * 4] * 4 for length in (4, 5, 6)] + [[[]] * 4]


def test_a_row_that_raises_keeps_back_no_output_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(max_running=2)
    requests = [rig.add(name, [1, 2, 3], max_tokens=1) for name in ("first", "second")]
    retire = rig.loop.lifecycle.retire

    def failing(state: RequestState, reason: FinishReason) -> Any:
        if state.id == "second":
            raise RuntimeError("planted")
        return retire(state, reason)

    monkeypatch.setattr(rig.loop.lifecycle, "retire", failing)
    with pytest.raises(RuntimeError, match="planted"):
        rig.run()
    assert rig.client.tokens("first") == expected(requests[0]) and rig.client.endings("first") == ["length"]
