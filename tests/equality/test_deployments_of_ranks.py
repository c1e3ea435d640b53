"""Deployments whose engines are processes: of one rank each, and of several, with other sizes on either side."""

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TENSOR = {"use": "tensor", "size": 2}


@pytest.fixture
def workers(children: Any) -> Any:
    """A function that gives the ids of this process's children that run our workers."""
    return lambda: {pid for pid in children(os.getpid()) if b"hotswap" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def folders(running: Any) -> list[Path]:
    """Where the engines' ranks keep pages for others; of this test alone, whatever else runs on the machine."""
    return [built.engine.loop.transfers.component.folder for built in running.built.engines]


@pytest.mark.parametrize(("wire", "prefill", "decode", "inner", "ranks"), [
    ("tcp", [], [], [], (1, 1)), ("shm", [], [TENSOR], [], (1, 2)), ("tcp", [TENSOR], [], [], (2, 1)),
    ("shm", None, None, [TENSOR], (2, 2)),
], ids=["tcp between two processes", "shm from one rank to two", "tcp from two ranks to one", "shm, all over tensor2"])
def test_pages_travel_between_processes_and_tensor_sizes(
    workers: Any, deploy: Any, book: Any, tiny: Any, wire: str, prefill: Any, decode: Any, inner: Any,
    ranks: tuple[int, int],
) -> None:
    config = tiny.config("chunked", "prefix", "none", 2, num_blocks=300, parallel=[
        {"use": "disaggregated", "prefill_parallel": prefill, "decode_parallel": decode}, *inner])
    config["kv_transfer"] = {"use": wire, "hold_s": 2}
    config["execution"]["use"] = "processes"
    running = deploy(config)
    assert len(workers()) == sum(ranks)
    kept = folders(running)
    assert all(folder.is_dir() for folder in kept)
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    first, second = (built.engine.loop.transfers.counters() for built in running.built.engines)
    assert (first["kept"], first["read"], second["fetched"], second["failed"]) == (8, 8, 8, 0)
    assert running.seen[1]["computed"] == 11 * len(prompts), "nothing is computed twice"
    weights = [
        [report.kv_bytes for report in built.engine.call(built.engine.loop.parts.executor.report)]
        for built in running.built.engines]
    assert tuple(map(len, weights)) == ranks
    assert sum(weights[0]) == sum(weights[1]), "a rank of two has half of the heads"
    if ranks == (1, 1):
        os.kill(max(workers()), 9)
        lost = running.wait(running.submit(prompts, 40))
        assert {str(answer.finish_reason) for answer in lost} <= {"error", "length"}
        assert running.built.engine.health() is None
        for prompt, output in zip(prompts, running.generate(prompts, 8), strict=True):
            book.compare(tiny.reference, prompt, output)
    running.built.engine.stop()
    assert not workers()
    assert not any(folder.exists() for folder in kept)


def test_replicas_of_two_ranks_each_behind_a_router(workers: Any, deploy: Any, book: Any, tiny: Any) -> None:
    running = deploy(tiny.config("chunked", "prefix", "none", 2, parallel=[
        {"use": "data", "replicas": 2, "router": "prefix_aware"}, TENSOR]))
    assert len(workers()) == 4
    prompts = tiny.prompts()
    for prompt, output in zip(prompts * 2, running.generate(prompts * 2, 12), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    assert min(seen["length"] for seen in running.seen) >= 4
    victim, *_ = sorted(workers())
    os.kill(victim, 9)
    boxes = running.submit(prompts * 2, 12)
    reasons = [answer.finish_reason for answer in running.wait(boxes)]
    assert running.built.engine.health() is None
    assert reasons.count("length") >= len(prompts)
    assert sum(status.problem is not None for status in running.built.engine.engines()) == 1
    for prompt, output in zip(prompts, running.generate(prompts, 8), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.built.engine.stop()
    assert not workers()


def test_sizes_that_cannot_work_are_refused_before_any_process_starts(workers: Any, deploy: Any, tiny: Any) -> None:
    from hotswap.core.errors import ConfigError

    with pytest.raises(ConfigError, match="3"):
        deploy(tiny.config("chunked", "prefix", "none", 1, parallel=[
            {"use": "data", "replicas": 2}, {"use": "tensor", "size": 3}]))
    assert not workers()
