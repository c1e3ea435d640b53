"""The inline executor: submit returns at once, errors belong to their step, and its end is bounded and told."""

import threading

import pytest

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, WorkerInfo
from hotswap.plugins.parallel.inline import InlineExecutor

INFO = WorkerInfo(ModelFacts("Fake", 1, 8, 16, 32), (), None, 0, 0, 1 << 20, 32)


class FakeWorker:
    """Runs a step only when its gate is open; raises what it is told to raise."""

    def __init__(self):
        self.gate = threading.Event()
        self.running = threading.Event()
        self.raises = {}
        self.thread = threading.current_thread()
        self.closed = False
        self.plan = None

    def info(self):
        return INFO

    def allocate(self, plan):
        self.plan = plan

    def execute(self, message):
        self.running.set()
        assert self.gate.wait(10)
        if message.step_id in self.raises:
            raise self.raises[message.step_id]
        return Verdict(message.step_id)

    def close(self):
        self.closed = True


@pytest.fixture
def worker():
    return FakeWorker()


@pytest.fixture
def executor(worker):
    def build(plan, rank):
        worker.thread = threading.current_thread()
        return worker

    executor = InlineExecutor(InlineExecutor.Options(stop_timeout_s=2.0))
    assert executor.launch(build, RankPlan()) == INFO
    yield executor
    worker.gate.set()
    executor.stop()


def test_submit_returns_before_the_model_has_run(executor, worker):
    first, second = executor.submit(StepMessage(1)), executor.submit(StepMessage(2))
    assert worker.running.wait(10)
    assert not executor.done(first)
    assert not executor.done(second)
    worker.gate.set()
    assert [executor.collect(first).step_id, executor.collect(second).step_id] == [1, 2]


def test_done_says_that_collect_returns_at_once(executor, worker):
    worker.gate.set()
    first, second = executor.submit(StepMessage(1)), executor.submit(StepMessage(2))
    executor.collect(second)
    assert executor.done(first)


def test_the_worker_is_built_and_called_on_one_thread_of_its_own(executor, worker):
    executor.allocate(CachePlan({}))
    assert worker.plan == CachePlan({})
    assert worker.thread is not threading.current_thread()
    assert worker.thread.name == "hotswap-worker"


def test_a_step_that_raises_fails_alone(executor, worker):
    worker.raises[1] = ValueError("planted")
    worker.gate.set()
    tickets = [executor.submit(StepMessage(step)) for step in (1, 2)]
    verdicts = [executor.collect(ticket) for ticket in tickets]
    assert verdicts[0].error == "ValueError: planted"
    assert verdicts[1].error is None
    assert executor.health() is None


def test_a_dead_thread_is_told_by_collect_submit_and_health(executor, worker):
    worker.raises[1] = SystemExit("gone")
    tickets = [executor.submit(StepMessage(step)) for step in (1, 2)]
    worker.gate.set()
    for ticket in tickets:
        with pytest.raises(EngineStoppedError, match="died: SystemExit: gone"):
            executor.collect(ticket)
    worker.thread.join(5)
    assert "died" in executor.health()
    with pytest.raises(EngineStoppedError):
        executor.submit(StepMessage(3))
    assert worker.closed


def test_stop_fails_what_was_queued_and_closes_the_worker(executor, worker):
    running, queued = executor.submit(StepMessage(1)), executor.submit(StepMessage(2))
    assert worker.running.wait(10)
    threading.Timer(0.05, worker.gate.set).start()
    executor.stop()
    assert executor.collect(running).step_id == 1
    with pytest.raises(EngineStoppedError, match="stopped"):
        executor.collect(queued)
    assert worker.closed
    assert executor.health() == "stopped"
    executor.stop()


def test_stop_abandons_a_step_that_does_not_end():
    worker = FakeWorker()
    executor = InlineExecutor(InlineExecutor.Options(stop_timeout_s=0.05))
    executor.launch(lambda plan, rank: worker, RankPlan())
    executor.submit(StepMessage(1))
    assert worker.running.wait(10)
    executor.stop()
    assert "abandoned" in executor.health()
    worker.gate.set()


def test_a_worker_that_cannot_be_built_raises_from_launch():
    def build(plan, rank):
        raise ConfigError("no such checkpoint", "model")

    executor = InlineExecutor()
    with pytest.raises(ConfigError, match="no such checkpoint"):
        executor.launch(build, RankPlan())
    assert "could not be built" in executor.health()
    executor.stop()


def test_more_than_one_rank_is_refused():
    plan = RankPlan((MeshDim("tensor", 2, ("heads",)),))
    with pytest.raises(ConfigError, match="2"):
        InlineExecutor().launch(lambda plan, rank: FakeWorker(), plan)
