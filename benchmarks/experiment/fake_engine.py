"""An engine that computes nothing: which rows each step has is known, and noise says how long it takes.

In a closed loop of greedy requests with known lengths the steps of a block are the same whatever they take, so they are
worked out once, and a block is a cumulative sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from noise import Stream

from hotswap.lab.records import BlockRecord, RequestRecord

PROMPT = 64
OUTPUT = (8, 24)
CONCURRENCY = 4
BETWEEN_S = 0.0004
"""Of the engine's loop, between two steps."""


@dataclass(frozen=True)
class Schedule:
    """``requests``: (step before which it was sent, the steps that gave its tokens). ``costs`` [steps]: seconds."""

    costs: np.ndarray
    requests: tuple[tuple[int, tuple[int, ...]], ...]


def schedule(seed: int, size: int, cost: Callable[[int, int], float]) -> Schedule:
    """``size`` requests, `CONCURRENCY` at a time: whoever is new computes its prompt beside the others' tokens."""
    lengths = [Random(f"{seed} {index}").randint(*OUTPUT) for index in range(size)]
    waiting, running, sent, tokens = list(range(size)), [], {}, {index: [] for index in range(size)}
    costs: list[float] = []
    while waiting or running:
        new = [waiting.pop(0) for _ in range(min(len(waiting), CONCURRENCY - len(running)))]
        sent |= dict.fromkeys(new, len(costs))
        running += new
        for index in running:
            tokens[index].append(len(costs))
        costs.append(cost(len(running), PROMPT * len(new) + len(running) - len(new)))
        running = [index for index in running if len(tokens[index]) < lengths[index]]
    return Schedule(np.array(costs), tuple((sent[index], tuple(tokens[index])) for index in range(size)))


def block(
    plan: Schedule, stream: Stream, slowdown: float, arm: str, pair: int, position: int,
) -> BlockRecord:
    """One arm's turn. ``slowdown``: the share by which each of its steps takes longer."""
    durations = plan.costs * stream(len(plan.costs)) * (1 + slowdown)
    ends = np.cumsum(durations + BETWEEN_S)
    starts = np.concatenate([[0.0], ends])
    requests = tuple(
        RequestRecord(
            index, float(starts[sent]), float(starts[sent]), tuple((float(ends[step]), 1) for step in steps),
            float(ends[steps[-1]]), PROMPT, len(steps), "length", cached_tokens=0, queued=BETWEEN_S, preemptions=0)
        for index, (sent, steps) in enumerate(plan.requests))
    counts = {
        "steps": float(len(durations)), "rows": float(sum(len(steps) for _, steps in plan.requests)),
        "step_seconds": float(durations.sum()), "kv_peak_bytes": 1e6}
    return BlockRecord(arm, pair, position, float(ends[-1]), requests, float(1.1 * durations.sum()), counts)
