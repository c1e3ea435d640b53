"""What it costs a step that parts are reached through interfaces: the calls of one step, counted, times a call's price.

    python benchmarks/dispatch.py

A decode step of 256 requests on the host, and of one model of 30 layers in the worker. Every call from core into a
component is counted with a wrapper; the price is that of a bound method that does nothing, looked up on its object,
against the same work written in place. Hooks are counted too: with no observer there are none.
"""

import timeit
from collections import Counter
from typing import Any

from control_plane import PAGE_SIZE, Bench

LAYERS = 30
PER_STEP_IN_WORKER = {
    "executor.submit/collect": 2, "attention.plan": 1, "attention.run": LAYERS, "model.forward": 1, "model.head": 1,
    "operators.add_rms_norm": 2 * LAYERS - 1, "operators.rms_norm": 2, "operators.rotate": LAYERS,
    "operators.silu_mul": LAYERS, "speculator.needs": 0,
}
"""From ``core/execution/runner.py`` and ``plugins/models/decoder.py``: a decode step without drafts and processors."""


class Counted:
    """Stands for a component and counts the methods that are called on it."""

    def __init__(self, name: str, inner: Any, counts: Counter[str]) -> None:
        self._name, self._inner, self._counts = name, inner, counts

    def __getattr__(self, method: str) -> Any:
        self._counts[f"{self._name}.{method}"] += 1
        return getattr(self._inner, method)


class Nothing:
    def method(self, first: int, second: int) -> None:
        """Does nothing."""


def call_ns() -> float:
    """A method call on an object, beyond a statement in place."""
    target, number = Nothing(), 200_000
    call = min(timeit.repeat(lambda: target.method(1, 2), number=number, repeat=7))
    empty = min(timeit.repeat(lambda: None, number=number, repeat=7))
    return (call - empty) / number * 1e9


def calls_on_the_host(bench: Bench) -> dict[str, float]:
    """By method: calls of a step, on an average of as many as a page has tokens, so that every request has taken one.
    """
    counts: Counter[str] = Counter()
    parts = bench.loop.parts
    scheduler, kv = parts.scheduler, parts.kv
    parts.scheduler = Counted("scheduler", parts.scheduler, counts)  # type: ignore[assignment]
    parts.kv = Counted("kvcache", parts.kv, counts)  # type: ignore[assignment]
    for _ in range(PAGE_SIZE):
        bench.step()
    parts.scheduler, parts.kv = scheduler, kv
    return {name: count / PAGE_SIZE for name, count in counts.items()}


def main() -> None:
    bench = Bench("chunked", "prefix", 100_000, 2048, 1)
    bench.begin(256)
    host = calls_on_the_host(bench)
    price = call_ns()
    calls = sum(host.values()) + sum(PER_STEP_IN_WORKER.values())
    for name, count in sorted({**host, **PER_STEP_IN_WORKER}.items(), key=lambda item: -item[1]):
        print(f"{count:8.1f} {name}")
    print(f"{calls:.0f} calls a step at {price:.0f} ns: {calls * price / 1e3:.1f} us")


if __name__ == "__main__":
    main()
