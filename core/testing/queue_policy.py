"""What every queue policy must do. The whole test file of a policy::

    class TestMine(QueuePolicySuite):
        def make_policy(self):
            return MyPolicy()

It is all of the schedulers' suite, with the stock scheduler in the order of the policy, and what a key promises.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from hotswap.core.interfaces.scheduler import QueuePolicy, Scheduler
from hotswap.core.testing.rig import REGISTRY
from hotswap.core.testing.scheduler import SchedulerSuite


@dataclass(frozen=True)
class View:
    """A ``RequestView`` with any values."""

    id: str = "r"
    sequence: int = 0
    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = 10
    max_new: int = 8
    running: bool = False
    ready: int = 10
    computed: int = 0
    output_length: int = 0
    in_flight: int = 0
    preemptions: int = 0
    reusable: int = 0
    draft_limit: int = 0


class QueuePolicySuite(SchedulerSuite):
    """Subclass it and provide ``make_policy``."""

    machine_examples = 30
    starves = False
    """True for a policy that lets newer requests overtake an older one for ever, and says so in its docstring."""

    def make_policy(self) -> QueuePolicy:
        raise NotImplementedError("return a new instance of the policy under test")

    def make_scheduler(self) -> Scheduler:
        cls: Any = REGISTRY.load("scheduler", "chunked")
        scheduler: Scheduler = cls(cls.Options(), {"policy": self.make_policy()})
        return scheduler

    def test_equals_are_ordered_by_their_sequence(self) -> None:
        """Else what runs depends on the order in which a heap happens to hold them."""
        policy, views = self.make_policy(), [View(f"r{i}", sequence=i) for i in range(4)]
        for view in views:
            policy.admit(view)
        for name, keys in (
            ("key", [policy.key(view, 1.0) for view in views]),
            ("victim_key", [policy.victim_key(view, 1.0) for view in views]),
        ):
            assert len(set(keys)) == len(keys), f"two requests have the same {name}: end it with view.sequence"
            assert sorted(keys), f"every {name} compares with every other"
        assert policy.key(views[0], 1.0) < policy.key(views[3], 1.0), "of equals the one that came first is first"

    def test_a_key_that_is_said_to_stay_stays(self) -> None:
        policy, view = self.make_policy(), View()
        policy.admit(view)
        before = policy.key(view, 0.0)
        assert before == policy.key(view, 0.0), "two calls for the same request at the same time differ"
        if not policy.dynamic:
            later = replace(view, computed=5, output_length=3, ready=1, reusable=4, preemptions=1)
            assert policy.key(later, 60.0) == before, "the key changes with time or state: set dynamic = True"

    def test_requests_it_does_not_hold_are_tolerated(self) -> None:
        policy, view = self.make_policy(), View()
        policy.drop("never seen")
        policy.admit(view)
        policy.start(view)
        policy.admit(view)  # suspended, or the plan that started it was undone
        policy.drop(view.id)
        policy.drop(view.id)

    def test_one_that_waits_is_not_overtaken_for_ever(self) -> None:
        if self.starves:
            return
        rig = self.rig(max_running=1, max_batch_tokens=64)
        old = rig.add("old", [1] * 40, 8)
        requests = [old]
        for i in range(800):
            if len(rig.loop.pool.states) < 4:
                requests.append(rig.add(f"new{i}", [2] * 3, 2, tenant=f"t{i % 2}"))
            rig.loop.turn()
            rig.clock.advance(0.1)
            if rig.client.endings("old"):
                break
        assert rig.client.endings("old"), "80 seconds of shorter and newer requests have kept one from being served"
        self.finish(rig, requests)
