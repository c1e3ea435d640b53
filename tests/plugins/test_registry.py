"""How components are found, chosen, loaded and built; and what their faults do to others."""

import sys

import pytest

from hotswap.core.errors import (
    AmbiguousComponentError,
    BrokenComponentError,
    ConfigError,
    ContractMismatchError,
    UnknownComponentError,
)
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.scheduler import QueuePolicy, Scheduler
from hotswap.core.registry import INTERFACES, Registry, Status

POLICY = """
    from typing import Annotated
    from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
    from hotswap.core.interfaces.scheduler import QueuePolicy, Scheduler, StepPlan

    class Mine(QueuePolicy):
        class Options(ComponentOptions):
            weight: int = 1

        def key(self, view, now):
            return (view.sequence,)

    class Ordered(Scheduler):
        class Options(ComponentOptions):
            policy: Annotated[ComponentRef, Part("queue_policy")] = ComponentRef(use="mine")
            fallbacks: Annotated[list[ComponentRef], Part("queue_policy")] = []
            tie: Annotated[ComponentRef | None, Part("queue_policy")] = None

        def admit(self, view): ...
        def drop(self, request_id): ...
        def plan(self, ctx): return StepPlan()
"""
V1 = {"hotswap.contract": {"queue_policy": "v1", "scheduler": "v1"}}


@pytest.fixture
def mine(install):
    """A good distribution with a queue policy and a scheduler."""
    points = {"hotswap.queue_policy": {"mine": "good:Mine"}, "hotswap.scheduler": {"ordered": "good:Ordered"}, **V1}
    return install("good", points, POLICY)


def policy_of(install, name, source, **contract):
    install(name, {"hotswap.queue_policy": {name: f"{name}:Mine"}, "hotswap.contract": contract}, source)


def listing(registry, kind, name):
    return [item for item in registry.listing(kind) if item.name == name]


def test_our_own_components_come_through_the_same_door():
    found = {(item.kind, item.name) for item in Registry().listing() if item.distribution == "hotswap"}
    assert {("scheduler", "chunked"), ("kvcache", "prefix"), ("attention", "torch"), ("observer", "metrics")} <= found


def test_listing_tells_what_metadata_says_and_imports_nothing(mine):
    [item] = listing(Registry(), "queue_policy", "mine")
    assert item == ("queue_policy", "mine", "good", "1.0", "queue_policy/1", Status.AVAILABLE, "")
    assert "good" not in sys.modules


def test_a_contract_that_is_not_declared_is_unknown_until_the_class_is_loaded(install):
    install("good", {"hotswap.queue_policy": {"mine": "good:Mine"}}, POLICY)
    registry = Registry()
    assert listing(registry, "queue_policy", "mine")[0].contract == "unknown"
    assert issubclass(registry.load("queue_policy", "mine"), QueuePolicy)
    assert listing(registry, "queue_policy", "mine")[0][4:6] == ("queue_policy/1", Status.LOADED)


@pytest.mark.parametrize("spelling", ["v1", "1"])
def test_a_contract_is_declared_by_its_number(install, spelling):
    policy_of(install, "good", POLICY, queue_policy=spelling)
    assert listing(Registry(), "queue_policy", "good")[0][4:6] == ("queue_policy/1", Status.AVAILABLE)


@pytest.mark.parametrize("spelling", ["queue_policy/1", "v1.0", "latest"])
def test_a_contract_that_is_spelt_otherwise_is_answered_with_what_to_write(install, spelling):
    policy_of(install, "odd", "raise RuntimeError('imported')", queue_policy=spelling)
    [item] = listing(Registry(), "queue_policy", "odd")
    assert item[4:6] == (spelling, Status.INCOMPATIBLE)
    with pytest.raises(ContractMismatchError) as caught:
        Registry().load("queue_policy", "odd")
    assert f"hotswap.contract says queue_policy = '{spelling}'; write \"v1\"" in str(caught.value)
    assert str(caught.value).endswith("It has not been imported.")


def test_only_what_is_selected_is_imported(mine, install):
    policy_of(install, "other", "raise RuntimeError('imported')", queue_policy="v1")
    Registry().build("queue_policy", ComponentRef(use="mine"), "scheduler.policy")
    assert "other" not in sys.modules


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(mine):
    with pytest.raises(UnknownComponentError, match=r"^scheduler\.policy: no queue_policy .* 'mien'\.") as caught:
        Registry().load("queue_policy", "mien", "scheduler.policy")
    assert "Did you mean 'mine'?" in str(caught.value)
    assert "fcfs" in str(caught.value)


def test_a_name_of_another_kind_is_said_to_be_one(mine):
    with pytest.raises(UnknownComponentError, match="'mine' is a queue_policy"):
        Registry().load("kvcache", "mine")


def test_a_kind_that_core_does_not_know_cannot_be_registered(install):
    install("odd", {"hotswap.scheduler_": {"x": "odd:X"}})
    registry = Registry()
    assert listing(registry, "scheduler_", "x")[0].status is Status.INCOMPATIBLE
    with pytest.raises(ContractMismatchError, match="kind"):
        registry.load("scheduler_", "x")
    with pytest.raises(UnknownComponentError, match="The kinds are scheduler"):
        registry.load("no_such_kind", "x")


def test_a_plugin_that_cannot_be_imported_is_named_with_its_distribution_and_the_cause(install):
    policy_of(install, "broken", "import no_such_module_anywhere", queue_policy="v1")
    registry = Registry()
    assert listing(registry, "queue_policy", "broken")[0].status is Status.AVAILABLE
    with pytest.raises(BrokenComponentError) as caught:
        registry.load("queue_policy", "broken", "scheduler.policy")
    for fact in ("scheduler.policy", "'broken'", "package broken 1.0", "no_such_module_anywhere"):
        assert fact in str(caught.value)
    assert listing(registry, "queue_policy", "broken")[0].status is Status.BROKEN


@pytest.mark.parametrize(
    "source",
    ["raise SystemExit(1)", "def Mine(): ...", "class Mine: ...", "", "from hotswap.core.interfaces.scheduler import "
     "QueuePolicy\nclass Mine(QueuePolicy): ...\n", "syntax error here"],
    ids=["exits", "function", "stranger", "missing", "abstract", "syntax"],
)
def test_whatever_is_wrong_with_a_selected_class_is_a_broken_component(install, source):
    policy_of(install, "broken", source, queue_policy="v1")
    with pytest.raises(BrokenComponentError, match=r"'broken' of package broken 1\.0"):
        Registry().load("queue_policy", "broken")


def test_a_broken_plugin_that_nobody_selected_has_no_effect(mine, install):
    policy_of(install, "broken", "raise RuntimeError", queue_policy="v1")
    install("worse", {"hotswap.queue_policy": {"worse": "not an entry point!"}})
    registry = Registry()
    assert registry.build("queue_policy", ComponentRef(use="mine"), "policy").options.weight == 1
    assert listing(registry, "queue_policy", "worse")
    with pytest.raises(BrokenComponentError, match="package worse"):
        registry.load("queue_policy", "worse")


def test_metadata_that_cannot_be_parsed_offers_nothing_and_hurts_nobody(mine, install):
    module = install("garbled", {})
    (module.parent / "garbled-1.0.dist-info" / "entry_points.txt").write_text("hotswap.scheduler\x00=[[\n[")
    assert listing(Registry(), "queue_policy", "mine")


def test_another_contract_version_is_refused_before_import_with_all_the_facts(install):
    policy_of(install, "future", "raise RuntimeError('imported')", queue_policy="v99")
    registry = Registry()
    [item] = listing(registry, "queue_policy", "future")
    assert (item.status, item.contract) == (Status.INCOMPATIBLE, "queue_policy/99")
    with pytest.raises(ContractMismatchError) as caught:
        registry.load("queue_policy", "future")
    for fact in ("queue_policy/99", "accepts queue_policy/1", "package future 1.0", "future:Mine", "not been imported"):
        assert fact in str(caught.value)
    assert "future" not in sys.modules


def test_the_class_s_own_contract_is_checked_too(install):
    policy_of(install, "liar", POLICY + "    Mine.contract = 'queue_policy/7'\n", queue_policy="v1")
    registry = Registry()
    with pytest.raises(ContractMismatchError, match="queue_policy/7.*accepts queue_policy/1.*class"):
        registry.load("queue_policy", "liar")
    assert listing(registry, "queue_policy", "liar")[0].status is Status.INCOMPATIBLE


def test_the_host_accepts_its_own_contract_and_the_one_before():
    def accepted(version):
        newer = type("Newer", (Component,), {"kind": "queue_policy", "contract": f"queue_policy/{version}"})
        [item] = listing(Registry([newer]), "queue_policy", "fcfs")
        return item.status is Status.AVAILABLE

    assert [accepted(version) for version in (1, 2, 3)] == [True, True, False]


def test_a_name_that_two_distributions_offer_must_be_chosen_with_its_distribution(mine, install):
    policy_of(install, "second_shop", POLICY, queue_policy="v1")
    install("third-shop", {"hotswap.queue_policy": {"mine": "second_shop:Mine"}, **V1})
    registry = Registry()
    assert [item.status for item in listing(registry, "queue_policy", "mine")] == [Status.AMBIGUOUS] * 2
    with pytest.raises(AmbiguousComponentError) as caught:
        registry.load("queue_policy", "mine", "scheduler.policy")
    for fact in ("good 1.0", "third-shop 1.0", "'good:mine'", "'third-shop:mine'"):
        assert fact in str(caught.value)
    assert registry.load("queue_policy", "Third_Shop:mine").__module__ == "second_shop"
    built = registry.build("scheduler", ComponentRef(use="ordered", policy="good:mine"), "scheduler")
    assert built.parts["policy"].origin.distribution == "good"
    with pytest.raises(UnknownComponentError, match="there is 'good:mine', 'third-shop:mine'"):
        registry.load("queue_policy", "nobody:mine")


def test_a_distribution_that_another_shadows_does_not_count(mine, tmp_path, monkeypatch):
    shadowed = tmp_path / "later" / "good-0.1.dist-info"
    shadowed.mkdir(parents=True)
    (shadowed / "METADATA").write_text("Metadata-Version: 2.1\nName: Good\nVersion: 0.1\n")
    (shadowed / "entry_points.txt").write_text("[hotswap.queue_policy]\nmine = good:Old\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(shadowed.parent)])
    assert [item.version for item in listing(Registry(), "queue_policy", "mine")] == ["1.0"]


def test_building_validates_options_and_builds_parts(mine):
    ref = ComponentRef(use="ordered", policy={"use": "mine", "weight": 3}, fallbacks=["mine", "mine"])
    scheduler = Registry().build("scheduler", ref, "scheduler")
    assert isinstance(scheduler, Scheduler)
    assert scheduler.parts["policy"].options.weight == 3
    assert len(scheduler.parts["fallbacks"]) == 2
    assert scheduler.parts["tie"] is None
    assert scheduler.label == "scheduler:ordered"
    assert scheduler.parts["policy"].label == "queue_policy:mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "mine"}, r"scheduler\.polcy: unknown key\. Did you mean 'scheduler\.policy'\?"),
        ({"max_runing": 4}, r"scheduler\.max_runing: unknown key\. Did you mean 'scheduler\.max_running'\?"),
        ({"policy": {"use": "mine", "wait": 3}}, r"scheduler\.policy\.wait: unknown key.*Valid here: weight\."),
        ({"policy": {"use": "mine", "weight": "x"}}, r"scheduler\.policy\.weight: should be a valid integer.*not 'x'"),
        ({"policy": "mien"}, r"scheduler\.policy: no queue_policy is called 'mien'"),
        ({"fallbacks": ["mine", "mien"]}, r"scheduler\.fallbacks\[1\]: no queue_policy"),
    ],
)
def test_a_wrong_option_is_told_with_its_config_path(mine, options, message):
    known = {"max_running": "scheduler.max_running"}
    with pytest.raises(ConfigError, match=message):
        Registry().build("scheduler", ComponentRef(use="ordered", **options), "scheduler", known)


def test_a_constructor_that_raises_is_a_broken_component(install):
    source = POLICY + "\n    def boom(self, *a): raise ValueError('no')\n    Mine.__init__ = boom\n"
    policy_of(install, "broken", source, queue_policy="v1")
    with pytest.raises(BrokenComponentError, match="cannot be built: ValueError: no"):
        Registry().build("queue_policy", ComponentRef(use="broken"), "scheduler.policy")


def test_every_kind_has_a_written_contract():
    assert len({cls.kind for cls in INTERFACES}) == len(INTERFACES)
    for cls in INTERFACES:
        assert cls.contract == f"{cls.kind}/1"
        assert cls.__doc__ or sys.modules[cls.__module__].__doc__
