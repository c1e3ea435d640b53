"""The same greedy tokens from several engines behind a router as from one."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.request import FinishReason, RequestOutput

ROUTERS = ["round_robin", "least_loaded", "prefix_aware"]


def data(tiny: Any, replicas: int = 2, router: Any = "least_loaded", **changes: Any) -> dict[str, Any]:
    return tiny.config("chunked", "prefix", "none", 2, **{
        "parallel": [{"use": "data", "replicas": replicas, "router": router}], **changes})


def cached(seen: Counter[str]) -> int:
    return seen["cached tokens"]


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_gives_the_tokens_of_one_engine_and_both_replicas_work(
    deploy: Any, book: Any, tiny: Any, router: str,
) -> None:
    running = deploy(data(tiny, router=router))
    prompts = tiny.prompts()
    for abort in ({}, {}, {1: 3, 4: 3}):
        for prompt, output in zip(prompts, running.generate(prompts, 24, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    shares = [seen["length"] + seen["abort"] for seen in running.seen]
    assert sum(shares) == 3 * len(prompts)
    assert max(shares) <= 2 * min(shares), shares
    assert sum(seen["abort"] for seen in running.seen) == 2


def test_a_burst_of_16_is_8_and_8_before_any_engine_has_reported_any_of_it(deploy: Any, tiny: Any) -> None:
    running = deploy(data(tiny))
    with running.halted():
        boxes = running.submit([[5, 6, 7, index] for index in range(2, 18)], 4)
        assert [status.loads.dispatched for status in running.built.engine.engines()] == [8, 8]
    running.wait(boxes)
    assert [seen["length"] for seen in running.seen] == [8, 8]


@pytest.mark.parametrize("manager", ["prefix", "radix"])
def test_requests_follow_their_prefix_and_no_other_router_finds_as_much(
    deploy: Any, tiny: Any, manager: str,
) -> None:
    """Four families of prompts, one member of each at a time: whoever remembers computes a beginning once."""
    hits = {}
    for router in ({"use": "prefix_aware", "max_imbalance": 8}, "round_robin"):
        config = data(tiny, 3, router, num_blocks=200)
        config["kvcache"]["use"] = manager
        running = deploy(config)
        for member in range(6):
            for family in range(4):
                running.generate([[10 + family] * 32 + [member + 2] * 3], 2)
        running.assert_clean()
        hits[str(router)] = sum(map(cached, running.seen))
        assert min(seen["length"] for seen in running.seen) >= 6, "every engine should work"
    aware, turns = hits.values()
    assert aware == 4 * 5 * 32
    assert turns < aware


def test_forks_go_where_their_parent_is_and_share_its_pages(deploy: Any, book: Any, tiny: Any) -> None:
    running = deploy(data(tiny, router="round_robin", num_blocks=100))
    prompt = [5, 6, 7] * 7
    with running.halted():
        boxes = [running.submit_one(0, prompt, 8)]
        boxes += [running.submit_one(index, prompt, 8, fork_of=running.name(0)) for index in (1, 2, 3)]
    for answer in running.wait(boxes):
        book.compare(tiny.reference, prompt, answer.token_ids)
    running.assert_clean()
    assert sorted(seen["length"] for seen in running.seen) == [0, 4]
    assert sum(seen["computed"] for seen in running.seen) == len(prompt) + 3 + 4 * 7


def test_deployments_nest(deploy: Any, book: Any, tiny: Any) -> None:
    running = deploy(data(tiny, parallel=[
        {"use": "data", "replicas": 2, "router": "prefix_aware"}, {"use": "data", "replicas": 2}]))
    names = [built.replica.name for built in running.built.engines]
    assert names == ["0.0", "0.1", "1.0", "1.1"]
    assert [status.name for status in running.built.engine.engines()] == names
    prompts = tiny.prompts()
    for prompt, output in zip(prompts * 2, running.generate(prompts * 2, 12), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    assert [seen["length"] for seen in running.seen] == [4, 4, 4, 4]


def test_replicas_in_one_process_share_their_weights_and_nothing_else(deploy: Any, tiny: Any) -> None:
    running = deploy(data(tiny))
    first, second = ({part.kind: part for part in built.components} for built in running.built.engines)
    assert first["model"] is second["model"]
    assert first["operators"] is second["operators"], "a part of the model"
    for kind in first.keys() - {"model", "operators"}:
        assert first[kind] is not second[kind], kind


def test_a_lost_replica_ends_its_own_requests_and_the_others_serve_on(deploy: Any, tiny: Any, caplog: Any) -> None:
    running = deploy(data(tiny))
    engine = running.built.engine
    boxes = running.submit([[5, 6, 7, index] for index in range(2, 10)], 60)
    running.lose(0)
    answers = running.wait(boxes)
    assert Counter(answer.finish_reason for answer in answers) == {FinishReason.ERROR: 4, FinishReason.LENGTH: 4}
    assert "planted" in next(answer.error for answer in answers if answer.error)
    assert engine.health() is None
    assert engine.failure is None
    assert ["planted" in (status.problem or "") for status in engine.engines()] == [True, False]
    assert len(running.generate([[5, 6]] * 5, 3)) == 5
    assert running.seen[1]["length"] == 4 + 5
    assert [record.getMessage() for record in caplog.records if "is lost, 1 of 2 serve on" in record.getMessage()]
    running.lose(1)
    assert "engine 0: the engine's loop has ended" in engine.failure
    assert engine.health() == engine.failure


def test_an_abort_finds_its_request_and_ends_it_once(deploy: Any, tiny: Any) -> None:
    running = deploy(data(tiny))
    with running.halted():
        boxes = running.submit([[5, 6, 7, index] for index in range(2, 10)], 60)
        for index in (0, 3, 3):
            running.built.engine.abort(running.name(index))
    running.built.engine.abort("never seen")
    reasons = [answer.finish_reason for answer in running.wait(boxes)]
    assert [index for index, reason in enumerate(reasons) if reason is FinishReason.ABORT] == [0, 3]
    running.assert_clean()
    assert running.built.engine.loads().dispatched == 0


def test_an_id_that_lives_already_is_refused_whichever_engine_would_get_it(deploy: Any, tiny: Any) -> None:
    running = deploy(data(tiny))
    outputs: list[RequestOutput] = []
    with running.halted():
        boxes = running.submit([[5, 6, 7]], 4)
        running.built.engine.add(running.request(0, [5, 6, 7], max_tokens=4), outputs.append)
    assert [one.finish_reason for one in outputs] == [FinishReason.ERROR]
    assert "lives already" in (outputs[0].error or "")
    assert running.wait(boxes)[0].finish_reason == "length"


def test_a_reset_reaches_every_engine(deploy: Any, tiny: Any) -> None:
    running = deploy(data(tiny, router="round_robin"))
    running.generate([[7] * 20] * 2, 2)
    assert running.built.engine.reset() == 10
    running.generate([[7] * 20] * 2, 2)
    assert sum(map(cached, running.seen)) == 0


def test_a_router_that_raises_is_named_counted_and_does_without(deploy: Any, tiny: Any, caplog: Any) -> None:
    running = deploy(data(tiny))
    router = next(part for part in running.built.fronts if part.kind == "router")
    router.pick = lambda request, candidates: 1 // 0
    with running.halted():  # so that none has ended when the last is given out
        boxes = running.submit([[5, 6, 7]] * 4, 4)
    assert len(running.wait(boxes)) == 4
    assert running.built.engine.loads().extra["misrouted"] == 4
    assert "least_loaded" in caplog.text
    assert [seen["length"] for seen in running.seen] == [2, 2]


def test_a_full_queue_of_one_engine_sends_requests_to_the_other_and_two_refuse(deploy: Any, tiny: Any) -> None:
    from hotswap.core.errors import QueueFullError

    running = deploy(data(tiny, router="round_robin", server={"max_queue": 1}))
    with running.halted(), pytest.raises(QueueFullError):
        running.submit([[5, 6, 7]] * 100, 4)
    running.assert_idle()


def test_one_engine_that_cannot_start_leaves_none_running(deploy: Any, tiny: Any) -> None:
    before = threading.active_count()
    with pytest.raises(Exception, match="num_blocks"):
        deploy(data(tiny, num_blocks=3))
    assert threading.active_count() == before


SCRIPT = """
import json, sys, weakref
from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine

built = build_engine(load_config(json.loads(sys.argv[1]), environ={}), progress=False)
weakref.finalize(built, built.engine.stop)
print("runs", flush=True)
"""


def test_a_process_that_ends_without_a_word_stops_its_engines(tiny: Any) -> None:
    config = json.dumps(data(tiny, kv_transfer="shm"))
    before = set(Path("/dev/shm").glob("hotswap-kv-*"))
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, config], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])})
    assert (process.returncode, process.stdout) == (0, "runs\n"), process.stderr
    assert "Traceback" not in process.stderr
    assert set(Path("/dev/shm").glob("hotswap-kv-*")) <= before
