"""How arms take turns: the same requests, from the same state, in an order drawn by lot; and what ends a run."""

import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.experiment import load_experiment
from hotswap.lab.interleave import orders
from hotswap.lab.journal import FILE, Journal, read_journal
from hotswap.lab.processes import Neighbours, cpu_of, cpu_of_this_process, processes
from hotswap.lab.run import Arm, Run
from hotswap.lab.targets.target import Ending

NOW = SystemClock().now


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """As a run does: the collector looks at what is new, and not at torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def items(length=24):
    for index in itertools.count():
        yield WorkItem(tuple(index * 100 + place for place in range(length)), 4)


def experiment(*arms, **fields):
    values = {
        "base": {"model": "m"}, "arms": {name: {"seed": 1} for name in arms or ("b",)}, "block": {"requests": 4},
        "load": {"concurrency": 2}, "pairs": 4, **fields}
    return load_experiment(values)


def run(targets, journal=None, items=items, origins=None, monitor=None, **fields):
    arms = [Arm(name, target, (origins or {}).get(name, name)) for name, target in targets.items()]
    wanted = experiment(*(name for name in targets if name != "base"), **fields)
    return Run(wanted, arms, items(), NOW, journal or Journal(None), monitor).run()


def test_orders_come_in_balanced_twos_and_by_seed():
    drawn = list(itertools.islice(orders(["base", "a", "b"], seed=5), 400))
    for first, second in zip(drawn[::2], drawn[1::2], strict=True):
        assert first == tuple(reversed(second))
    assert {order[0] for order in drawn[::2]} == {"base", "a", "b"}
    before = sum(order.index("base") < order.index("a") for order in drawn[::2])
    assert 70 < before < 130, "which of two comes first in a quad is a fair lot"
    assert drawn == list(itertools.islice(orders(["base", "a", "b"], seed=5), 400))
    assert drawn != list(itertools.islice(orders(["base", "a", "b"], seed=6), 400))


def test_both_arms_of_a_pair_get_the_same_requests_at_the_same_times(script):
    targets = {"base": script(), "b": script(), "c": script()}
    measured = run(targets, load={"rate": 200})
    sent = {name: sorted((r.id, r.prompt) for r in target.requests) for name, target in targets.items()}
    assert sent["base"] == sent["b"] == sent["c"]
    assert len({id for id, _ in sent["base"]}) == len(sent["base"]), "no request is sent twice"
    for pair in range(4):
        planned = {b.arm: [r.planned for r in b.requests] for b in measured.blocks if b.pair == pair}
        assert planned["base"] == planned["b"] == planned["c"]
    assert [block.position for block in measured.blocks] == list(range(12))
    assert {name: len(pairs) for name, pairs in measured.pairs.items()} == {"b": 4, "c": 4}


def test_only_one_arm_works_at_a_time(script):
    targets = {"base": script(), "b": script()}
    most = []

    def reply(request):
        most.append(sum(target.serving > 0 for target in targets.values()))
        return [1]

    for target in targets.values():
        target.reply = reply
    run(targets)
    assert max(most) <= 1


def test_warm_up_blocks_are_left_out(script):
    base = script()
    measured = run({"base": base, "b": script()}, warm_up=3)
    assert len(base.requests) == (3 + 4) * 4
    assert sum(len(block.requests) for block in measured.blocks if block.arm == "base") == 4 * 4


def test_cold_blocks_start_with_an_empty_cache(script):
    same = itertools.repeat(WorkItem(tuple(range(24)), 4))
    measured = run({"base": script(), "b": script()}, items=lambda: same, load={"concurrency": 1})
    for block in measured.blocks:
        assert [record.cached_tokens for record in block.requests] == [0, 8, 8, 8]


def test_warm_blocks_find_what_the_same_history_left(script):
    same = itertools.repeat(WorkItem(tuple(range(24)), 4))
    targets = {"base": script(), "b": script()}
    measured = run(targets, items=lambda: same, cache="warm", load={"concurrency": 1})
    assert all(target.resets == 0 for target in targets.values())
    assert all(record.cached_tokens == 8 for block in measured.blocks for record in block.requests)


def test_two_arms_that_are_one_server_do_not_warm_the_cache_for_each_other(script):
    server = script(can_reset=False)
    measured = run({"base": server, "b": server}, origins={"base": "http://x", "b": "http://x"})
    assert all(pair.base["hit_rate"] == pair.arm["hit_rate"] == 0 for pair in measured.pairs["b"])
    assert len({request.prompt[:8] for request in server.requests}) == len(server.requests)


def test_another_run_with_the_same_seed_does_not_find_the_first_ones_prompts(script):
    server = script(can_reset=False)
    for _ in range(2):
        measured = run({"base": server, "b": server}, origins={"base": "http://x", "b": "http://x"})
        assert all(pair.base["hit_rate"] == pair.arm["hit_rate"] == 0 for pair in measured.pairs["b"])


def test_arms_that_are_two_servers_get_the_same_prompts(script):
    targets = {"base": script(can_reset=False), "b": script(can_reset=False)}
    run(targets)
    assert sorted(r.prompt for r in targets["base"].requests) == sorted(r.prompt for r in targets["b"].requests)


def test_an_arm_that_answers_nothing_ends_the_run_while_it_warms_up(script):
    broken = script()
    broken.send = lambda request, hearer: hearer.ended(Ending(NOW(), error="HTTP 500: broken"))
    measured = run({"base": script(), "b": broken})
    assert measured.partial and measured.blocks == []
    assert measured.stopped == "arm 'b' answered no request while warming up: HTTP 500: broken"


def test_what_requests_of_a_block_share_they_share_behind_a_new_beginning(script):
    head = tuple(range(16))
    shared = (WorkItem((*head, index), 4) for index in itertools.count(500))
    measured = run(
        {"base": script(can_reset=False), "b": script(can_reset=False)}, items=lambda: shared, load={"concurrency": 1})
    for block in measured.blocks:
        assert [record.cached_tokens for record in block.requests] == [0, 8, 8, 8]


def test_blocks_are_as_long_as_the_slowest_arm_makes_them(script):
    wanted = 0.3
    arms = {"base": script(0.01), "b": script(0.03)}
    measured = run(arms, block={"seconds": wanted}, pairs=2, load={"concurrency": 1})
    walls = {arm: [b.wall for b in measured.blocks if b.arm == arm] for arm in ("base", "b")}
    sizes = {len(block.requests) for block in measured.blocks}
    assert len(sizes) == 1 and sizes.pop() <= wanted / 0.03, "no more than the slowest arm can answer in that time"
    assert all(wall < sum(walls["b"]) / 2 for wall in walls["base"]), "which the other does in less"


def test_the_time_is_kept_and_quads_are_whole(script):
    begin = NOW()
    measured = run({"base": script(0.02), "b": script(0.02)}, pairs=None, minutes=0.01)
    assert NOW() - begin < 10
    assert measured.stopped == "time is over" and not measured.partial
    assert len(measured.pairs["b"]) % 2 == 0


def test_the_monitor_is_asked_when_all_is_balanced_and_ends_the_run(script):
    class Monitor:
        def __init__(self):
            self.told, self.asked = [], []

        def add(self, arm, pair):
            self.told.append((arm, pair.base_first))

        def enough(self, progress):
            self.asked.append((len(self.told), progress))
            return "seen enough" if len(self.asked) == 2 else None

    monitor = Monitor()
    measured = run({"base": script(), "b": script()}, monitor=monitor, pairs=100)
    assert measured.stopped == "seen enough" and not measured.partial
    assert monitor.asked == [(2, 0.02), (4, 0.04)]
    assert monitor.told[0][1] != monitor.told[1][1]


@pytest.mark.parametrize("told", [True, False], ids=["known to be dead", "refuses its reset"])
def test_an_arm_that_dies_while_another_has_its_turn_ends_the_run_with_an_end_in_the_journal(script, tmp_path, told):
    base, arm = script(), script()

    def reply(request):
        if request.id.startswith("pair 2") and told:
            arm.dead = "the worker is gone"
        elif request.id.startswith("pair 2"):
            arm.reset = refuse
        return [1]

    def refuse():
        raise EngineStoppedError("its loop has ended")

    base.reply = reply
    path = tmp_path / FILE
    with Journal(path) as journal:
        measured = run({"base": base, "b": arm}, journal=journal, pairs=8, warm_up=1)
    assert measured.partial
    why = ("died", "the worker is gone") if told else ("could not empty its cache", "its loop has ended")
    assert re.fullmatch(f"arm 'b' {why[0]} before pair [23]: {why[1]}", measured.stopped)
    assert all(record.error is None for block in measured.blocks for record in block.requests)
    assert len(measured.pairs["b"]) >= 2
    assert list(read_journal(path))[-1] == {"event": "end", "stopped": measured.stopped, "partial": True}


def test_an_arm_that_dies_ends_the_run_and_nothing_is_lost(script, tmp_path):
    arm = script()

    def reply(request):
        if request.id.startswith("pair 3"):
            arm.dead = "the worker is gone"
        return [1]

    arm.reply = reply
    path = tmp_path / FILE
    with Journal(path) as journal:
        measured = run({"base": script(), "b": arm}, journal=journal, pairs=8)
    assert measured.partial
    assert measured.stopped == "arm 'b' died in pair 3: the worker is gone"
    assert len(measured.pairs["b"]) == 3
    lines = list(read_journal(path))
    assert [line["block"] for line in lines if line["event"] == "block"] == measured.blocks
    assert lines[-1] == {"event": "end", "stopped": measured.stopped, "partial": True}


def test_a_workload_that_ends_in_the_middle_ends_the_run_and_nothing_is_lost(script, tmp_path):
    def trace():
        yield from itertools.islice(items(), 4 * (1 + 2) + 2)
        raise ConfigError("trace.csv:1001: a prompt of 9000 tokens does not fit", "path")

    with Journal(tmp_path / FILE) as journal:
        measured = run({"base": script(), "b": script()}, journal=journal, items=trace, pairs=8, warm_up=1)
    assert measured.partial
    assert measured.stopped == "the workload has ended: path: trace.csv:1001: a prompt of 9000 tokens does not fit"
    assert len(measured.pairs["b"]) == 2
    assert list(read_journal(tmp_path / FILE))[-1]["partial"] is True


def test_a_workload_that_ends_while_the_arms_warm_up_ends_the_run_with_its_reason(script, tmp_path):
    def trace():
        yield from itertools.islice(items(), 2)
        raise ConfigError("trace.csv:3: is no line")

    with Journal(tmp_path / FILE) as journal:
        measured = run({"base": script(), "b": script()}, journal=journal, items=trace)
    assert measured.partial and not measured.blocks
    assert measured.stopped == "the workload has ended: trace.csv:3: is no line"
    assert list(read_journal(tmp_path / FILE))[-1]["partial"] is True


def test_a_full_disk_ends_the_run_and_what_was_measured_is_kept(script):
    with Journal(Path("/dev/full")) as journal:
        measured = run({"base": script(), "b": script()}, journal=journal)
    assert measured.partial
    assert measured.stopped == "/dev/full cannot be written any more: No space left on device"
    assert len(measured.blocks) == 1


def test_a_journal_that_was_cut_off_is_read_as_far_as_it_goes(script, tmp_path):
    path = tmp_path / FILE
    with Journal(path) as journal:
        run({"base": script(), "b": script()}, journal=journal)
    text = path.read_text()
    path.write_text(text[: len(text) * 2 // 3])
    assert 0 < len(list(read_journal(path))) < len(text.splitlines())
    path.write_text(text.replace("\n", "}\n", 1))
    with pytest.raises(ValueError, match=f"{FILE}:1 is no line of a journal"):
        list(read_journal(path))


@pytest.fixture
def interruptible():
    """As from a terminal: a shell that starts something in the background has it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_keeps_what_it_has_the_block_that_was_under_way_included(script, tmp_path):
    arm = script(0.1)
    main = threading.main_thread().ident

    def reply(request):
        if request.id == "pair 2.25":
            signal.pthread_kill(main, signal.SIGINT)
        return [1]

    arm.reply = reply
    path = tmp_path / FILE
    with Journal(path) as journal:
        measured = run({"base": script(), "b": arm}, journal=journal, pairs=100, block={"requests": 6})
    assert measured.partial and measured.stopped == "it was interrupted"
    assert len(measured.pairs["b"]) == 2
    last = measured.blocks[-1]
    assert (last.arm, last.pair) == ("b", 2)
    assert sum(not record.incomplete for record in last.requests) < 6, "it was under way"
    assert [line["block"] for line in read_journal(path) if line["event"] == "block"] == measured.blocks


def test_where_greedy_outputs_first_differ_is_told_for_each_request(script):
    def other(request):
        tokens = list(request.prompt[:3])
        index = int(request.id.rpartition(".")[2])
        return tokens if index % 4 == 0 else tokens[:2] if index % 4 == 1 else [tokens[0], 7, tokens[2]]

    targets = {"base": script(reply=lambda request: list(request.prompt[:3])), "b": script(reply=other)}
    measured = run(targets, sampling={"temperature": 0.0}, pairs=2)
    found = measured.divergences
    assert len(found) == 6
    assert measured.outputs_compared == {"b": 8}
    by_place = {entry["index"] % 4: entry for entry in found}
    assert by_place[1]["position"] == 2 and by_place[1]["arm_token"] is None
    assert by_place[2]["position"] == 1 and by_place[2]["arm_token"] == 7
    assert by_place[2]["base_token"] % 100 == 1
    json.dumps(found)
    sampled = run(targets, sampling={"temperature": 1.0}, pairs=2)
    assert (sampled.divergences, sampled.outputs_compared) == ([], {}), "sampled outputs may differ"


@pytest.mark.parametrize("busy", [0.0, 1.0])
def test_a_busy_neighbour_is_measured(monkeypatch, script, busy):
    machine = itertools.count()
    monkeypatch.setattr("hotswap.lab.processes.machine_cpu", lambda: NOW() * (1 + busy) + 0 * next(machine))
    monkeypatch.setattr("hotswap.lab.processes.cpu_of", lambda roots: NOW())
    measured = run({"base": script(0.05), "b": script(0.05)}, pairs=2)
    for block in measured.blocks:
        assert block.disturbed == pytest.approx(busy, abs=0.3)


def test_neighbours_are_seen_for_what_they_use():
    watch = Neighbours(NOW)
    other = subprocess.Popen(
        [sys.executable, "-c", "import os; os.fork() and os._exit(0)\nwhile True: pass"])  # nobody of our family
    other.wait()
    end = NOW() + 1.0
    while NOW() < end:
        """We use a core, which is not theirs."""
    cores = watch.cores()
    pid = next(pid for pid, seen in processes().items() if spins(pid))
    os.kill(pid, signal.SIGKILL)
    assert cores is not None and cores > 0.2


@pytest.mark.parametrize("used", [lambda: cpu_of([os.getpid()]), cpu_of_this_process], ids=["ticks", "finely"])
def test_a_child_of_ours_that_ends_has_still_used_what_it_has(used):
    """Or that would count as a neighbour's, and an arm's CPU time could fall."""
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    before = used()
    child.communicate(b"\n")
    assert used() >= before


def spins(pid):
    try:
        return b"while True: pass" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
