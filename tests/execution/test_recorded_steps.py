"""Steps on a CPU are recorded when they come again, kernels of ours and operators of torch's, and replayed."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.execution import records
from hotswap.core.execution.records import RecordedForward
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.static import GraphKey
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.graphs import CaptureError
from hotswap.core.interfaces.kvcache import CachePlan, GroupPlan
from hotswap.core.interfaces.parallel import Take
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.speculators.none import NoSpeculator

pytest.importorskip("numba")

from hotswap.plugins.attention import cpu as cpu_attention  # they import numba
from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.cpu.arena import Arena
from hotswap.plugins.cpu.recording import StepRecorder
from hotswap.plugins.operators.cpu import CPUOperators

NORM = CPUOperators().bind("cpu", torch.float32)


@pytest.fixture
def make(model, make_host_of):
    """``make(64)`` gives a host whose worker records steps of up to so many tokens."""

    def build(most=64, speculator=None, full=True):
        settings = WorkerSettings("float32", "cpu", 160, 256, 6, graphs=(GraphKey(most, 1),), needs_graphs=full)
        made = ModelWorker(
            model, model.facts({}), CPUAttention(), speculator or NoSpeculator(), (), settings, lambda: 0.0)
        host = make_host_of(made, 4, 200)
        host.records = made._runner.records
        return host

    return build


@pytest.fixture
def recorded_norm():
    """What records a norm of ``x``, ``x``, and where the results are."""
    x, weight, out = torch.randn(400, 64), torch.ones(64), torch.zeros(400, 64)
    return lambda: StepRecorder().capture(lambda: out.copy_(NORM.rms_norm(x, weight, 1e-5))), x, out


def decode(host, names):
    for name in names:
        host.row(name)
    for row in host.step().values():
        assert row.error is None, row.error


def test_steps_of_as_many_tokens_as_came_twice_are_replayed_with_the_tokens_of_eager_ones(make, model, reference):
    prompts = {name: [place + 3, *range(1, 2 + 9 * place)] for place, name in enumerate("abcd")}
    host, seen = make(), []
    for name, prompt in prompts.items():
        host.new(name, prompt)
        host.prefill(name)
    model.before_forward = lambda ids: seen.append(len(ids))
    counts = [1, 3, 4, 2] * 5
    for count in counts:
        decode(host, list(prompts)[:count])
    model.before_forward = lambda ids: None
    for name, prompt in prompts.items():
        got = host.tokens[name]
        assert got == prompt + reference.greedy(prompt, len(got) - len(prompt))
    assert len(host.tokens["a"]) == len(prompts["a"]) + 1 + len(counts)
    assert seen == [1, 3, 4, 2] * 2, "what comes for the third time is replayed without the model's Python"
    assert host.records.counts.totals == {
        "eager_first_sizes": 4 + 4, "graph_captures": 4, "graph_replays": len(counts) - 8}


def test_chunks_of_prompts_beside_decodes_are_replayed_whatever_rows_they_are_of(make, reference):
    long = [int(token) for token in torch.randint(0, 60, (120,), generator=torch.Generator().manual_seed(3))]
    host = make()
    host.new("a", [5, 6, 7])
    host.prefill("a")
    for name in ("b", "c"):
        host.new(name, long)
        for _ in range(12):
            host.row("a")
            host.row(name, 10)
            host.step()
        decode(host, ["a", name])
    for name, prompt in {"a": [5, 6, 7], "b": long, "c": long}.items():
        got = host.tokens[name]
        assert got == prompt + reference.greedy(prompt, len(got) - len(prompt))
    assert len(host.tokens["a"]) == 3 + 1 + 2 * 13
    assert host.records.counts.totals["graph_replays"] >= 2 * 10


def test_any_numbers_of_drafts_are_replayed(make, reference, script):
    truth = {name: [place + 3] + reference.greedy([place + 3], 60) for place, name in enumerate("ab")}
    lengths, drafts = {}, iter([(3, 0), (1, 2), (2, 1), (0, 3)])

    def plan(request, tokens, slots):
        if request == "a" and slots:
            lengths["a"], lengths["b"] = next(drafts)
        right = truth[request][len(tokens) : len(tokens) + lengths[request]] if slots else []
        return [*right[:1], *(60 - token for token in right[1:])]  # the first is right

    host = make(speculator=script(plan))
    for name in "ab":
        host.new(name, truth[name][:1])
        host.prefill(name)
    for _ in range(4):
        for name in "ab":
            host.row(name, 1, 3)
        host.step()
    for name in "ab":
        assert host.tokens[name] == truth[name][: len(host.tokens[name])]
    assert sum(row.accepted for verdict in host.verdicts for row in verdict.rows) == 6
    assert host.records.counts.totals["graph_replays"] == 2, "of five tokens each time"


def test_longer_steps_than_are_recorded_run_eagerly_and_say_so(make):
    host = make(2)
    for name in "abc":
        host.new(name, [3, 4, 5])
        host.prefill(name)
    decode(host, "abc")
    assert host.verdicts[-1].counts == {"eager_long_steps": 1}
    assert host.records.counts.totals == {"eager_long_steps": 4}


def test_records_that_are_not_used_are_let_go(monkeypatch):
    monkeypatch.setattr(records, "MOST_RECORDS", 2)
    passes = []
    forward = RecordedForward(StepRecorder(), lambda x: passes.append(len(x)) or [x * 2], 8)
    for size in (1, 1, 2, 2, 1, 3, 3):  # each is recorded when it comes for the second time; 1 is used after 2
        x = torch.randn(size)
        assert torch.equal(*forward(x), x * 2)
    assert [sizes for _, sizes in forward._records] == [(1,), (3,)]
    before = len(passes)
    forward(torch.randn(1))
    assert len(passes) == before
    forward(torch.randn(2))
    assert len(passes) == before + 1, "what was let go is recorded again"


def test_results_are_not_changed_by_the_next_step():
    forward = RecordedForward(StepRecorder(), lambda x, y: [x + 1, x * y], 8)
    inputs = [torch.full((3,), float(turn)) for turn in range(5)]
    kept = [(x, *forward(x, torch.ones(3))) for x in inputs]
    for x, more, same in kept:
        assert torch.equal(more, x + 1)
        assert torch.equal(same, x)
    assert forward.counts.totals["graph_replays"] == 3


def test_what_is_neither_a_kernel_nor_an_operator_is_found_out_at_the_start(make, model, caplog):
    def forward(inputs, positions, attend, step=model.forward):
        return step(inputs, positions, attend) + ctypes.c_int64.from_address(inputs.data_ptr()).value

    model.forward = forward
    with pytest.raises(ConfigError, match=r"gives other numbers than the step.*choose 'auto' or 'off'"):
        make()
    host = make(full=False)
    assert host.records is None
    assert "graphs: off after all, since a replayed step gives other numbers" in caplog.text


def test_what_is_done_for_wanted_tokens_alone_is_tried_at_the_start_too(make, model, monkeypatch):
    def forward_some(inputs, positions, attend, wanted):
        return model.forward(inputs, positions, attend)[wanted.tolist()]

    model.forward_some = forward_some
    with pytest.raises(ConfigError, match="Tensor.tolist makes Python wait"):
        make()


def test_a_fault_while_a_step_is_recorded_harms_nobody(make, model, reference, monkeypatch, caplog):
    host, like = make(), Arena.like
    for name in "ab":
        host.new(name, [5, 6, 7])
        host.prefill(name)
    monkeypatch.setattr(Arena, "like", lambda self, tensor: like(self, tensor) if len(tensor) > 1 else 1 / 0)
    for names in ("a", "ab", "a", "ab", "a", "ab"):
        decode(host, names)
    for name, count in {"a": 7, "b": 4}.items():
        assert host.tokens[name] == [5, 6, 7, *reference.greedy([5, 6, 7], count)]
    assert "of 1 tokens, run eagerly, since recording it raised ZeroDivisionError" in caplog.text
    assert host.records.counts.totals["graph_replays"] == 1, "of two tokens"


def test_a_pass_that_cannot_be_recorded_is_carried_through_and_changes_things_once():
    count = torch.zeros(1)

    def forward(x):
        count.add_(1)
        return [x * float(x.sum()), x + 1]

    record = RecordedForward(StepRecorder(), forward, 8)
    for turn in range(1, 5):
        x = torch.full((3,), float(turn))
        first, second = record(x)
        assert torch.equal(first, x * 3 * turn)
        assert torch.equal(second, x + 1)
        assert count.item() == turn
    assert record.counts.totals == {"eager_first_sizes": 1, "eager_uncaptured": 3}


def test_a_pass_that_has_never_ended_is_run_eagerly_until_it_does():
    raises = iter([True, True, False, False])

    def forward(x):
        if next(raises):
            raise ZeroDivisionError
        return [x * 2]

    record = RecordedForward(StepRecorder(), forward, 8)
    with pytest.raises(ZeroDivisionError):
        record(torch.ones(3))
    for _ in range(2):
        assert torch.equal(*record(torch.ones(3)), torch.full((3,), 2.0))


def test_what_was_recorded_for_other_threads_is_recorded_anew():
    passes, threads = [], torch.get_num_threads()
    forward = RecordedForward(StepRecorder(), lambda x: passes.append(torch.get_num_threads()) or [x * 2], 8)
    try:
        for number in (1, 1, 1, 2, 2, 2, 1, 2):
            torch.set_num_threads(number)
            assert torch.equal(*forward(torch.ones(4)), torch.full((4,), 2.0))
    finally:
        torch.set_num_threads(threads)
    assert passes == [1, 1, 2, 2]
    assert forward.counts.totals["graph_replays"] == 4


def test_two_engines_that_share_a_model_replay_steps_of_their_own(make, reference):
    hosts = [make(), make()]
    for place, host in enumerate(hosts):
        for name in "ab":
            host.new(name, [place + 3, *range(5, 9 + 4 * place)])
            host.prefill(name)
    for turn in range(8):
        for place, host in enumerate(hosts):
            decode(host, "ab"[: 1 + (turn + place) % 2])
    for place, host in enumerate(hosts):
        assert host.records.counts.totals["graph_replays"] == 4
        for name in "ab":
            prompt, got = [place + 3, *range(5, 9 + 4 * place)], host.tokens[name]
            assert got == prompt + reference.greedy(prompt, len(got) - len(prompt))


def test_a_record_finds_the_plan_where_it_has_moved_to_for_a_larger_step(make, reference, monkeypatch):
    moved, grow = [], cpu_attention._State._grow
    monkeypatch.setattr(cpu_attention._State, "_grow", lambda self: moved.append(grow(self)) or moved[-1])
    host, prompts = make(), {"a": [3, 4], **{name: [place, *range(60)] * 2 for place, name in enumerate("bcd", 5)}}
    host.new("a", prompts["a"])
    host.prefill("a")
    for _ in range(3):
        decode(host, "a")
    assert host.records.counts.totals["graph_replays"] == 1
    moved.clear()
    for name in "bcd":
        host.new(name, prompts[name])
        host.prefill(name)
    decode(host, "abcd")
    assert any(moved)
    for _ in range(3):
        decode(host, "a")
    assert host.records.counts.totals["graph_replays"] == 4
    got = host.tokens["a"]
    assert got == prompts["a"] + reference.greedy(prompts["a"], len(got) - 2)


def test_another_attention_backend_is_recorded_only_if_it_brings_a_recorder_along(model, caplog):
    settings = WorkerSettings("float32", "cpu", 160, 256, 6, graphs=(GraphKey(64, 1),))
    worker = ModelWorker(
        model, model.facts({}), CPUAttention(), NoSpeculator(), (), settings, lambda: 0.0)
    groups = {spec.group: GroupPlan(50, 4) for spec in worker.info().cache_specs}
    worker.allocate(CachePlan(groups))
    assert worker._runner.records is not None
    first, passes = worker._placed.device, []
    model.before_forward = lambda ids: passes.append(len(ids))
    other = TorchAttention(TorchAttention.Options(graphs=True))
    for backend, recorded in ((other, False), (CPUAttention(), True)):
        worker.prepare({"attention": backend})
        worker.exchange(CachePlan(groups), False, Take.PREPARED)
        assert (worker._runner.records is not None) is recorded
        assert worker._runner.graphs is None
    assert worker._placed.device is not first
    assert not passes, "what was tried at the start is not tried again while requests wait"
    assert caplog.text.count("graphs: off after all, since attention:TorchAttention brings nothing along") == 1
    worker.close()
    strict = ModelWorker(
        model, model.facts({}), CPUAttention(), NoSpeculator(), (), replace(settings, needs_graphs=True), lambda: 0.0)
    with pytest.raises(ConfigError, match="'full' was asked for, but attention:TorchAttention brings nothing along"):
        strict.prepare({"attention": other})


def test_a_step_that_looks_at_numbers_cannot_be_recorded_and_stays_eager(make, model, reference, caplog):
    def look(ids):
        if len(ids) == 2:
            ids.sum().item()

    model.before_forward = look
    host = make()
    for name in "ab":
        host.new(name, [5, 6, 7])
        host.prefill(name)
    for _ in range(4):
        decode(host, "ab")
    assert host.tokens["b"] == [5, 6, 7, *reference.greedy([5, 6, 7], 5)]
    assert caplog.text.count("of 2 tokens, run eagerly, since aten.item") == 1
    assert host.records.counts.totals["eager_uncaptured"] == 3


# The recorder


def test_a_replay_reads_what_is_there_now_and_runs_no_python():
    calls, operators = [], CPUOperators().bind("cpu", torch.float32)
    x, weight, scale, out = torch.zeros(3, 8), torch.randn(8, 8), torch.rand(8), torch.zeros(3, 8)

    def run():
        calls.append(1)
        normed = operators.rms_norm(x, scale, 1e-5)
        made = torch.nn.functional.linear(normed, weight).reshape(8, 3).view(3, 8)
        other = torch.empty_like(made)
        other.copy_(made)
        other[:, :4].add_(1.0)
        operators.add_rms_norm(other, normed, scale, 1e-5)
        first, _ = other.max(1, keepdim=True)
        out.copy_(other - first)

    recorder = StepRecorder()
    replays = [recorder.capture(run), recorder.capture(run)]  # in the same memory
    for replay in replays * 2:
        x.normal_()
        replay()
        got = out.clone()
        run()
        assert torch.equal(got, out)
        assert got.abs().sum() > 0
    assert len(calls) == 2 + 4


def test_a_record_outlives_the_thread_that_made_it(recorded_norm):
    (record, x, out), expected = recorded_norm, []
    replays = []
    thread = threading.Thread(target=lambda: replays.append(record()))
    thread.start()
    thread.join()
    for _ in range(3):
        x.normal_()
        replays[0]()
        expected.append(torch.equal(out, NORM.rms_norm(x, torch.ones(64), 1e-5)))
    assert expected == [True] * 3


def test_a_record_has_words_of_its_own_while_the_layer_is_called_elsewhere(recorded_norm):
    record, x, out = recorded_norm
    replay, other, wrong = record(), torch.randn(400, 64), []
    expected, others = NORM.rms_norm(x, torch.ones(64), 1e-5), NORM.rms_norm(other, torch.ones(64), 1e-5)
    done = threading.Event()

    def again():
        while not done.is_set():
            replay()
            wrong.append(not torch.equal(out, expected))

    thread = threading.Thread(target=again)
    thread.start()
    for _ in range(500):
        assert torch.equal(NORM.rms_norm(other, torch.ones(64), 1e-5), others)
    done.set()
    thread.join()
    assert len(wrong) > 20
    assert not any(wrong)


def test_records_share_the_memory_of_what_is_alive_only_within_them():
    recorder = StepRecorder()
    x, out = torch.randn(64, 1000), torch.zeros(64, 1000)

    def run(rows):
        y = x[:rows]
        for _ in range(20):
            y = y * 1.5
        out[:rows].copy_(y)

    replays = {}
    for rows in (64, 40, 3):
        replays[rows] = recorder.capture(lambda rows=rows: run(rows))
    assert recorder._arena.nbytes <= (2 + 2 / 16) * (1 << 18) * 1.1  # two at a time, of 250 and of 12 kB
    for rows, replay in replays.items():
        x.normal_()
        replay()
        expected = x[:rows]
        for _ in range(20):
            expected = expected * 1.5
        assert torch.equal(out[:rows], expected)


def test_memory_of_the_arena_is_given_out_once_at_a_time():
    arena, random, alive = Arena(), np.random.default_rng(1), []
    for turn in range(300):
        if alive and random.random() < 0.5:
            tensor, value = alive.pop(random.integers(len(alive)))
            assert bool((tensor == value).all())
        else:
            tensor = arena.like(torch.empty(int(random.integers(0, 5000)), dtype=torch.int32))
            alive.append((tensor.fill_(turn), turn))
    lent = arena.borrowed(alive[0][0][3:])
    assert lent.data_ptr() == alive[0][0][3:].data_ptr()
    assert len({tensor.data_ptr() for tensor, _ in alive}) == len(alive)
    taken = arena.nbytes
    del tensor, alive
    gc.collect()
    for _ in range(5):
        arena.like(torch.empty(4000, dtype=torch.int32))
    assert arena.nbytes == taken
    outside = torch.zeros(3)
    assert arena.borrowed(outside) is outside


@pytest.mark.parametrize("look", [
    lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: bool((x > 0).all()),
    lambda x: torch.where(x > 0), lambda x: torch.allclose(x, x), lambda x: x.repeat_interleave(x.long()),
    lambda x: x[x.to(torch.uint8)], lambda x: x.tolist(), lambda x: x.numpy(), lambda x: np.asarray(x),
    lambda x: np.from_dlpack(x), lambda x: torch.tensor_split(x, x.long()), lambda x: x.tensor_split(x.long()),
    lambda x: torch.tensor_split(input=x, tensor_indices_or_sections=x.long()),
    lambda x: x.narrow(0, x.long().sum() - 2, 1), lambda x: torch.nn.functional.one_hot(x.long()),
    lambda x: torch.tensor([x[0], x[1]]), lambda x: torch.as_tensor(data=[[x[0]], [x[1]]]),
], ids=["item", "nonzero", "mask", "truth", "where", "allclose", "repeat", "bytes", "tolist", "numpy", "array",
        "dlpack", "split", "method_split", "named_split", "narrow", "one_hot", "list", "lists"])
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("inference", [True, False])
def test_what_python_waits_for_is_named(look, inference):
    with torch.inference_mode(inference), pytest.raises(
            CaptureError, match=r"(aten|torch|Tensor)\..* makes Python wait for what tensors hold"):
        StepRecorder().capture(lambda: look(torch.ones(3)))


RECORD = """
import sys, torch
from hotswap.plugins.cpu.recording import StepRecorder
from hotswap.plugins.operators.cpu import CPUOperators

x, weight, out = torch.randn(3, 64), torch.ones(64), torch.zeros(3, 64)
norm = CPUOperators().bind("cpu", torch.float32).rms_norm
replay = StepRecorder().capture(lambda: out.copy_(norm(x + 1, weight, 1e-5)))
x.copy_(torch.randn(3, 64))
replay()
assert torch.equal(out, norm(x + 1, weight, 1e-5))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_a_start_that_records_does_not_wait_for_torch_s_compiler_to_be_imported():
    done = subprocess.run(
        [sys.executable, "-c", RECORD], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
