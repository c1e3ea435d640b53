"""What fails in an exchange, in a trial or on the way back: everything as before, or an end that is explained."""

from threading import Event
from types import SimpleNamespace

import pytest

from hotswap.core.engine import client as client_module
from hotswap.core.engine import exchange as exchange_module
from hotswap.core.engine.assembly import BuiltEngine
from hotswap.core.engine.client import Engine
from hotswap.core.engine.exchange import EngineExchange, Exchanger, Report
from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.engine.trial import REVERTS, Trial, TriedKV
from hotswap.core.errors import EngineStoppedError, ExchangeError, ExchangeUnderWayError, LoopTimeoutError
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kvcache import CacheConstraints
from hotswap.core.interfaces.parallel import Replica
from hotswap.core.live import LiveComponents
from hotswap.core.testing.rig import assert_clean, build, expected, make_rig


class PlantedError(RuntimeError):
    pass


def raises(*arguments):
    raise PlantedError("planted")


def successor(rig, name):
    kv = build("kvcache", name)
    kv.configure(rig.worker.info().cache_specs, 0, CacheConstraints(128, 8, page_size=4, num_pages=64))
    return kv


def put_on_trial(rig, revert=lambda problem, lost: None, **parts):
    trial = rig.loop.lifecycle.trial = Trial(lambda: None, revert, **{"kv": False, "workers": False, **parts})
    return trial


def test_an_exchange_that_cannot_be_undone_ends_the_engine_with_that_error():
    rig = make_rig(page_size=4)
    engine, broken = Engine(rig.loop), Switch(rig.loop.limits, workers=raises, back=raises)
    try:
        with pytest.raises(EngineStoppedError, match="could not be undone: PlantedError: planted"):
            engine.call(lambda: (rig.add("a", [1, 2, 3], 100), carry_out(rig.loop, broken)))
        engine._thread.join(10)
        assert "could not be undone" in engine.health()
        assert rig.client.endings("a") == ["error"]
        assert "could not be undone" in rig.client.last("a").error
    finally:
        engine.stop()


def test_old_parts_that_do_not_come_back_at_once_are_brought_back_later():
    rig, reverts = make_rig(), []

    def revert(problem, lost):
        reverts.append(problem)
        if len(reverts) < REVERTS:
            raise ExchangeError("a transfer did not end; try again later")

    trial = put_on_trial(rig, revert)
    trial.fail("the new part failed")
    request = rig.add("a", [1, 2, 3], 6)
    rig.run()
    assert reverts == ["the new part failed"] * REVERTS
    assert trial.over.is_set()
    assert rig.loop.lifecycle.trial is None
    assert rig.client.tokens("a") == expected(request)


@pytest.mark.parametrize(("error", "times"), [(ExchangeError("planted"), REVERTS), (PlantedError("planted"), 1)])
def test_old_parts_that_never_come_back_end_the_engine_and_both_reasons_are_told(error, times):
    rig, reverts = make_rig(), []

    def revert(problem, lost):
        reverts.append(problem)
        raise error

    put_on_trial(rig, revert).fail("the new part failed")
    rig.add("a", [1, 2, 3], 6)
    with pytest.raises(EngineStoppedError, match=r"the new parts failed \(the new part failed\), and the .*planted"):
        rig.run()
    assert len(reverts) == times


@pytest.mark.parametrize("method", ["begin_plan", "usage", "owners"])
def test_a_manager_on_trial_that_raises_outside_of_a_plan_is_told_to_the_trial(method):
    rig = make_rig()
    kv, problems = rig.loop.parts.kv, []

    def revert(problem, lost):
        problems.append((problem, lost))
        del vars(kv)[method]
        rig.loop.parts.kv = kv

    trial = put_on_trial(rig, revert, kv=True)
    rig.loop.parts.kv = TriedKV.around(kv, trial)
    setattr(kv, method, raises)
    getattr(rig.loop.parts.kv, method)()
    request = rig.add("a", [1, 2, 3], 6)
    rig.run()
    [(problem, lost)] = problems
    assert f"raised in {method}: PlantedError: planted" in problem
    assert lost
    assert rig.client.tokens("a") == expected(request)
    assert_clean(rig)


def test_a_scheduler_that_raises_while_an_idle_engine_asks_it_when_to_wake_up_ends_nothing():
    rig, told = make_rig(), []
    rig.loop.parts.scheduler.next_wakeup = raises
    trial = put_on_trial(rig, lambda problem, lost: told.append(problem))
    engine = Engine(rig.loop)
    try:
        assert trial.over.wait(10)
        assert engine.failure is None
        assert "raised in next_wakeup: PlantedError: planted" in told[0]
    finally:
        engine.stop()


def test_a_row_that_fails_on_workers_on_trial_ends_no_request():
    rig, problems = make_rig(page_size=4), []
    execute = rig.worker.execute

    def broken(message):
        verdict = execute(message)
        for row in verdict.rows:
            row.error = "the logits are no numbers"
        return verdict

    def forget():
        rig.worker.sequences.clear()
        rig.worker.execute = execute

    def revert(problem, lost):
        problems.append(problem)
        carry_out(rig.loop, Switch(rig.loop.limits, workers=forget, back=forget, keeps_pages=not lost))

    rig.worker.execute = broken
    put_on_trial(rig, revert, workers=True)
    request = rig.add("a", [1, 2, 3], 6)
    rig.run()
    assert problems == ["the logits are no numbers"]
    assert rig.client.tokens("a") == expected(request)
    assert rig.client.endings("a") == ["length"]


@pytest.mark.parametrize("own", [True, False])
def test_a_row_that_fails_by_what_its_request_has_asked_for_or_has_ended_takes_no_part_back(own):
    """Else any client could undo an exchange. In the second case it was given up while its row was in flight."""
    rig = make_rig(page_size=4, depth=2)
    execute = rig.worker.execute

    def broken(message):
        verdict = execute(message)
        for row in verdict.rows:
            if row.request == "bad":
                row.kept, row.error, row.own = [], "its grammar leaves it no token", own
        return verdict

    trial = put_on_trial(rig, raises, workers=True)
    fine = rig.add("fine", [1, 2, 3], 12)
    rig.add("bad", [4, 5], 6)
    rig.worker.execute = broken
    if not own:
        rig.loop.plan_and_submit()
        assert rig.loop.pool.states["bad"].flying
        rig.loop.abort("bad")
    rig.run()
    assert trial.problem is None and trial.over.is_set()
    assert rig.client.endings("bad") == ["error" if own else "abort"]
    assert rig.client.tokens("fine") == expected(fine)
    assert_clean(rig)


def test_while_nothing_is_on_trial_nobody_looks_through_the_rows_for_errors():
    rig, passes = make_rig(), []

    class Rows(list):
        def __iter__(self):
            passes.append(len(self))
            return super().__iter__()

    execute = rig.worker.execute

    def watched(message):
        verdict = execute(message)
        verdict.rows = Rows(verdict.rows)
        return verdict

    rig.worker.execute = watched
    rig.add("a", [1, 2, 3], 6)
    rig.run()
    assert len(passes) == rig.loop.steps, "once a step, to carry out what they say"


def test_a_trial_that_has_failed_is_not_cut_short_and_no_attempt_to_bring_the_old_parts_back_is_lost_on_it():
    rig, reverts = make_rig(), []

    def revert(problem, lost):
        reverts.append(problem)
        raise ExchangeError("a transfer did not end")

    trial = put_on_trial(rig, revert)
    trial.fail("the new part failed")
    assert not any(trial.cut_short() for _ in range(REVERTS + 1))
    assert not reverts, "the loop does it, and ends where it fails"
    rig.add("a", [1, 2, 3], 6)
    with pytest.raises(EngineStoppedError, match="do not come back"):
        rig.run()
    assert len(reverts) == REVERTS


def test_cached_pages_that_an_idle_engine_hands_over_are_not_told_to_be_gone():
    rig, heard = make_rig(page_size=4), []
    rig.loop.watch(heard.extend)
    rig.add("a", list(range(8)) * 2, 2)
    rig.run()
    assert carry_out(rig.loop, Switch(rig.loop.limits, kv=successor(rig, "radix"))).handed_over == 0
    assert "reset" not in {event.kind for event in heard}
    rig.add("b", list(range(8)) * 2, 2)
    rig.run()
    assert rig.client.last("b").cached_tokens == 12


def test_a_manager_that_cannot_say_whose_pages_are_whose_takes_none_over_while_workers_change():
    rig = make_rig(page_size=4)
    request = rig.add("a", [1, 2, 3], 9)
    rig.loop.turn()
    kv = successor(rig, "radix")
    offers = kv.describe().offers - {"tables"}
    assert "handover" in offers
    kv.describe = lambda: Description(offers=offers)
    effect = carry_out(rig.loop, Switch(
        rig.loop.limits, kv=kv, workers=rig.worker.sequences.clear, back=rig.worker.sequences.clear))
    assert (effect.handed_over, effect.recomputed) == (0, 1)
    assert kv.usage().held == 0
    rig.run()
    assert rig.client.tokens("a") == expected(request)
    assert_clean(rig)


def test_a_call_that_was_given_up_does_not_happen_later():
    rig, happened = make_rig(), []
    engine = Engine(rig.loop)
    hold, held = Event(), Event()
    try:
        engine._command(lambda: (held.set(), hold.wait(10)))
        assert held.wait(10)
        with pytest.raises(LoopTimeoutError, match="and it will not happen") as caught:
            engine.call(lambda: happened.append("late"), timeout_s=0.01)
        assert not caught.value.begun
        hold.set()
        engine.call(lambda: happened.append("next"))
        assert happened == ["next"]
    finally:
        hold.set()
        engine.stop()


def test_a_call_that_ends_just_as_its_time_is_over_has_its_result(monkeypatch):
    engine, hold, waited = Engine(make_rig().loop), Event(), client_module.wait

    def wait(answers, timeout):
        in_time = waited(answers, timeout)
        assert not in_time.done
        hold.set()
        waited(answers, 10)
        return in_time

    monkeypatch.setattr(client_module, "wait", wait)
    try:
        assert engine.call(lambda: hold.wait(10) and "done", timeout_s=0.01) == "done"
    finally:
        hold.set()
        engine.stop()


def answer(rig, engine, begin):
    """What an exchange says whose parts are on trial once ``begin`` has run on the loop's thread."""
    exchange = object.__new__(EngineExchange)
    exchange.built = SimpleNamespace(engine=engine, replica=SimpleNamespace(name=""))
    return exchange._await(engine.call(begin))


def test_an_exchange_over_which_the_engine_ends_does_not_say_that_the_old_parts_are_back():
    rig = make_rig()
    engine = Engine(rig.loop)

    def begin():
        trial = put_on_trial(rig, raises)
        trial.fail("the new part failed")
        return trial

    try:
        with pytest.raises(EngineStoppedError, match=r"\(the new part failed\), and the old ones do not come back"):
            answer(rig, engine, begin)
        assert "do not come back" in engine.health()
    finally:
        engine.stop()


def test_an_exchange_whose_old_parts_take_long_to_come_back_says_so(monkeypatch):
    monkeypatch.setattr(exchange_module, "TRIAL_TIMEOUT_S", 0.0)
    rig, hold = make_rig(), Event()
    engine = Engine(rig.loop)

    def begin():
        trial = put_on_trial(rig, lambda problem, lost: hold.wait(10))
        trial.fail("the new part failed")
        return trial

    try:
        with pytest.raises(ExchangeError, match="the old ones have not come back yet: the new part failed"):
            answer(rig, engine, begin)
        hold.set()
        monkeypatch.undo()
        with pytest.raises(ExchangeError, match="the old ones are back: the new part failed"):
            answer(rig, engine, begin)
        assert engine.failure is None
    finally:
        hold.set()
        engine.stop()


def test_an_exchange_that_the_loop_does_not_come_to_in_time_is_no_end_of_the_engine(monkeypatch):
    monkeypatch.setattr(exchange_module, "LOOP_TIMEOUT_S", 0.01)
    rig, hold, let_go = make_rig(), Event(), []
    engine = Engine(rig.loop)

    class Late(EngineExchange):
        def __init__(self):
            self.built = SimpleNamespace(engine=engine, replica=SimpleNamespace(name=""))
            self._resolved, self._target = SimpleNamespace(warnings=()), SimpleNamespace(notes=())
            self._parts, self._in_place = ("one",), False

        def _prepare(self):
            pass

        def _let_go(self):
            let_go.append(True)

    try:
        engine._command(lambda: hold.wait(10))
        with pytest.raises(ExchangeError, match="did not answer within 0.01 s, and it will not happen"):
            Late().carry_out()
        assert let_go == [True]
    finally:
        hold.set()
        engine.stop()


@pytest.fixture
def several(monkeypatch):
    """An exchanger of three engines; ``failures``: why one has ended, ``ends``: why one does as its exchange begins,
    ``errors``: what its exchange raises."""
    box = SimpleNamespace(failures={}, ends={}, errors={}, exchanged=[])
    engines = [
        BuiltEngine(Replica(name, int(name), 3), SimpleNamespace(failure=None), LiveComponents(),
                    SimpleNamespace(parts=SimpleNamespace(executor=None))) for name in "012"]

    def begin(self, built, *arguments):
        self.built = built
        built.engine.failure = built.engine.failure or box.ends.get(built.replica.name)
        if built.engine.failure is not None:
            raise EngineStoppedError(built.engine.failure)

    def exchange(self):
        name = self.built.replica.name
        if name in box.errors:
            raise box.errors[name]
        box.exchanged.append(name)
        return Report(name, ())

    monkeypatch.setattr(EngineExchange, "__init__", begin)
    monkeypatch.setattr(EngineExchange, "carry_out", exchange)

    def run(replica=None):
        for built in engines:
            built.engine.failure = box.failures.get(built.replica.name)
        return box.exchanger.exchange(["scheduler=static"], replica)

    box.exchanger, box.run = Exchanger(engines, None, None, 64), run
    return box


def test_an_engine_that_has_ended_is_left_out_with_a_note(several):
    several.failures["1"] = "it is gone"
    reports = several.run()
    assert several.exchanged == ["0", "2"]
    assert reports[0].notes == ("engine '1' has ended, and was left out: it is gone",)
    with pytest.raises(EngineStoppedError, match="it is gone"):
        several.run("1")


def test_an_engine_that_ends_just_as_its_exchange_begins_is_left_out_as_one_that_had_ended_before(several):
    several.ends["1"] = "it has just gone"
    reports = several.run()
    assert several.exchanged == ["0", "2"]
    assert reports[0].notes == ("engine '1' has ended, and was left out: it has just gone",)
    several.ends = dict.fromkeys("210", "all have gone")
    with pytest.raises(EngineStoppedError, match="all have gone"):
        several.run()
    assert several.exchanged == ["0", "2"]


def test_an_engine_that_ends_on_the_way_hides_no_report_of_those_before(several):
    several.errors["1"] = EngineStoppedError("it ends")
    with pytest.raises(ExchangeError, match="it ends") as caught:
        several.run()
    assert [report.replica for report in caught.value.reports] == ["0"]
    several.errors = {"0": EngineStoppedError("it ends")}
    with pytest.raises(ExchangeError, match="engine 0: it ends") as caught:
        several.run()
    assert caught.value.reports == (), "the others serve, with the old parts"
    several.exchanged.clear()
    with pytest.raises(EngineStoppedError, match="it ends"):
        several.run("0")
    several.failures = {"1": "it is gone", "2": "it is gone"}
    with pytest.raises(EngineStoppedError, match="it ends"):
        several.run()
    assert not several.exchanged


def test_two_exchanges_at_once_are_refused_instead_of_waiting_for_one_another(several):
    with several.exchanger._lock, pytest.raises(ExchangeUnderWayError, match="another exchange is under way"):
        several.run()
    assert len(several.run()) == 3
