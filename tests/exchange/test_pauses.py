"""What an exchange costs, in steps of a device that takes a second for each, one after the other: nothing here depends
on how fast this machine is."""

from collections import defaultdict
from functools import partial

import pytest

from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import CacheConstraints
from hotswap.core.testing.rig import assert_clean, build, expected, make_rig

STEP_S = 1.0
PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [7, 8, 9], "c": [2, 2, 3, 3, 4, 4, 5]}
TOKENS = 9
MAX_BATCH_TOKENS = 16


class Device:
    """A rig whose device takes its time: who collects a step waits for its end. Planning and exchanging take none.

    ``times``: by request, when each of its tokens came."""

    def __init__(self, depth):
        self.rig = rig = make_rig(depth=depth, max_batch_tokens=MAX_BATCH_TOKENS)
        self.free_at, self.ends, self.times = 0.0, {}, defaultdict(list)
        submit, collect, sink, clock = rig.executor.submit, rig.executor.collect, rig.client.sink, rig.clock

        def take_time(message):
            self.free_at = max(self.free_at, clock.now()) + STEP_S
            self.ends[message.step_id] = self.free_at
            return submit(message)

        def wait(ticket):
            clock.advance(max(0.0, self.ends.pop(ticket) - clock.now()))
            return collect(ticket)

        def hear(output):
            self.times[output.request_id] += [clock.now()] * len(output.token_ids)
            sink(output)

        rig.executor.submit, rig.executor.collect, rig.client.sink = take_time, wait, hear
        self.requests = [rig.add(name, prompt, TOKENS) for name, prompt in PROMPTS.items()]

    def run(self, exchange=None, turn=None):
        """To the end. ``exchange`` happens in the given turn; returns what it came to."""
        effect, count = None, 0
        while self.rig.loop.turn() or self.rig.loop.in_flight or self.rig.loop.pool.states:
            count += 1
            if count == turn and self.rig.loop.pool.states:
                effect = carry_out(self.rig.loop, exchange(self.rig))
        assert_clean(self.rig)
        assert [self.rig.client.tokens(one.id) for one in self.requests] == [expected(one) for one in self.requests]
        return effect


def scheduler(rig, name="chunked", **options):
    return Switch(rig.loop.limits, build("scheduler", name, **options))


def manager(rig, refuses=False, **options):
    kv = build("kvcache", "prefix", **options)
    kv.configure(rig.worker.info().cache_specs, 0, CacheConstraints(128, 8, page_size=4, num_pages=64))
    if refuses:
        def adopt(state):
            raise KVInvariantError("planted: these pages are not taken over")

        kv.adopt = adopt
    return Switch(rig.loop.limits, kv=kv)


def workers(rig):
    """As a speculator without a cache of its own, or an attention backend of the same layout, is exchanged."""
    return Switch(rig.loop.limits, workers=rig.worker.sequences.clear, back=rig.worker.sequences.clear)


MOMENTS = range(1, 2 * TOKENS)
BETWEEN_STEPS = {
    "a scheduler": scheduler, "a queue policy": partial(scheduler, policy="priority"),
    "an eviction policy": partial(manager, eviction="lfu"), "a part of the workers": workers}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("part", BETWEEN_STEPS)
def test_an_exchange_between_two_steps_makes_no_token_later_by_more_than_a_step(part, depth):
    calm = Device(depth)
    calm.run()
    happened = 0
    for turn in MOMENTS:
        disturbed = Device(depth)
        effect = disturbed.run(BETWEEN_STEPS[part], turn)
        if effect is None:
            continue
        happened += 1
        assert effect.recomputed == 0
        assert effect.pause_s <= STEP_S
        for name, times in calm.times.items():
            assert all(late <= due + STEP_S for late, due in zip(disturbed.times[name], times, strict=True)), (
                name, turn, disturbed.times[name], times)
        assert disturbed.rig.loop.submitted <= calm.rig.loop.submitted + 1
    assert happened >= TOKENS - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_an_exchange_that_computes_again_makes_no_token_later_than_that_takes(depth):
    """Known tokens go through in steps as large as any; what was in flight is waited for, which nobody pays twice."""
    calm = Device(depth)
    calm.run()
    recomputed = 0
    for turn in MOMENTS:
        disturbed = Device(depth)
        effect = disturbed.run(partial(manager, refuses=True), turn)
        if effect is None:
            continue
        recomputed += effect.recomputed
        known = sum(len(prompt) + TOKENS for prompt in PROMPTS.values())
        most = STEP_S * -(-known // MAX_BATCH_TOKENS)
        assert effect.pause_s <= STEP_S
        for name, times in calm.times.items():
            assert all(late <= due + most for late, due in zip(disturbed.times[name], times, strict=True))
    assert recomputed > TOKENS


def test_the_device_of_these_tests_would_show_a_step_too_many():
    calm, slow = Device(1), Device(1)
    calm.run()

    def exchange_twice(rig):
        for _ in range(2):
            carry_out(rig.loop, workers(rig))
        return scheduler(rig)

    slow.run(exchange_twice, 3)
    assert max(late - due for late, due in zip(slow.times["a"], calm.times["a"], strict=True)) == 2 * STEP_S
