"""The kit is tested itself: each planted fault is found by the check that names it.

What is right passes the same checks: most faults are in templates, whose tests ``test_new.py`` runs. ``tests/kvcache``,
``tests/transfers``, ``tests/sampling`` and ``tests/deployments`` have more faults for their kinds.
"""

import importlib.util
import itertools
import logging
import sys
from functools import partial
from pathlib import Path

import pytest

from hotswap.core.hooks import Observer
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.request import SamplingParams
from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint
from hotswap.core.testing.dense import loaded, logits_of
from hotswap.core.testing.model import IDS
from hotswap.core.testing.observer import FOR_SERVERS, HOOKS, SELDOM, ObserverSuite
from hotswap.core.testing.suites import SUITES

_SPEC = importlib.util.spec_from_file_location("kit_faults", Path(__file__).with_name("faults.py"))
_FAULTS = sys.modules["kit_faults"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FAULTS)

FAULTS = [(kind, fault, check) for kind, faults in _FAULTS.FAULTS.items() for fault, check in faults.items()]


def suite_for(kind, cls):
    """A suite whose component is a ``cls``, and short."""
    part = SUITES[kind]
    make = _FAULTS.MAKERS.get(kind, lambda cls: cls())
    members = dict(part.quick)
    members[part.maker] = lambda self, **options: make(cls) if not options else cls(cls.Options(**options))
    if kind == "logits_processor":
        members["make_request"] = lambda self, request, tokens, length, rng: NewRequest(
            request, tokens, length, SamplingParams(extra={cls.__name__: {
                "tokens": [rng.randrange(40)], "by": rng.uniform(1, 5)}}), seed=0)
    if kind == "router":
        members["balances"] = False
    if kind == "model":
        members["reference"] = lambda self, folder: logits_of(
            loaded(_FAULTS.T.model.MyPart(), open_checkpoint(str(folder), progress=False)), IDS)
    members |= {
        "speculator": {"texts": 600}, "launcher": {"patience_s": 4.0}, "kv_transfer": {"trials": 20}}.get(kind, {})
    return type("Suite", (part.load(),), members)


def cases(check):
    """The arguments of each of its parametrized runs."""
    marks = [mark for mark in getattr(check, "pytestmark", ()) if mark.name == "parametrize"]
    columns = []
    for mark in marks:
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        columns.append([dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in mark.args[1]])
    for combination in itertools.product(*columns):
        yield {name: value for chosen in combination for name, value in chosen.items()}


def outcome(kind, cls, name, folder):
    """What the check says of the class: the first exception, or None."""
    suite = suite_for(kind, cls)
    check = getattr(suite, name)
    wanted = check.__code__.co_varnames[: check.__code__.co_argcount]
    for number, arguments in enumerate(cases(check)):
        place = folder / str(number)
        place.mkdir(parents=True)
        one = suite()
        if "tmp_path" in wanted:
            arguments["tmp_path"] = place
        if "checkpoint" in wanted:
            model = tiny_checkpoint(place / "model", getattr(one, "config", LLAMA))
            arguments["checkpoint"] = open_checkpoint(str(model), progress=False)
        try:
            getattr(one, name)(**arguments)
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception) as error:
            return error
    return None


@pytest.fixture(autouse=True)
def quiet():
    """What breaks on purpose is logged at length."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("kind", "fault", "check"), FAULTS, ids=[f"{kind}-{fault.__name__}" for kind, fault, _ in FAULTS])
def test_a_fault_is_found_by_the_check_that_names_it(kind, fault, check, tmp_path):
    """And by an assertion that says so, not by the way."""
    error = outcome(kind, fault, check, tmp_path)
    assert error is not None, f"nobody notices that {fault.__doc__}"
    assert isinstance(error, (AssertionError, pytest.fail.Exception, *_FAULTS.RAISE.get(fault, ()))), repr(error)


def test_every_kind_has_at_least_two():
    assert {kind for kind, *_ in FAULTS} == set(SUITES)
    assert all(len(faults) >= 2 for faults in _FAULTS.FAULTS.values())


def test_a_right_component_has_none_of_these_outcomes(tmp_path):
    """So that what is found is the fault and not this module."""
    for kind, check in (("model", "test_sharded_over_ranks_it_gives_the_same"),
                        ("shard", "test_all_ranks_together_give_what_one_gives"),
                        ("logits_processor", "test_rows_do_not_touch_each_other"),
                        ("kv_transfer", "test_a_request_that_was_swapped_goes_on_where_it_was")):
        assert outcome(kind, getattr(_FAULTS.T, kind).MyPart, check, tmp_path / kind) is None


@pytest.mark.parametrize("check", [
    "test_prepared_parts_wait_until_an_exchange_puts_them_in_place",
    "test_parts_that_a_rank_refuses_or_cannot_load_are_prepared_on_none",
    "test_an_exchange_that_fails_on_a_rank_fails_and_is_taken_back_on_all",
    "test_stop_closes_the_workers_within_its_bound_and_may_come_twice",
])
def test_two_ranks_without_a_fault_pass_what_finds_the_faults_of_two(check, tmp_path):
    assert outcome("executor", _FAULTS.TwoRanks, check, tmp_path) is None


def test_every_hook_is_called_by_the_traffic_of_the_observers_suite_or_known_not_to_be():
    suite, seen = ObserverSuite(), set(SELDOM) | set(FOR_SERVERS)
    suite.make_observer = Observer
    with suite.watched() as hub:
        for hook in HOOKS:
            hub.listen("observer:all", hook, partial(seen.add, hook), ())
        suite._traffic(hub)
    assert seen == set(HOOKS)


def test_the_documentation_lists_each_fault_with_the_check_that_finds_it():
    text = (Path(__file__).parents[2] / "docs/kit.md").read_text().partition("## Faults")[2]
    listed = [tuple(cell.strip().strip("`") for cell in line.strip("|").split("|"))
              for line in text.splitlines() if line.startswith("| ")][1:]
    assert listed == [(kind, fault.__doc__, check) for kind, fault, check in FAULTS]
    assert len(listed) >= 25
