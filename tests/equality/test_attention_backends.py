"""Whole engines over other attention backends: the tokens of transformers."""

import random
from typing import Any

import pytest
import torch

from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.attention.triton.backend import TritonAttention

NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int | None]]:
    """The uniform query length of each step that a backend planned for, by the backend's class."""
    steps: dict[str, list[int | None]] = {}
    for backend in (TorchAttention, CPUAttention, TritonAttention):
        def plan(self: Any, state: Any, layout: Any, backend: Any = backend, plan: Any = backend.plan) -> None:
            steps.setdefault(f"{backend.__name__} {id(self)}", []).append(layout.uniform_query_len)
            plan(self, state, layout)

        monkeypatch.setattr(backend, "plan", plan)
    return steps


def interpreted() -> bool:
    triton = pytest.importorskip("triton")
    return bool(triton.knobs.runtime.interpret) and not torch.cuda.is_available()


def test_the_triton_kernels_give_the_tokens_of_transformers(run: Any, book: Any, tiny: Any, planned: Any) -> None:
    """In Triton's interpreter: chunks, prefix hits, drafts, preemption and two steps in flight, for a few tokens."""
    if not interpreted():
        pytest.skip("kernels are compiled here: see tests/attention/test_triton_gpu.py")
    settings = tiny.config({"use": "chunked", "max_chunk": 16}, "prefix", NGRAM, 2, num_blocks=33)
    settings["attention"] = "triton"
    engine = run(settings)
    agreeable = tiny.prompt(8, random.Random(57))  # its continuation repeats itself
    prompts = [agreeable, *(prompt for prompt in tiny.prompts() if 17 <= len(prompt) <= 32)]
    for prompt, output in zip(prompts, engine.generate(prompts, 10), strict=True):
        book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    [lengths] = planned.values()
    assert 1 in lengths
    assert None in lengths, "prompts should share steps with decodes"
    seen = engine.seen
    print(dict(seen))
    assert engine.built.engine.loop.max_depth_seen == 2
    assert seen["cached tokens"]
    assert seen["preempted"]
    assert seen["accepted"] and seen["rejected"]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_cpu_kernels_give_the_tokens_of_transformers(run: Any, thrice: Any, tiny: Any, depth: int) -> None:
    """Chunks, prefix hits, drafts and preemption."""
    seen = thrice(run(tiny.config("chunked", "prefix", NGRAM, depth, attention="cpu")), tiny, 24, depth)
    assert seen["cut prompts"] and seen["cached tokens"] and seen["preempted"]
    assert seen["accepted"] and seen["rejected"]


@pytest.mark.parametrize("decode", ["torch", "cpu", "triton"])
def test_one_backend_for_prefill_and_another_for_decode(
    run: Any, book: Any, tiny: Any, planned: Any, decode: str,
) -> None:
    if decode == "triton" and not interpreted():
        pytest.skip("there is no interpreter here")
    settings = tiny.config({"use": "chunked", "max_chunk": 16}, "prefix", {"use": "none"}, 2)
    settings["attention"] = {"use": "composite", "prefill": "torch", "decode": decode}
    engine = run(settings)
    prompts = [prompt for prompt in tiny.prompts() if len(prompt) < 26]
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, 6), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    uniform, mixed = sorted(planned.values(), key=lambda lengths: lengths[0] != 1)
    assert set(uniform) == {1}
    assert None in mixed and 1 not in mixed
    assert engine.built.engine.loop.max_depth_seen == 2
    assert engine.seen["cached tokens"]


@pytest.mark.gpu
@pytest.mark.real_model
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["triton", {"use": "composite", "prefill": "torch", "decode": "triton"}], ids=str)
def test_a_real_model_on_a_gpu_gives_the_tokens_of_transformers(
    run: Any, book: Any, smollm2: Any, attention: Any,
) -> None:
    engine = run({
        "model": "smollm2-135m-instruct", "dtype": "float32", "device": "cuda", "max_model_len": 1600, "observers": [],
        "attention": attention, "scheduler": {"max_batch_tokens": 512, "max_running": 16}, "speculator": NGRAM,
        "kvcache": {"memory": "1GiB"}, "execution": {"depth": 2},
    })
    rng = random.Random(0)
    prompts = [[rng.randrange(17, 49152) for _ in range(length)] for length in (1, 5, 16, 33, 250, 600, 1500)]
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, 24), strict=True):
            book.compare(smollm2, prompt, output)
    engine.assert_clean()
    assert engine.seen["cut prompts"]
    assert engine.seen["cached tokens"]
