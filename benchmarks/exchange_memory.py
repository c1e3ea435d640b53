"""Whether exchanges leave memory behind: the resident bytes of a process behind each of many, in one engine.

Parts are drawn as by ``exchange.py``, but nobody waits for their first steps; every tenth exchange some prompts are
answered, which lets the old parts go.

    python benchmarks/exchange_memory.py --output benchmarks/results/exchange_memory.json
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

from exchange import PARTS, ROOT, WORDS, growth, settings_of

from hotswap import LLM
from hotswap.core.config import load_config
from hotswap.core.engine import exchange as engine_exchange
from hotswap.core.engine.build import build_engine
from hotswap.lab.environment import environment
from hotswap.server.served import served_by


def resident_mib() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux tells it"
    return int(found[1]) // 1024


def run(given: argparse.Namespace) -> list[int]:
    engine_exchange.IDLE_S = 0.0
    count, rng = given.exchanges, random.Random(given.seed)
    built = build_engine(load_config(given.config, [
        "dtype=float32", "max_model_len=512", f"kvcache.memory={given.cache}",
        f"execution.num_threads={given.threads}"]))
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 60))) for _ in range(4)]
    series: list[int] = []
    with LLM.of(served_by(built)) as llm:
        expected = [result.outputs[0].text for result in llm.generate(prompts, max_tokens=12, temperature=0)]
        while len(series) < count:
            path = rng.choice(list(PARTS))
            if path == "kvcache.eviction" and built.effective()["kvcache"]["use"] not in ("prefix", "radix"):
                continue
            if not built.exchange([f"{path}={rng.choice(PARTS[path])}"])[0].parts:
                continue
            if len(series) % 10 == 9:
                found = [result.outputs[0].text for result in llm.generate(prompts, max_tokens=12, temperature=0)]
                assert found == expected, "an exchange changed an answer"
            series.append(resident_mib())
            print(f"\r{len(series)} of {count}", end="", file=sys.stderr, flush=True)
    return series


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "quickstart.yaml"))
    parser.add_argument("--exchanges", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", default="64MiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result = {"settings": settings_of(given), "environment": environment(), "memory_mib": growth(run(given))}
    print(json.dumps(result["memory_mib"]))
    if given.output is not None:
        given.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
