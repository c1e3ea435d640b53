"""What a log says can be done again: every decision of every scheduler with every KV manager is the same."""

import json
import random

import pytest
from click.testing import CliRunner

from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.engine.trial import Trial
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.kvcache import CacheConstraints, CachedPage, CacheSpec, KVState
from hotswap.core.testing.kv_transfer_traffic import LateWorker
from hotswap.core.testing.rig import build
from hotswap.lab.decisions.again import replay
from hotswap.lab.decisions.lives import Phase, lives
from hotswap.lab.decisions.log import open_logs
from hotswap.lab.decisions.story import chapters
from hotswap.plugins.kv_transfer.copies import HostTierWorker, InOrder
from hotswap.server.cli import main

SCHEDULERS = ["static", "continuous", "chunked", "prefill_first"]
MANAGERS = ["contiguous", "paged", "prefix", "radix"]
POLICIES = ["fcfs", "priority", "shortest_first", "longest_prefix_first", "fair_share"]


def same(recording, log=None):
    """The log's replay came out the same, to its last step."""
    outcome = replay(log or recording.stop(replays=False))
    assert outcome.divergence is None and outcome.broke is None and outcome.stopped is None, outcome
    assert outcome.steps == recording.rig.loop.steps > 20
    return outcome


def events_of(recording, kind):
    return [event for line in recording.path.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


def suspended(recording):
    return {mode for event in events_of(recording, "step") for _, mode, _ in event["suspensions"]}


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_with_every_manager_decides_the_same_again(record, scheduler, kv):
    pages = 1 + (4 * 32 if kv == "contiguous" else 33)
    recording = record(scheduler=scheduler, kv=kv, num_pages=pages, depth=2, lookahead=2)
    same(recording.traffic(forks=True, resets=True))
    endings = {event["reason"] for event in events_of(recording, "finish")}
    assert endings == {"length", "stop", "abort"}
    assert events_of(recording, "reset")
    if kv in ("prefix", "radix"):
        assert any(event["cached_tokens"] for event in events_of(recording, "finish"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 3])
def test_every_queue_policy_decides_the_same_again(record, policy, depth):
    recording = record(scheduler=build("scheduler", "chunked", policy=policy), depth=depth)
    same(recording.traffic())
    assert suspended(recording) == {"recompute"}


def test_weights_of_tenants_are_known_to_a_replay_since_the_config_names_them(record):
    policy = {"use": "fair_share", "tenant_weights": {"a": 5.0}}
    recording = record(scheduler=build("scheduler", "continuous", policy=policy), max_running=2, config={
        "scheduler": {"policy": policy}})
    same(recording.traffic())
    tenants = {event["tenant"] for event in events_of(recording, "arrival")}
    assert {"", "a"} < tenants and "b" not in tenants and len(tenants) == 3


@pytest.mark.parametrize("kv", ["prefix", "radix"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_waits_for_what_others_compute_are_replayed(record, scheduler, kv):
    kv = build("kvcache", kv, share_pending=4)
    recording = record(scheduler=scheduler, kv=kv, num_pages=1 + 60, depth=2, max_batch_tokens=40)
    for number in range(4):
        recording.rig.add(f"together{number}", [3] * 30 + [number], 6)
    same(recording.traffic(few_prompts=True))
    held = {reason for event in events_of(recording, "step") for _, reason in event["holds"]}
    assert "its prefix is being computed by together0" in held


def test_steps_that_do_not_chain_are_replayed(record):
    same(record(depth=2, chained=False).traffic())


def test_cache_groups_with_windows_are_replayed(record):
    for kv in ("prefix", "radix"):
        recording = record(f"{kv}.jsonl", kv=kv, windows={"full": None, "window": 9}, num_pages=1 + 40, depth=2)
        same(recording.traffic())
        assert len(events_of(recording, "header")[0]["engine"]["groups"]) == 2


def test_a_speculator_s_tail_is_replayed(record):
    same(record(lookahead=3, reuse_tail=2, depth=2).traffic())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_host_tier_makes_the_same_swaps_and_finds_the_same_prefixes(record, overlap):
    rng = random.Random(4)
    recording = record(
        depth=2, transfer=build("kv_transfer", "host", memory=8192, swap_overhead=20, overlap=overlap),
        wrap_transfer=(lambda w: LateWorker(HostTierWorker(True, InOrder()), rng)) if overlap else lambda w: w)
    same(recording.traffic(90, few_prompts=True, resets=True))
    assert "swap" in suspended(recording)
    assert recording.rig.loop.transfers.counters()["hits"]


def test_with_token_ids_in_the_log_it_is_the_same(record):
    same(record(log={"tokens": True}, depth=2, lookahead=2).traffic(forks=True))


def test_a_prompt_that_repeats_an_answer_finds_its_pages_again(record):
    """The second turn of a conversation, whose prompt holds the first answer to its last token."""
    recording = record(num_pages=100, lookahead=2)
    for number in range(4):
        first = recording.rig.add(f"a{number}", [number] * 9, 24, eos_token_ids=frozenset([5]))
        recording.rig.run()
        answer = recording.rig.client.tokens(first.id)
        recording.rig.add(f"b{number}", [number] * 9 + answer + [3, 1, 4], 9)
        recording.rig.run()
    same(recording)
    cached = {event["id"]: event["cached_tokens"] for event in events_of(recording, "finish")}
    assert any(cached[f"b{number}"] > 9 for number in range(4)), "pages of the answers were found"


def test_a_plan_that_failed_is_replayed_as_it_was(record):
    """A scheduler that breaks at one arrival of many: what it had started waits again, and all goes on."""
    recording = record()
    reserve = recording.rig.loop.parts.kv.reserve
    left = [7]

    def failing(*arguments, **named):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("planted")
        return reserve(*arguments, **named)

    recording.rig.loop.parts.kv.reserve = failing
    log = recording.traffic().stop(replays=False)
    assert len(events_of(recording, "plan_failed")) == 1
    outcome = replay(log)
    assert outcome.divergence is not None, "the manager that is built anew does not fail"
    assert outcome.divergence.logged == {"event": "plan_failed"}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_cut_log_is_replayed_up_to_there(record, share):
    recording = record(depth=2, lookahead=2)
    recording.traffic(few_prompts=True).stop()
    text = recording.path.read_text()
    recording.path.write_text(text[: int(len(text) * share)])
    [log] = open_logs([recording.path])
    outcome = replay(log)
    assert outcome.equal and outcome.steps > 5
    assert "the line is cut" in outcome.notes[0]


def rewrite(recording, change):
    """The log with its events changed."""
    recording.stop()
    events = [json.loads(line) for line in recording.path.read_text().splitlines()]
    for event in events:
        change(event)
    recording.path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return open_logs([recording.path])[0]


def test_another_scheduler_shows_the_first_step_that_differs_and_both_plans(record):
    def change(event):
        if event["event"] == "header":
            event["engine"]["components"]["scheduler"] = {"use": "static"}

    outcome = replay(rewrite(record().traffic(), change))
    assert not outcome.equal
    assert outcome.divergence.what == "plan"
    assert outcome.divergence.logged["rows"] != outcome.divergence.replayed["rows"]


@pytest.mark.parametrize(("event", "key", "change", "what"), [
    ("step", "pages", lambda pages: pages[1:], "plan"), ("step", "holds", lambda holds: [], "plan"),
    ("verdict", "usage", lambda usage: usage[::-1], "cache"), ("finish", "preemptions", lambda n: n + 1, "endings")])
def test_whatever_differs_is_found(record, event, key, change, what):
    seen = []

    def change_first(found):
        if found["event"] == event and found[key] and not seen:
            seen.append(found["n"])
            found[key] = change(found[key])

    outcome = replay(rewrite(record().traffic(), change_first))
    assert seen and outcome.divergence is not None and outcome.divergence.what == what


def exchange(recording, scheduler=None, kv=None, keeps_pages=True, workers=None, **told):
    """Exchange parts of the rig's loop, as an engine does between two turns."""
    loop, room = recording.rig.loop, recording.rig.setup.room
    if kv is not None:
        kv.configure(room.specs, room.num_bytes, room.constraints)
    effect = carry_out(loop, Switch(loop.limits, scheduler, kv, workers, workers, keeps_pages, room))
    recording.live.observers.notify("hotswap_component_exchanged", **{
        "path": "kvcache" if kv else "scheduler", "kind": "kvcache" if kv else "scheduler", "old": "old", "new": "new",
        "options": {}, "pause": effect.pause_s, "handed_over": effect.handed_over, "recomputed": effect.recomputed,
        "problem": "", "time": recording.rig.clock.now(), **told})
    return effect


def busy(recording, seed):
    """Leaves requests that run and wait."""
    rng = random.Random(seed)
    for number in range(12):
        recording.rig.add(f"x{seed}-{number}", [7] * 13 + [rng.randrange(13) for _ in range(9)], 30)
    for _ in range(8):
        recording.rig.loop.turn()
        recording.rig.clock.advance(0.001)
    assert recording.rig.loop.pool.running and recording.rig.loop.pool.waiting


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replay_goes_on_with_the_parts_that_were_exchanged(record, depth):
    """Another scheduler, another order, a manager that takes the pages over, and one that does not."""
    recording, effects = record(depth=depth, lookahead=2), []
    for number, parts in enumerate((
        {"scheduler": build("scheduler", "continuous")},
        {"scheduler": build("scheduler", "chunked", policy="shortest_first")},
        {"kv": build("kvcache", "radix")}, {"kv": build("kvcache", "prefix"), "keeps_pages": False},
        {"kv": build("kvcache", "radix", eviction="lfu"), "scheduler": build("scheduler", "prefill_first")},
    )):
        busy(recording, number)
        effects.append(exchange(recording, **parts))
    recording.rig.run()
    same(recording)
    assert [bool(effect.handed_over) for effect in effects] == [False, False, True, False, True]
    assert effects[3].recomputed
    found = [event["event"] for event in map(json.loads, recording.path.read_text().splitlines())]
    assert found.count("switch") == found.count("exchange") == 5


def test_a_request_that_fails_by_its_own_doing_while_parts_of_the_workers_are_new_fails_alone_again(record):
    recording = record()
    rig = recording.rig
    busy(recording, 1)
    exchange(recording, workers=rig.worker.sequences.clear)
    trial = rig.loop.lifecycle.trial = Trial(lambda: None, lambda problem, lost: None, kv=False, workers=True)
    execute, bad = rig.worker.execute, next(iter(rig.loop.pool.running))

    def broken(message):
        verdict = execute(message)
        for row in verdict.rows:
            if row.request == bad:
                row.kept, row.error, row.own = [], "its grammar leaves it no token", True
        return verdict

    rig.worker.execute = broken
    rig.run()
    assert trial.problem is None and trial.over.is_set()
    same(recording)
    assert [event["id"] for event in events_of(recording, "finish") if event["reason"] == "error"] == [bad]


def test_requests_that_lose_their_pages_in_an_exchange_are_preempted_by_it(record):
    recording = record()
    busy(recording, 1)
    running = set(recording.rig.loop.pool.running)
    recording.rig.clock.advance(0.5)
    exchange(recording, kv=build("kvcache", "radix"), keeps_pages=False)
    recording.rig.run()
    log = recording.stop()
    found = {life.id: life for life in lives(log)}
    assert running
    for id in running:
        assert found[id].seconds()[Phase.PREEMPTED] > 0
        assert sum(found[id].seconds().values()) == pytest.approx(found[id].latency)
        texts = [chapter.text for chapter in chapters(log, id)]
        assert "new takes the place of old, and it loses its pages" in texts
        assert any(text.startswith("starts again with") for text in texts)


def test_a_replay_stops_before_an_exchange_that_was_undone_and_says_so(record):
    recording = record()
    busy(recording, 1)
    kv = build("kvcache", "radix")
    kv.adopt = None
    with pytest.raises(TypeError):
        exchange(recording, kv=kv)
    recording.rig.run()
    log = recording.stop()
    outcome = replay(log)
    assert outcome.equal and 0 < outcome.steps < recording.rig.loop.steps
    assert "an exchange of parts was undone half way behind step" in outcome.stopped


def test_a_replay_that_cannot_go_on_to_the_end_says_how_far_it_came_and_exits_with_3(record):
    recording = record()
    recording.rig.add("r", [1, 2, 3], 4)
    recording.rig.run()
    kv = build("kvcache", "radix")
    kv.adopt = None
    with pytest.raises(TypeError):
        exchange(recording, kv=kv)
    recording.stop()
    events = map(json.loads, recording.path.read_text().splitlines())
    begin = next(event["n"] for event in events if event["event"] == "switch")
    done = CliRunner().invoke(main, ["replay", str(recording.path)])
    assert done.exit_code == 3
    steps = recording.rig.loop.steps
    assert done.output.startswith(f"{steps} steps of 1 request up to event {begin}: every decision is the same\n")
    assert "an exchange of parts was undone" in done.output
    done = CliRunner().invoke(main, ["replay", str(recording.path), "--json"])
    assert done.exit_code == 3 and json.loads(done.output)[0]["until"] == begin


@pytest.mark.parametrize(("change", "message"), [
    (lambda engine: engine["components"].pop("kvcache"), "does not say which kvcache there was"),
    (lambda engine: engine.pop("limits"), "the header's engine.limits: Field required"),
    (lambda engine: engine["components"]["scheduler"].update(use="lost:mine"), "no scheduler is called 'lost:mine'"),
    (lambda engine: engine["groups"]["full"].update(num_pages=9), "divides the memory otherwise here, full: 34 pages "),
    (lambda engine: engine["components"].update(kv_transfer={"use": "shm"}), "whose answers are in no log"),
])
def test_a_log_that_cannot_be_replayed_here_says_why(record, change, message):
    log = rewrite(record().traffic(4), lambda event: event["event"] == "header" and change(event["engine"]))
    with pytest.raises(ConfigError) as caught:
        replay(log)
    assert message in str(caught.value)


def test_what_a_trie_takes_over_is_in_the_order_in_which_it_was_handed_over():
    """Not in that of a set of digests, which every process draws anew: pages would go in another order in a replay."""
    kv = build("kvcache", "radix")
    kv.configure([CacheSpec("full", (0,), 1, 1, 1)], 0, CacheConstraints(64, 4, page_size=4, num_pages=60))
    cached = [CachedPage("full", b"root", (number, 2, 3, 4), 1 + number) for number in range(40)]
    kv.adopt(KVState({}, cached))
    pages, again = [entry.page for entry in cached], [entry.page for entry in kv.handover().cached]
    assert again in (pages, pages[::-1])
