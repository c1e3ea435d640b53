"""One engine in the Python of its own environment: a line of JSON in, a line of JSON out.

    PYTHON benchmarks/cpu/worker.py ADAPTER        where ADAPTER is a module such as benchmarks.cpu.adapters.vllm

The first line is its setup, answered by ``{"ready": true}`` once it is loaded. Every other line names a load,
``{"load": "mixed", "seed": 3, "quick": false}``, answered by the seconds that it took and each request's answer, or by
``{"error": "…"}``. It ends with its input. Whatever the engine prints goes to stderr.
"""

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])  # in place of this folder


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    from benchmarks.cpu.engine import Setup
    from benchmarks.cpu.loads import LOADS, WARM_UP

    adapter = importlib.import_module(sys.argv[1])
    del sys.path[0]  # the engine finds none of our names
    try:
        engine = adapter.Offline(Setup(**json.loads(sys.stdin.readline())))
    except Exception as error:
        traceback.print_exc()
        tell({"error": _words(error)})
        return
    tell({"ready": True})
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            load = WARM_UP if asked["load"] == "warm-up" else LOADS[asked["load"]]
            items = load.items(asked["seed"], asked["quick"])
            try:
                begun = time.perf_counter()
                given = engine.run(items, load.streams or len(items))
                wall = time.perf_counter() - begun
                tell({"wall": wall, "answers": [[answer.sent, answer.chunks] for answer in given]})
            except Exception as error:
                traceback.print_exc()
                tell({"error": _words(error)})
    finally:
        engine.close()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main()
