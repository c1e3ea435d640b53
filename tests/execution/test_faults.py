"""What goes wrong stays where it went wrong: in one row, one request, or one step."""

import threading

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.execution.placed import check_support
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.attention import AttentionSupport, GroupShape
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.messages import StepMessage
from hotswap.core.interfaces.parallel import RankPlan
from hotswap.core.interfaces.scheduler import Row
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.parallel.inline import InlineExecutor
from hotswap.plugins.speculators.ngram import NgramSpeculator
from hotswap.plugins.speculators.none import NoSpeculator


class Ban(LogitsProcessor):
    """Bans all tokens of the requests in ``victims``, once; remembers whose state it holds and what was kept."""

    def __init__(self, victims=()):
        super().__init__()
        self.victims, self.held, self.raises, self.kept = set(victims), set(), None, []

    def wants(self, request):
        return True

    def begin(self, request):
        self.held.add(request.id)

    def accept(self, request, kept):
        self.kept.append((request, *kept))

    def end(self, request):
        self.held.remove(request)

    def apply(self, logits, rows):
        if self.raises:
            raise self.raises
        for row in rows:
            if row.request in self.victims:
                logits[row.index] = -torch.inf
                self.victims.remove(row.request)


def start(host, prompts, names):
    for name in names:
        host.new(name, prompts[name])
        host.row(name, len(prompts[name]))
    return host.step()


def test_a_row_of_nan_fails_alone(make_host, reference, prompts, poison):
    host = make_host()
    host.new("sick", [5, poison, 7])
    host.row("sick", 3)
    rows = start(host, prompts, "ade")
    assert "NaN" in rows["sick"].error
    assert not rows["sick"].own, "a kernel may be at fault"
    assert rows["sick"].kept == []
    for name in "ade":
        assert host.generate(name, 4) == reference.greedy(prompts[name], 5)[1:]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_of_a_row_of_nan_can_be_used_again(make_host, reference, prompts, poison, page_size):
    host = make_host(page_size)
    host.new("sick", [poison] * 40)
    host.row("sick", 40)
    host.step()
    host.drop("sick")
    start(host, prompts, "ad")
    for name in "ad":
        assert host.generate(name, 4) == reference.greedy(prompts[name], 5)[1:]


def test_rows_of_a_failed_request_fail_until_it_is_dropped(make_host, reference, prompts):
    ban = Ban("d")
    host = make_host(processors=[ban])
    host.new("d", prompts["d"])
    host.row("d", 9)
    first = host.take()
    host.row("d")
    second = host.take()
    verdicts = [host.worker.execute(message) for message in (first, second)]
    assert verdicts[1].rows[0].error == verdicts[0].rows[0].error
    host.drop("d")
    host.new("d", prompts["a"])
    assert host.generate("d", 3) == reference.greedy(prompts["a"], 3)


def test_a_row_without_candidates_fails_alone(make_host, reference, prompts):
    ban = Ban("d")
    host = make_host(processors=[ban])
    rows = start(host, prompts, "ad")
    assert "no token is left" in rows["d"].error
    assert rows["d"].own
    assert rows["a"].kept == reference.greedy(prompts["a"], 1)
    assert ban.kept == [("a", *rows["a"].kept)]


def test_an_exception_in_the_model_fails_the_step_and_not_the_next(make_host, model, reference, prompts):
    host = make_host()
    start(host, prompts, "a")
    host.new("d", prompts["d"])
    host.row("d", 9)
    failing = host.take()
    host.row("d")
    host.row("a")
    chained = host.take()

    def raise_once(ids):
        model.before_forward = lambda ids: None
        raise RuntimeError("planted")

    model.before_forward = raise_once
    verdict = host.worker.execute(failing)
    assert verdict.error == "model 'TinyModel' raised in forward: RuntimeError: planted"
    assert verdict.rows == []
    rows = {row.request: row for row in host.worker.execute(chained).rows}
    assert rows["d"].error == "model 'TinyModel' raised in forward: RuntimeError: planted"
    assert rows["a"].error is None
    host.tokens["a"] += rows["a"].kept
    host.drop("d")
    host.new("d", prompts["d"])
    assert host.generate("d", 3) == reference.greedy(prompts["d"], 3)
    assert host.generate("a", 2) == reference.greedy(prompts["a"], 4)[2:]


def test_suspensions_of_a_step_that_fails_are_reported(make_host, model, prompts):
    host = make_host()
    start(host, prompts, "ad")

    def fail(ids):
        raise RuntimeError("planted")

    model.before_forward = fail
    host.suspend("a")
    host.row("d")
    verdict = host.worker.execute(host.take())
    assert verdict.error
    assert [entry.request for entry in verdict.suspended] == ["a"]


def test_rows_of_unknown_requests_are_told_so(make_host, prompts):
    host = make_host()
    start(host, prompts, "a")
    host.row("a")
    host.message.rows.append(Row("ghost", 1, 0))
    host.message.drops.append("ghost")
    host.message.suspensions.append(("ghost", "recompute"))
    verdict = host.worker.execute(host.take())
    assert [(row.request, row.error is None) for row in verdict.rows] == [("a", True), ("ghost", False)]
    assert verdict.suspended == []


def test_a_row_past_the_known_tokens_is_a_fault_of_ours(make_host, prompts):
    host = make_host()
    host.new("a", prompts["a"])
    host.row("a", 4)
    assert "only 3 tokens are known" in host.worker.execute(host.take()).error


def test_a_row_past_its_pages_is_a_fault_of_ours(make_host, prompts):
    host = make_host(page_size=4)
    host.new("d", prompts["d"])
    host.grant("d", 8)
    host.message.rows.append(Row("d", 9, 0))
    assert "reaches 9 tokens" in host.worker.execute(host.take()).error


def test_processors_hold_state_of_live_requests_only(make_host, prompts):
    ban = Ban()
    host = make_host(processors=[ban])
    start(host, prompts, "ade")
    host.drop("a")
    host.suspend("d")
    host.new("e", prompts["e"])
    host.step()
    assert ban.held == {"e"}


def test_a_request_that_a_processor_cannot_begin_fails_alone(make_host, reference, prompts):
    class Picky(Ban):
        def begin(self, request):
            if request.id == "d":
                raise ValueError("planted")

    before = Ban()
    host = make_host(processors=[before, Picky()])
    rows = start(host, prompts, "dae")
    assert "logits_processor 'Picky' raised in begin: ValueError: planted" in rows["d"].error
    assert rows["d"].own
    for name in "ae":
        assert rows[name].kept == reference.greedy(prompts[name], 1)
    host.drop("d")
    host.step()
    assert before.held == {"a", "e"}


def test_a_plugin_that_raises_between_steps_loses_no_grant(make_host, reference, prompts):
    class Broken(NgramSpeculator):
        def forget(self, request_ids):
            raise ValueError("planted")

    host = make_host(page_size=4, speculator=Broken())
    start(host, prompts, "ab")
    host.drop("b")
    host.grant("a", 12)
    assert "raised in forget" in host.worker.execute(host.take()).error
    assert host.generate("a", 6) == reference.greedy(prompts["a"], 7)[1:]


@pytest.mark.parametrize("method", ["apply", "accept"])
def test_a_processor_that_raises_is_named_and_ends_only_the_requests_that_wanted_it(
    make_host, prompts, reference, method,
):
    class Picky(Ban):
        def wants(self, request):
            return request.id == "a"

    ban = Picky()

    def planted(*arguments):
        raise ValueError("planted")

    setattr(ban, method, planted)
    host = make_host(processors=[ban])
    for name in ("a", "b"):
        host.new(name, prompts[name])
        host.row(name, len(prompts[name]))
    verdict = host.worker.execute(host.take())
    assert verdict.error is None
    failed, fine = verdict.rows
    assert f"logits_processor 'Picky' raised in {method}: ValueError: planted" in failed.error
    assert failed.own
    assert fine.error is None
    assert fine.kept == reference.greedy(prompts["b"], 1)


def test_submit_returns_before_the_model_has_run(make_host, model, prompts):
    running, gate = threading.Event(), threading.Event()

    def wait(ids):
        running.set()
        assert gate.wait(10)

    model.before_forward = wait
    host = make_host()
    executor = InlineExecutor()
    executor.launch(lambda plan, rank: host.worker, RankPlan())
    host.new("a", prompts["a"])
    host.row("a", 3)
    tickets = [executor.submit(host.take())]
    host.row("a")
    tickets.append(executor.submit(host.take()))
    assert running.wait(10)
    assert not executor.done(tickets[0])
    gate.set()
    kept = [executor.collect(ticket).rows[0].kept for ticket in tickets]
    assert [len(tokens) for tokens in kept] == [1, 1]
    executor.stop()


SETTINGS = WorkerSettings("bfloat16", "cpu", 64, 64, 4)


class Narrow(TorchAttention):
    def support(self):
        return AttentionSupport(
            devices=("cuda",), dtypes=("float16",), head_dims=(64, 128), windows=False, softcap=False)


def test_everything_that_a_backend_does_not_support_is_listed_at_the_start():
    shapes = {"full": GroupShape(4, 2, 80, 0, 1.0, softcap=30.0), "window": GroupShape(4, 2, 80, 0, 1.0, window=128)}
    with pytest.raises(ConfigError) as caught:
        check_support(Narrow(), shapes, SETTINGS.device, SETTINGS.dtype)
    message = str(caught.value)
    for part in ("attention:Narrow", "device cpu", "dtype bfloat16", "head size 80, but 64, 128", "window of 128",
                 "softcap of 30.0"):
        assert part in message
    check_support(TorchAttention(), shapes, SETTINGS.device, SETTINGS.dtype)


def test_info_leaves_room_for_activations_and_logits(model):
    def free(**changes):
        settings = WorkerSettings("float32", "cpu", 64, changes.pop("max_batch_tokens", 64), 4, **changes)
        return ModelWorker(
            model, model.facts({}), TorchAttention(), NoSpeculator(), (), settings, lambda: 0.0).info().free_bytes

    assert 0 < free(memory_fraction=0.1) < free(memory_fraction=0.5)
    assert free(max_batch_tokens=10**9) == 0


def test_an_empty_step_has_an_empty_verdict(make_host):
    verdict = make_host().worker.execute(StepMessage(7))
    assert (verdict.step_id, verdict.rows, verdict.error) == (7, [], None)
