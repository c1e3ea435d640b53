"""hotswap. ``model`` is a config file; options are config keys ("attention.use": cpu)."""

import itertools
import json
import queue
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cpu.engine import Answer, Command, Setup
from benchmarks.workloads import Item

DISTRIBUTIONS = ("hotswap", "torch")


class Offline:
    def __init__(self, setup: Setup) -> None:
        from hotswap.server.llm import LLM

        self._llm = LLM(setup.model, **{key.replace(".", "__"): value for key, value in _sets(setup).items()})
        self._ids = itertools.count()

    def run(self, items: Sequence[Item], streams: int) -> list[Answer]:
        from hotswap.core.request import Request, RequestOutput, SamplingParams

        ended: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        answers: list[Answer] = []
        begun = time.perf_counter()

        def send(item: Item) -> None:
            answer = Answer(time.perf_counter() - begun)
            answers.append(answer)

            def hear(output: RequestOutput) -> None:
                if output.token_ids:
                    answer.chunks.append((time.perf_counter() - begun, len(output.token_ids)))
                if output.finish_reason is not None:
                    ended.put(output)

            sampling = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
            self._llm.served.engine.add(Request(f"bench-{next(self._ids)}", item.prompt, sampling), hear)

        waiting = iter(items)
        for item in itertools.islice(waiting, streams):
            send(item)
        for _ in items:
            output = ended.get()
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            for item in itertools.islice(waiting, 1):
                send(item)
        return answers

    def close(self) -> None:
        self._llm.close()


def _sets(setup: Setup) -> dict[str, Any]:
    return {"execution.num_threads": setup.threads, **setup.options}


def serve(setup: Setup, python: str, port: int) -> Command:
    sets = {**_sets(setup), "server.host": "127.0.0.1", "server.port": port}
    flags = [word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return Command([python, "-m", "hotswap", "serve", setup.model, *flags], ready="/ready")
