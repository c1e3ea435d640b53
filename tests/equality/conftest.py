"""Whole engines, from a config to tokens, against transformers' own greedy generation."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.config import load_config
from hotswap.core.engine.build import Built, build_engine
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.request import Request, RequestOutput, SamplingParams

NEAR_TIE = 1e-3
"""Where the reference's best two logits are closer than this, either may be chosen."""

MAX_NEAR_TIES = 0.01
"""At most this share of the compared positions may be near ties."""


class Counting(Observer):
    """Counts what happened, so that a run can prove that it exercised what it names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @hookimpl
    def hotswap_step_planned(self, message: Any, suspensions: Any) -> None:
        self.seen["suspensions"] += len(suspensions)
        self.seen["cut prompts"] += any(row.n_tokens > 1 for row in message.rows)
        self.seen["mixed steps"] += len({row.n_tokens > 1 for row in message.rows}) > 1

    @hookimpl
    def hotswap_step_finished(self, verdict: Any) -> None:
        for row in verdict.rows:
            self.seen["accepted"] += row.accepted
            self.seen["rejected"] += row.drafted - row.accepted

    @hookimpl
    def hotswap_request_finished(self, request: Any, reason: str) -> None:
        self.seen[reason] += 1
        self.seen["cached tokens"] += request.cached_tokens or 0
        self.seen["preempted"] += request.preemptions


@dataclass
class Reference:
    """transformers' logits for the tokens that were generated: its own greedy choice and the margin at each position."""

    model: Any
    _known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, float]]] = field(default_factory=dict)

    def __call__(self, prompt: Sequence[int], output: Sequence[int]) -> list[tuple[int, float]]:
        """(best token, how far it is ahead of the token that was chosen) for each token of ``output``."""
        key = (tuple(prompt), tuple(output))
        if key not in self._known:
            self._known[key] = self._judge(list(prompt), list(output))
        return self._known[key]

    @torch.inference_mode()
    def _judge(self, prompt: list[int], output: list[int]) -> list[tuple[int, float]]:
        logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
        ahead = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return list(zip(logits.argmax(-1).tolist(), ahead.tolist(), strict=True))


class TieBook:
    """How many positions were compared, and at how many the reference itself was undecided."""

    def __init__(self) -> None:
        self.compared = self.near_ties = 0

    def compare(self, reference: Reference, prompt: Sequence[int], output: Sequence[int]) -> None:
        for place, (token, (best, ahead)) in enumerate(zip(output, reference(prompt, output), strict=True)):
            self.compared += 1
            if token != best:
                assert ahead < NEAR_TIE, f"token {place} is {token}, transformers says {best}, which is {ahead:.4f} ahead"
                self.near_ties += 1

    def check(self) -> None:
        print(f"{self.near_ties} near ties in {self.compared} positions")
        assert self.near_ties <= MAX_NEAR_TIES * self.compared, f"{self.near_ties} in {self.compared}"


class Running:
    """A built engine and what a test needs of it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.built: Built = build_engine(load_config(config, environ={}), progress=False)
        self.counting = Counting()
        self.built.components.add(self.counting)
        self.count = 0

    @property
    def seen(self) -> Counter[str]:
        return self.counting.seen

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, abort: Sequence[int] = (), **sampling: Any,
    ) -> list[list[int]]:
        """The outputs of all prompts, submitted at once. Those in ``abort`` are given up after their third token."""
        outputs: list[list[int]] = [[] for _ in prompts]
        left = threading.Semaphore(0)
        engine = self.built.engine

        def submit(index: int) -> None:
            name = f"{self.count}-{index}"

            def sink(output: RequestOutput) -> None:
                assert output.error is None, output.error
                outputs[index] += output.token_ids
                if index in abort and len(outputs[index]) >= 3:
                    engine.abort(name)
                if output.finish_reason:
                    left.release()

            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
            engine.add(Request(name, list(prompts[index]), params), sink)

        for index in range(len(prompts)):
            submit(index)
        for _ in prompts:
            assert left.acquire(timeout=120), f"a request did not end: {engine.health()}"
        self.count += 1
        return outputs

    def assert_clean(self) -> None:
        loop = self.built.engine.loop
        self.built.engine.call(loop.parts.kv.check)
        usage = loop.parts.kv.usage()
        assert (usage.held, usage.fenced) == (0, 0)
        assert not loop.pool.states


@pytest.fixture
def run() -> Iterator[Any]:
    """``run(config)`` starts an engine that is stopped after the test."""
    started: list[Running] = []

    def start(config: dict[str, Any]) -> Running:
        started.append(Running(config))
        return started[-1]

    yield start
    for running in started:
        running.built.engine.stop()


@pytest.fixture
def book() -> Iterator[TieBook]:
    """Compares with the reference; after the test, near ties must have been rare."""
    ties = TieBook()
    yield ties
    ties.check()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """Two layers of random weights, wide enough apart that greedy choices are rarely close."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(path)
    return path, Reference(model)
