"""OpenVINO GenAI's continuous batching. ``model`` is a GGUF file (f16, q8_0, q4_1, q4_0) or an exported folder;
options: ``precision`` of inference (bf16, f32), the plugin's own choice by default."""

import importlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.cpu.engine import Answer, Setup
from benchmarks.workloads import Item

DISTRIBUTIONS = ("openvino-genai", "openvino")
CACHE_GIB, RUNNING, BATCH_TOKENS = 4, 64, 2048


class Offline:
    def __init__(self, setup: Setup) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIB, RUNNING
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
        if precision := setup.options.get("precision"):
            properties["INFERENCE_PRECISION_HINT"] = precision
        self._pipeline = self._genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", properties)
        self._next = 0

    def run(self, items: Sequence[Item], streams: int) -> list[Answer]:
        waiting, live = deque(enumerate(items)), dict[int, Any]()
        answers, told = [Answer(0.0) for _ in items], [0] * len(items)
        begun = time.perf_counter()
        while waiting or live:
            while waiting and len(live) < streams:
                index, item = waiting.popleft()
                answers[index].sent = time.perf_counter() - begun
                live[index] = self._send(item)
            self._pipeline.step()
            now = time.perf_counter() - begun
            for index, handle in list(live.items()):
                while handle.can_read():
                    count = sum(len(output.generated_ids) for output in handle.read().values())
                    told[index] += count
                    if count:
                        answers[index].chunks.append((now, count))
                if told[index] >= items[index].max_tokens:
                    del live[index]
            if live and not self._pipeline.has_non_finished_requests():
                raise RuntimeError(f"{len(live)} requests ended before their last token")
        return answers

    def _send(self, item: Item) -> Any:
        sampling = self._genai.GenerationConfig()
        sampling.max_new_tokens, sampling.ignore_eos = item.max_tokens, True
        sampling.do_sample = sampling.apply_chat_template = False
        self._next += 1
        prompt = self._openvino.Tensor(self._numpy.array([item.prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._next, prompt, sampling)

    def close(self) -> None:
        """It ends with its process."""
