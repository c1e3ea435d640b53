"""Hugging Face transformers' ``generate`` on padded batches. ``model`` is a folder; options: ``dtype``, and ``batch``,
the most requests of one. Requests that ask for as many tokens share a batch, so that little is decoded for nothing."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cpu.engine import Answer, Setup
from benchmarks.workloads import Item

DISTRIBUTIONS = ("transformers", "torch")
BATCH = 16


class Offline:
    def __init__(self, setup: Setup) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(setup.threads)
        self._batch = int(setup.options.get("batch", BATCH))
        dtype = getattr(self._torch, setup.options.get("dtype", "bfloat16"))
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=dtype, attn_implementation="sdpa").eval()

    def run(self, items: Sequence[Item], streams: int) -> list[Answer]:
        size = min(streams, self._batch)
        order = sorted(range(len(items)), key=lambda index: items[index].max_tokens)
        answers = [Answer(0.0) for _ in items]
        begun = time.perf_counter()
        for start in range(0, len(order), size):
            part = order[start : start + size]
            stamps = self._generate([items[index] for index in part])
            for index in part:
                answers[index].chunks = [(stamp - begun, 1) for stamp in stamps[: items[index].max_tokens]]
        return answers

    def _generate(self, items: Sequence[Item]) -> list[float]:
        """When each token came, of all items at once."""
        torch, stamps = self._torch, list[float]()
        width, tokens = max(len(item.prompt) for item in items), max(item.max_tokens for item in items)
        ids = torch.zeros(len(items), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, width - len(item.prompt) :] = torch.tensor(item.prompt)
            mask[row, width - len(item.prompt) :] = 1

        def hear(sequences: Any, scores: Any, **_: Any) -> Any:
            stamps.append(time.perf_counter())
            return torch.zeros(len(items), dtype=torch.bool)

        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                pad_token_id=0, stopping_criteria=[hear])
        return stamps

    def close(self) -> None:
        """It ends with its process."""
