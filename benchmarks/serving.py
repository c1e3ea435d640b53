"""Tokens per second of the offline engine and of the server, on the workloads of ``workloads.py``.

    python benchmarks/serving.py [--config examples/quickstart.yaml] [--set dtype=bfloat16] [--only mixed,http]
                                 [--rounds 5] [--json FILE]

Workloads are interleaved; the median and the range over the rounds are printed. ``http`` is "mixed" with 16 streams in
flight against a server in a process of its own. A round beside a busy neighbour (other processes take more than a
quarter of a core) is marked with ``!`` and left out of the medians where enough quiet ones remain.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WORKLOADS, Item

STREAMS = 16
BUSY_CORES = 0.25


class Neighbours:
    """Cores that other processes used between ``__enter__`` and ``__exit__``, from the system's own accounts."""

    def __enter__(self) -> "Neighbours":
        self._begun, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._begun
        self.cores = max(0.0, (_busy_seconds() - self._busy) - (_own_seconds() - self._own)) / wall


def _busy_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds(pids: Sequence[int] = ()) -> float:
    times = os.times()
    total = times.user + times.system
    for pid in SERVERS:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


SERVERS: list[int] = []


def summary(
    items: Sequence[Item], firsts: list[float], ends: list[float], counts: list[int], wall: float,
) -> dict[str, float]:
    """Seconds since the start of the workload in; ``decode_tok_s`` spans the first first token to the last end."""
    tpot = [(end - first) / (n - 1) for first, end, n in zip(firsts, ends, counts, strict=True) if n > 1]
    return {
        "wall_s": wall, "out_tok_s": sum(counts) / wall,
        "ttft_p50_ms": 1e3 * statistics.median(firsts), "tpot_p50_ms": 1e3 * statistics.median(tpot),
        "decode_tok_s": sum(n - 1 for n in counts) / (max(ends) - min(firsts)),
    }


class Offline:
    def __init__(self, config: Any) -> None:
        from hotswap.core.engine.build import build_engine

        self.engine = build_engine(config, progress=False).engine
        self.count = 0

    def run(self, items: Sequence[Item]) -> dict[str, float]:
        from hotswap.core.request import Request, RequestOutput, SamplingParams

        firsts, ends, counts = [0.0] * len(items), [0.0] * len(items), [0] * len(items)
        left = threading.Semaphore(0)
        begun = time.perf_counter()

        def submit(index: int, item: Item) -> None:
            def sink(output: RequestOutput) -> None:
                now = time.perf_counter() - begun
                if output.token_ids and not counts[index]:
                    firsts[index] = now
                counts[index] += len(output.token_ids)
                if output.finish_reason:
                    if counts[index] != item.max_tokens:
                        raise SystemExit(f"request {index} ended after {counts[index]} tokens: {output}")
                    ends[index] = now
                    left.release()

            self.count += 1
            params = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
            self.engine.add(Request(f"b{self.count}", item.prompt, params), sink)

        for index, item in enumerate(items):
            submit(index, item)
        for _ in items:
            left.acquire()
        return summary(items, firsts, ends, counts, max(ends))


class Server:
    """``hotswap serve`` in a process of its own, and a light client: one connection a request."""

    def __init__(self, config: Path, sets: Sequence[str]) -> None:
        flags = [word for text in [*sets, "server.port=0"] for word in ("--set", text)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotswap", "serve", str(config), *flags], stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "http://127.0.0.1:" in line:
                self.port = int(line.split("http://127.0.0.1:")[1].split("/")[0].split()[0])
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        SERVERS.append(self.process.pid)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models") as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def run(self, items: Sequence[Item]) -> dict[str, float]:
        return asyncio.run(self._drive(items))

    def stop(self) -> None:
        SERVERS.remove(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    async def _drive(self, items: Sequence[Item]) -> dict[str, float]:
        queue = list(enumerate(items))[::-1]
        results: dict[int, tuple[float, list[float], int]] = {}
        begun = time.perf_counter()

        async def worker() -> None:
            while queue:
                index, item = queue.pop()
                results[index] = await self._request(item)

        await asyncio.gather(*(worker() for _ in range(STREAMS)))
        wall = time.perf_counter() - begun
        ttft = [stamps[0] - sent for sent, stamps, _ in results.values()]
        itl = sorted(b - a for _, stamps, _ in results.values() for a, b in zip(stamps, stamps[1:], strict=False))
        return {
            "wall_s": wall, "out_tok_s": sum(n for _, _, n in results.values()) / wall, "req_s": len(items) / wall,
            "ttft_p50_ms": 1e3 * statistics.median(ttft), "ttft_p99_ms": 1e3 * sorted(ttft)[int(0.99 * len(ttft))],
            "itl_p50_ms": 1e3 * statistics.median(itl), "itl_p99_ms": 1e3 * itl[int(0.99 * len(itl))],
        }

    async def _request(self, item: Item) -> tuple[float, list[float], int]:
        body = json.dumps({
            "model": self.model, "prompt": item.prompt, "max_tokens": item.max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        sent = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        stamps, tokens = [], 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if event.get("choices") and event["choices"][0].get("finish_reason") is None:
                    stamps.append(time.perf_counter())
        writer.close()
        if tokens != item.max_tokens:
            raise SystemExit(f"a request gave {tokens} of {item.max_tokens} tokens")
        return sent, stamps, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/quickstart.yaml"))
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--only", default="single,batch8,mixed,prefix,http")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from hotswap.core.config import load_config

    names = args.only.split(",")
    offline = Offline(load_config(args.config, args.sets)) if set(names) - {"http"} else None
    server = Server(args.config, args.sets) if "http" in names else None
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for round_ in range(args.rounds + 1):  # the first warms up
            for name in names:
                target = server if name == "http" else offline
                assert target is not None
                with Neighbours() as neighbours:
                    result = target.run(WORKLOADS["mixed" if name == "http" else name](round_))
                if round_:
                    runs[name].append({**result, "others_cores": neighbours.cores})
                    mark = "!" if neighbours.cores > BUSY_CORES else " "
                    figures = "  ".join(f"{k} {v:.2f}" for k, v in runs[name][-1].items())
                    print(f"{mark} {name:7} {figures}", flush=True)
    finally:
        if server is not None:
            server.stop()
        if offline is not None:
            offline.engine.stop()
    report(runs)
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))


def report(runs: dict[str, list[dict[str, float]]]) -> None:
    print("\nmedian (range) over the quiet rounds")
    for name, results in runs.items():
        quiet = [result for result in results if result["others_cores"] <= BUSY_CORES]
        chosen = quiet if len(quiet) >= 3 else results
        for metric in results[0]:
            values = [result[metric] for result in chosen]
            print(f"  {name:7} {metric:13} {statistics.median(values):9.2f}  ({min(values):.2f} to {max(values):.2f}; "
                  f"{len(quiet)} of {len(results)} rounds quiet)")


if __name__ == "__main__":
    main()
