"""Configs of ``examples/models``, whose models are too large to be here: a tiny one of the family in their place."""

from pathlib import Path
from typing import Any

import pytest


def assert_equal(engine: Any, book: Any, tiny: Any) -> None:
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, engine.generate(prompts, 12), strict=True):
        book.compare(tiny.reference, prompt, output)


@pytest.mark.slow
def test_expert_parallel(run: Any, book: Any, tiny_of: Any, example: Any) -> None:
    tiny = tiny_of("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    engine = run(example("expert_parallel", tiny.path))
    assert_equal(engine, book, tiny)
    reports = engine.built.engine.call(engine.built.engine.loop.parts.executor.report)
    loads = [report.statistics["expert_load.0"] for report in reports]
    assert len(loads) == 2 and all(any(load) for load in loads), "each rank has experts that were asked for"


@pytest.mark.slow
def test_expert_over_data(deploy: Any, book: Any, tiny_of: Any, example: Any) -> None:
    tiny = tiny_of("Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    engine = deploy(example("expert_over_data", tiny.path))
    assert_equal(engine, book, tiny)
    assert all(seen["computed"] for seen in engine.seen), "both engines had requests of their own"


def test_every_example_is_started_here_or_beside_what_it_needs(example: Any) -> None:
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in example.names if f'example("{name}"' not in text] == []
