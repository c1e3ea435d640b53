"""Random traffic through the real loop on a late, poisoned fake device: the broadest check of the host's contracts."""

import random
from collections import Counter
from typing import Any

import pytest

from hotswap.core.engine.context import COMPUTED_BY
from hotswap.core.interfaces.scheduler import Answer, PlanContext, Scheduler, StepPlan, SuspendMode
from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig, random_prompt
from hotswap.core.testing.wrapping import Wrapped

TRIALS = 22
POLICIES = ["fcfs", "priority", "shortest_first", "longest_prefix_first", "fair_share"]
SEEN: Counter[str] = Counter()


class PlantedError(RuntimeError):
    pass


class Unreliable(Wrapped):
    """Raises somewhere inside another scheduler's plan now and then, so that half-made plans must be undone."""

    def __init__(self, inner: Scheduler, rng: random.Random) -> None:
        super().__init__(inner)
        self.rng = rng
        self.in_a_row = 0

    def plan(self, ctx: PlanContext) -> StepPlan:
        fuse = None if self.in_a_row else self.rng.choice([None] * 6 + [1, 2, 3, 5])
        try:
            plan = self.inner.plan(_Fused(ctx, fuse))  # type: ignore[arg-type]
        except PlantedError:
            self.in_a_row += 1
            SEEN["plans undone"] += 1
            raise
        self.in_a_row = 0
        SEEN["prefixes left to others"] += any(why.startswith(COMPUTED_BY) for _, why in ctx.holds)  # type: ignore[attr-defined]
        return plan


class _Fused:
    def __init__(self, ctx: PlanContext, fuse: int | None) -> None:
        self._ctx, self._fuse = ctx, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def _burn(self) -> None:
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse == 0:
                raise PlantedError("planted")

    def reserve(self, *arguments: Any) -> Answer:
        answer = self._ctx.reserve(*arguments)
        SEEN[f"answer {answer.value}"] += 1
        self._burn()
        return answer

    def suspend(self, request_id: str, mode: SuspendMode = SuspendMode.AUTO, reason: str = "no room") -> None:
        self._ctx.suspend(request_id, mode, reason)
        self._burn()


def trial(seed: int, scheduler: str, kv: str) -> None:
    rng = random.Random(f"{seed} {scheduler} {kv}")
    page_size = rng.choice([1, 2, 4, 8])
    longest = 96
    windows: dict[str, int | None] = {"full": None}
    if kv != "contiguous" and rng.random() < 0.5:
        windows["window"] = rng.choice([1, 3, 6, 13])
    depth, chained = rng.choice([(1, True), (2, True), (2, True), (3, False)])
    inner = build("scheduler", scheduler, policy=rng.choice(POLICIES))
    options = {"share_pending": rng.choice([1, 8, 64, None])} if kv in ("prefix", "radix") else {}
    rig = make_rig(
        Unreliable(inner, rng), build("kvcache", kv, **options), windows=windows, page_size=page_size,
        max_model_len=longest,
        num_pages=1 + -(-int(longest * rng.uniform(1.0, 2.5)) // page_size), max_batch_tokens=rng.choice([9, 16, 40]),
        max_running=rng.choice([3, 6]), depth=depth, chained=chained, lookahead=rng.choice([0, 0, 3]), seed=seed,
    )
    requests, aborted = _drive(rig, rng, longest)
    for request in requests:
        if request.id in aborted:
            assert rig.client.endings(request.id) == ["abort"] or rig.client.endings(request.id) != []
            assert expected(request)[: len(rig.client.tokens(request.id))] == rig.client.tokens(request.id)
        else:
            assert rig.client.tokens(request.id) == expected(request)
        assert len(rig.client.endings(request.id)) == 1
    assert_clean(rig)
    SEEN["two steps in flight"] += rig.loop.max_depth_seen >= 2
    SEEN["accepted drafts"] += rig.worker.accepted
    SEEN["rejected drafts"] += rig.worker.drafted - rig.worker.accepted
    SEEN["reads"] += rig.worker.reads
    copies = [change.copies for m in rig.executor.messages for _, grant in m.grants for change in grant.groups.values()]
    SEEN["pages copied"] += sum(map(len, copies))


def _drive(rig: Rig, rng: random.Random, longest: int) -> tuple[list[Any], set[str]]:
    shared = [rng.randrange(13) for _ in range(17)]
    requests: list[Any] = []
    arrivals = sorted(rng.randrange(40) for _ in range(12))
    aborts = {rng.randrange(5, 60): f"r{rng.randrange(12)}" for _ in range(3)}
    aborted: set[str] = set()
    for turn in range(4000):
        while arrivals and arrivals[0] <= turn:
            arrivals.pop(0)
            prompt, parent = random_prompt(rng, 40, shared), None
            if requests and rng.random() < 0.4:
                parent = requests[-1].fork_of or requests[-1].id
                prompt = requests[-1].prompt_token_ids
            requests.append(rig.add(
                f"r{len(requests)}", prompt, rng.randrange(1, longest - len(prompt)), seed=rng.randrange(3),
                priority=rng.randrange(3), eos_token_ids=frozenset(rng.choice([(), (5,), (1, 2)])), fork_of=parent,
            ))
        if aborts.get(turn) in rig.loop.pool.states:
            state = rig.loop.pool.states[aborts[turn]]
            SEEN[f"abort {state.status.value}{' in flight' if state.flying else ''}"] += 1
            aborted.add(state.id)
            rig.loop.abort(state.id)
        SEEN["preempted"] += any(state.preemptions for state in rig.loop.pool.states.values())
        SEEN["hits"] += any(state.cached_tokens for state in rig.loop.pool.states.values())
        did = rig.loop.turn()
        rig.loop.parts.kv.check()
        rig.clock.advance(0.001)
        if not did and not arrivals and not rig.loop.in_flight and not rig.loop.pool.states:
            return requests, aborted
    raise AssertionError(f"no progress: {rig.loop.pool.snapshot()}")


@pytest.mark.parametrize("kv", ["contiguous", "paged", "prefix", "radix"])
@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked", "prefill_first"])
def test_every_request_gets_its_own_tokens_and_every_page_comes_back(scheduler: str, kv: str) -> None:
    for seed in range(TRIALS):
        trial(seed, scheduler, kv)


def test_the_trials_did_what_they_claim() -> None:
    """Runs last in this file: the trials above must have met every situation that they are there for."""
    if sum(SEEN.values()) == 0:
        pytest.skip("the trials did not run")
    for what in ("plans undone", "two steps in flight", "accepted drafts", "rejected drafts", "preempted", "hits",
                 "prefixes left to others", "pages copied", "answer later", "answer no", "abort running in flight",
                 "abort waiting"):
        assert SEEN[what] > 0, (what, SEEN)
