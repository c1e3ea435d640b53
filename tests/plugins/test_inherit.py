"""Exchanging a component by a flag or a variable: what the file told the former one is handed on where it fits."""

from pathlib import Path

import pytest

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.config.describe import rows
from hotswap.core.errors import ConfigError
from hotswap.core.registry import Registry

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart.yaml"

RIVAL = """
    from typing import Annotated
    from parts import concrete
    from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
    from hotswap.core.interfaces.scheduler import QueuePolicy, Scheduler

    class Plain(ComponentOptions):
        pace: int = 1

    class Paced(ComponentOptions):
        pace: int = 1
        policy: Annotated[ComponentRef, Part("queue_policy")] = ComponentRef(use="fake")

    class Weighted(ComponentOptions):
        weight: int = 1

    PlainScheduler = concrete(Scheduler, Options=Plain)
    PacedScheduler = concrete(Scheduler, Options=Paced)
    WeightedPolicy = concrete(QueuePolicy, Options=Weighted)
"""


@pytest.fixture
def load(parts, install):
    """Loads a config of fake parts; the schedulers plain (pace) and paced (pace, policy) are installed, too."""
    install("rival", {
        "hotswap.scheduler": {"plain": "rival:PlainScheduler", "paced": "rival:PacedScheduler"},
        "hotswap.queue_policy": {"weighted": "rival:WeightedPolicy"},
    }, RIVAL)

    def run(scheduler, *sets, **environ):
        return load_config({**parts, "scheduler": scheduler}, sets, environ)

    return run


def refusal(resolved):
    with pytest.raises(ConfigError) as caught:
        check_config(resolved.config, Registry())
    return str(caught.value)


@pytest.mark.parametrize("flag", ["scheduler=plain", "scheduler.use=plain"])
def test_an_option_that_the_new_component_lacks_is_left_out_with_a_warning_that_names_all(load, flag):
    resolved = load({"use": "paced", "policy": "fake", "pace": 3, "max_running": 8}, flag)
    assert resolved.config.scheduler.ref.model_dump() == {"use": "plain", "pace": 3}
    assert resolved.config.scheduler.max_running == 8
    assert resolved.warnings == (
        "scheduler.policy was given to 'paced'; 'plain' has no such option, so it is left out",)
    assert check_config(resolved.config, Registry()).scheduler.label == "scheduler:plain"
    assert "scheduler.policy" not in [row.path for row in rows(resolved, Registry())]


def test_an_option_that_both_have_survives_the_exchange(load):
    resolved = load({"use": "fake", "policy": "forking"}, "scheduler=paced")
    assert resolved.config.scheduler.ref.model_dump() == {"use": "paced", "policy": "forking"}
    assert resolved.warnings == ()


def test_a_variable_exchanges_as_a_flag_does(load):
    resolved = load({"use": "fake", "policy": "fake"}, HOTSWAP_SCHEDULER="plain")
    assert resolved.config.scheduler.ref.options == {}
    assert "scheduler.policy was given to 'fake'" in resolved.warnings[0]


def test_options_of_the_environment_give_way_to_a_flag_but_not_to_the_file_s_component(load):
    told = {"HOTSWAP_SCHEDULER__POLICY": "forking"}
    left_out = load("fake", "scheduler=plain", **told).warnings[0]
    assert "scheduler.policy of environment HOTSWAP_SCHEDULER__POLICY" in left_out
    assert refusal(load("plain", **told)).startswith("scheduler.policy: unknown key")


@pytest.mark.parametrize(
    ("scheduler", "sets"),
    [
        ({"use": "plain", "policy": "fake"}, ()),  # one source says both
        ("fake", ("scheduler=plain", "scheduler.policy=fake")),
        ({"use": "fake", "policy": "fake"}, ("scheduler=plain", "scheduler.policy=fake")),
        ({"use": "plain", "policy": "fake"}, ("scheduler=plain",)),  # the same component: nothing was exchanged
        ({"use": "fake", "policyy": "fake"}, ("scheduler=plain",)),  # wrong for the former one, too
    ],
)
def test_what_no_exchange_explains_is_an_error_as_ever(load, scheduler, sets):
    resolved = load(scheduler, *sets)
    assert resolved.warnings == ()
    assert "unknown key" in refusal(resolved)


def test_an_option_told_to_the_default_component_is_handed_on_too(load):
    resolved = load({"policy": "fake", "max_chunk": 64}, "scheduler=paced")
    assert resolved.config.scheduler.ref.model_dump() == {"use": "paced", "policy": "fake"}
    assert "scheduler.max_chunk was given to 'chunked'" in resolved.warnings[0]


def test_a_component_that_is_gone_can_be_replaced_by_a_flag(load):
    resolved = load({"use": "uninstalled", "knob": 1}, "scheduler=plain")
    assert resolved.config.scheduler.ref.options == {}
    assert "scheduler.knob was given to 'uninstalled'" in resolved.warnings[0]


def test_a_part_of_a_component_is_exchanged_in_the_same_way(load):
    given = {"use": "fake", "policy": {"use": "weighted", "weight": 3}}
    for flag in ("scheduler.policy=fake", "scheduler.policy.use=fake"):
        resolved = load(given, flag)
        assert resolved.config.scheduler.ref.options == {"policy": {"use": "fake"}}
        assert "scheduler.policy.weight was given to 'weighted'" in resolved.warnings[0]
    kept = load(given, "scheduler=paced")
    assert kept.config.scheduler.ref.options == {"policy": {"use": "weighted", "weight": 3}}
    assert "unknown key" in refusal(load(given, "scheduler.policy.use=fake", "scheduler.policy.weight=3"))


def test_a_flag_may_come_back_to_the_component_that_the_file_was_written_for(load):
    resolved = load({"use": "fake", "policy": "forking"}, "scheduler=fake", HOTSWAP_SCHEDULER="plain")
    assert resolved.config.scheduler.ref.options == {"policy": "forking"}
    assert resolved.warnings == ()


@pytest.mark.parametrize(
    ("section", "name"),
    [("scheduler", "static"), ("scheduler", "continuous"), ("kvcache", "paged"), ("kvcache", "contiguous"),
     ("speculator", "ngram")],
)
def test_each_part_of_the_quickstart_can_be_exchanged_by_a_flag(section, name):
    for flag in (f"{section}={name}", f"{section}.use={name}"):
        resolved = load_config(QUICKSTART, [flag], {})
        components = check_config(resolved.config, Registry())
        assert components.built[section].label == f"{section}:{name}"
