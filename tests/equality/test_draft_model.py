"""Speculation with a draft model: the tokens of transformers, with everything else switched on at once."""

from pathlib import Path
from typing import Any

import pytest

MAX_TOKENS = 24
NOISE = 0.03
"""Of the standard deviation of each weight: so much that 20 to 80 % of the drafts are accepted."""


@pytest.fixture(scope="session")
def noisy(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with noise on its weights: a draft model that is often right."""
    import copy

    import torch

    model = copy.deepcopy(tiny.reference.model)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += NOISE * parameter.std() * torch.randn(parameter.shape, generator=random)
    path = tmp_path_factory.mktemp("noisy-llama")
    model.save_pretrained(path)
    return path


def acceptance(seen: Any) -> float:
    return float(seen["accepted"] / (seen["accepted"] + seen["rejected"]))


@pytest.mark.parametrize(("scheduler", "kv", "depth"), [
    ("continuous", "contiguous", 1), ("continuous", "paged", 2), ("chunked", "paged", 1), ("chunked", "prefix", 1),
    ("chunked", "prefix", 2),
])
def test_a_draft_model_changes_no_token(
    run: Any, book: Any, tiny: Any, noisy: Path, scheduler: str, kv: str, depth: int,
) -> None:
    chunks: dict[str, Any] = {"max_chunk": 7} if scheduler == "chunked" else {}
    speculator = {"use": "draft", "model": str(noisy), "max_draft": 3}
    engine = run(tiny.config({"use": scheduler, **chunks}, kv, speculator, depth))
    prompts = tiny.prompts()
    for abort in ({}, {}, {1: 3, 4: 3}):  # cold, warm, with requests that are given up
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    seen = engine.seen
    assert engine.built.engine.loop.max_depth_seen == depth
    assert seen["abort"] == 2
    assert 0.2 < acceptance(seen) < 0.8, dict(seen)
    assert bool(seen["cached tokens"]) is (kv == "prefix")
    report = engine.built.engine.loads().extra["speculation"]
    assert (report["accepted"], report["drafted"] - report["accepted"]) == (seen["accepted"], seen["rejected"])
    assert sorted(report["acceptance_rate_by_position"], reverse=True) == report["acceptance_rate_by_position"]
    assert report["draft_seconds"] > 0
    assert report["verify_seconds"] > 0
    print(report)
    if scheduler != "continuous":
        assert seen["cut prompts"]
    if kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_target_as_its_own_draft_is_always_right(run: Any, tiny: Any, depth: int) -> None:
    """Also behind cached prefixes, preemptions and chunks: its cache never lacks anything and is never stale."""
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 4}
    engine = run(tiny.config({"use": "chunked", "max_chunk": 7}, "prefix", speculator, depth))
    for _ in range(3):
        engine.generate(tiny.prompts(), MAX_TOKENS)
    engine.assert_clean()
    seen = engine.seen
    assert seen["cached tokens"]
    assert seen["preempted"]
    assert seen["accepted"] > 300
    assert seen["rejected"] <= 0.01 * seen["accepted"], "beside near ties, every draft should be right"


@pytest.mark.slow
def test_each_rank_of_tensor_parallelism_has_a_draft_model_and_all_take_the_same_drafts(
    run: Any, book: Any, tiny: Any, noisy: Path,
) -> None:
    """Greedy rows and sampled ones, so that drafts are drawn, too."""
    speculator = {"use": "draft", "model": str(noisy), "max_draft": 3}
    engine = run(tiny.config("chunked", "prefix", speculator, 2, parallel=[{"use": "tensor", "size": 2}]))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert 0.2 < acceptance(engine.seen) < 0.8, dict(engine.seen)
    before = engine.seen["accepted"]
    engine.generate(prompts, MAX_TOKENS, temperature=1.0, seed=3)
    assert engine.seen["accepted"] > before
    engine.assert_clean()
