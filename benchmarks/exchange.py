"""What an exchange costs: pauses by part, times between tokens with exchanges and without, memory after each.

Runs ``hotswap serve`` in a process of its own, opens streams, and exchanges parts at random while they run. Every
answer is compared with an undisturbed run's (greedy, float32).

    python benchmarks/exchange.py --output benchmarks/results/exchange.json
    python benchmarks/exchange.py --streams 4 --exchanges 10 --tokens 20     # a quick look
"""

import argparse
import concurrent.futures
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEY = "key-of-the-benchmark"
PARTS = {
    "scheduler": ("static", "continuous", "chunked", "prefill_first"),
    "scheduler.policy": ("fcfs", "priority", "fair_share", "shortest_first"),
    "kvcache": ("paged", "prefix", "radix", "contiguous"),
    "kvcache.eviction": ("lru", "fifo", "lfu", "slru"),
    "speculator": ("none", "ngram"),
    "attention": ("torch", "{use: composite, prefill: torch, decode: torch}"),
}
WORDS = (
    "the", "a", "small", "large", "red", "blue", "house", "tree", "river", "cat", "dog", "sings", "runs", "sleeps",
    "under", "over", "behind", "quickly", "slowly",
)


class Server:
    """``hotswap serve`` on a free port. ``log`` grows as it writes."""

    def __init__(self, config: str, sets: list[str]) -> None:
        arguments = [argument for text in sets for argument in ("--set", text)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotswap", "serve", config, "--port", "0", *arguments], stderr=subprocess.PIPE,
            text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving \S+ on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(self.log))
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]  # Linux has it

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=600)

    def stream(self, prompt: str, tokens: int) -> tuple[str, list[float]]:
        """The text, and when each of its chunks came."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        begun, texts, times = time.perf_counter(), [], []
        with self.ask("/v1/completions", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    texts.append(event["choices"][0]["text"])
                    times.append(time.perf_counter() - begun)
        return "".join(texts), times

    def exchange(self, text: str) -> dict[str, Any]:
        with self.ask("/admin/components", {"set": [text]}) as response:
            report: dict[str, Any] = json.load(response)["engines"][0]
        return report

    def config(self) -> dict[str, Any]:
        with self.ask("/server_info") as response:
            config: dict[str, Any] = json.load(response)["config"]
        return config


def run(server: Server, streams: int, tokens: int, exchanges: int, rng: random.Random) -> dict[str, Any]:
    prompts = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 120))) for _ in range(streams)]
    gaps: list[float] = []
    wrong = failed = done = 0
    pauses, memory = defaultdict(list), []
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        calm = list(pool.map(lambda prompt: server.stream(prompt, tokens), prompts))
        stop = threading.Event()

        def disturbed(index: int) -> None:
            nonlocal wrong, failed
            while not stop.is_set():
                try:
                    text, times = server.stream(prompts[index], tokens)
                except Exception as error:
                    print(f"a stream failed: {error}", file=sys.stderr)
                    failed += 1
                    continue
                wrong += text != calm[index][0]
                gaps.extend(after - before for before, after in zip(times, times[1:], strict=False))

        running = [pool.submit(disturbed, index) for index in range(streams)]
        while done < exchanges:
            path = rng.choice(list(PARTS))
            if path == "kvcache.eviction" and server.config()["kvcache"]["use"] not in ("prefix", "radix"):
                continue
            report = server.exchange(f"{path}={rng.choice(PARTS[path])}")
            if report["exchanged"]:
                manner = "computed again" if report["recomputed"] else "handed over"
                pauses[path if report["recomputed"] + report["handed_over"] == 0 else f"{path}, {manner}"].append(
                    report["pause_ms"])
                memory.append(server.memory())
                done += len(report["exchanged"])
        stop.set()
        for future in running:
            future.result()
    quiet = [after - before for _, times in calm for before, after in zip(times, times[1:], strict=False)]
    return {
        "exchanges": done, "failed": failed, "wrong": wrong,
        "pause_ms": {path: {"n": len(found), "median": statistics.median(found), "max": max(found)}
                     for path, found in sorted(pauses.items())},
        "itl_ms": {"undisturbed": quantiles(quiet), "with exchanges": quantiles(gaps)},
        "memory_mib": [round(value / 2**20) for value in memory],
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))} if ordered else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "quickstart.yaml"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--exchanges", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "exchange.json")
    given = parser.parse_args()
    server = Server(given.config, [
        f"server.admin_key={KEY}", "dtype=float32", "max_model_len=512", "kvcache.memory=512MiB"])
    try:
        result = run(server, given.streams, given.tokens, given.exchanges, random.Random(given.seed))
    finally:
        server.stop()
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if result["failed"] or result["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
