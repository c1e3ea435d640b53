"""What an exchange costs: pauses by part, times between tokens with exchanges and without, memory after each.

Runs ``hotswap serve`` in a process of its own, opens streams, and exchanges parts at random while they run. Every
answer is compared with an undisturbed run's (greedy, float32). Exit code 1 where one differs or fails.

Memory is the server's resident bytes behind each exchange. It is flat where the last quarter of the exchanges needs no
more than the second: in the first, each part is there for the first time. A page of the cache counts from its first use
on, so that memory grows until all of ``--cache`` has been used.

    python benchmarks/exchange.py --output benchmarks/results/exchange.json  # 16 streams, 200 exchanges
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
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from hotswap.lab.environment import environment

ROOT = Path(__file__).parents[1]
KEY = "key-of-the-benchmark"
EVERY = 20
"""Exchanges between two values of the summary of memory."""
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
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

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


class Streams:
    """Asks each prompt again and again, until ``stop``."""

    def __init__(self, server: Server, prompts: list[str], tokens: int) -> None:
        self._server, self._prompts, self._tokens = server, prompts, tokens
        self._pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
        self._calm: list[tuple[str, list[float]]] = []
        self._running: list[concurrent.futures.Future[tuple[Counter[str], list[float]]]] = []
        self.stop = threading.Event()
        self.seen = Counter[str](answers=0, failed=0, wrong=0)
        self.gaps: list[float] = []

    def undisturbed(self) -> list[float]:
        """Each prompt once: what is right, and the times between chunks."""
        self._calm = list(self._pool.map(lambda prompt: self._server.stream(prompt, self._tokens), self._prompts))
        return [gap for _, times in self._calm for gap in gaps_of(times)]

    def __enter__(self) -> "Streams":
        self._running = [self._pool.submit(self._ask, index) for index in range(len(self._prompts))]
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop.set()
        self._pool.shutdown()
        for future in self._running:
            seen, gaps = future.result()
            self.seen.update(seen)
            self.gaps += gaps

    def _ask(self, index: int) -> tuple[Counter[str], list[float]]:
        seen, gaps = Counter[str](), list[float]()
        while not self.stop.is_set():
            try:
                text, times = self._server.stream(self._prompts[index], self._tokens)
            except Exception as error:
                print(f"a stream failed: {error}", file=sys.stderr)
                seen["failed"] += 1
                self.stop.wait(1.0)  # a server that is gone answers none of them
                continue
            seen["answers"] += 1
            seen["wrong"] += text != self._calm[index][0]
            gaps += gaps_of(times)
        return seen, gaps


def run(server: Server, count: int, tokens: int, exchanges: int, rng: random.Random) -> dict[str, Any]:
    streams = Streams(server, [" ".join(rng.choices(WORDS, k=rng.randrange(4, 120))) for _ in range(count)], tokens)
    quiet, done, pauses, memory = streams.undisturbed(), 0, defaultdict(list), []
    begun = time.perf_counter()
    with streams:
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
                print(f"\r{done} of {exchanges}", end="", file=sys.stderr, flush=True)
    return {
        "exchanges": done, **streams.seen, "seconds": round(time.perf_counter() - begun),
        "pause_ms": {path: {"n": len(found), "median": statistics.median(found), "max": max(found)}
                     for path, found in sorted(pauses.items())},
        "itl_ms": {"undisturbed": quantiles(quiet), "with exchanges": quantiles(streams.gaps)},
        "memory_mib": growth([round(value / 2**20) for value in memory]),
    }


def gaps_of(times: list[float]) -> list[float]:
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def growth(series: list[int]) -> dict[str, Any]:
    quarter = len(series) // 4
    second, last = series[quarter:2 * quarter] or series, series[-quarter:] or series
    return {"second quarter": statistics.median(second), "last quarter": statistics.median(last),
            f"every {EVERY} exchanges": series[EVERY - 1::EVERY], "series": series}


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))} if ordered else {}


def named(config: str) -> str:
    """From the repository on; of a file elsewhere, its name."""
    path = Path(config).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Everything that the numbers depend on, besides the environment."""
    settings = {name: value for name, value in vars(given).items() if name != "output"}
    return settings | {"config": named(given.config)}


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "quickstart.yaml"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--exchanges", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of the model's operators")
    parser.add_argument("--cache", default="512MiB", help="of which pages count as memory once they have been used")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "exchange.json")
    return parser.parse_args(arguments)


def main() -> None:
    given = read()
    server = Server(given.config, [
        f"server.admin_key={KEY}", "dtype=float32", "max_model_len=512", f"kvcache.memory={given.cache}",
        f"execution.num_threads={given.threads}"])
    try:
        result = run(server, given.streams, given.tokens, given.exchanges, random.Random(given.seed))
    finally:
        server.stop()
    result = {"settings": settings_of(given), "environment": environment(), **result}
    given.output.write_text(json.dumps(result) + "\n")
    print(json.dumps({**result, "memory_mib": {**result["memory_mib"], "series": "in the file"}}, indent=2))
    if result["failed"] or result["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
