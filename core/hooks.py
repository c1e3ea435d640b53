"""What an observer may watch: pluggy hook specifications. One sentence a hook.

A component marks methods with :data:`hookimpl`. Hooks are called from the engine's loop thread; with no observer they
cost nothing. An observer that raises is logged, counted and disabled; it never reaches a request.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pluggy

from hotswap.core.interfaces.component import Component

if TYPE_CHECKING:
    from hotswap.core.engine.pool import RequestState
    from hotswap.core.engine.setup import EngineSetup, SwitchSetup
    from hotswap.core.interfaces.kvcache import CacheEvent, CacheUsage
    from hotswap.core.interfaces.messages import StepMessage, Verdict

hookspec = pluggy.HookspecMarker("hotswap")
hookimpl = pluggy.HookimplMarker("hotswap")


class Observer(Component):
    """Watches an engine: one instance per engine loop."""

    kind: ClassVar[str] = "observer"
    contract: ClassVar[str] = "observer/1"


class HookSpecs:
    @hookspec
    def hotswap_engine_started(
        self, versions: dict[str, str], config: dict[str, Any], replica: str, setup: "EngineSetup", time: float,
    ) -> None:
        """The engine is complete and about to serve; ``config`` is the effective one, secrets removed; ``replica`` is
        its name among the engines of a deployment, empty where it is alone; ``setup`` is what came of the config. The
        one hook whose exception ends the start: what was asked for must work."""

    @hookspec
    def hotswap_engine_stopped(self, time: float) -> None:
        """The loop has ended; close files."""

    @hookspec
    def hotswap_request_arrived(self, request: "RequestState", time: float) -> None:
        """A request has been taken into the queue."""

    @hookspec
    def hotswap_request_finished(self, request: "RequestState", reason: str, time: float) -> None:
        """A request has ended, once, for one of the finish reasons."""

    @hookspec
    def hotswap_step_planned(
        self, message: "StepMessage", holds: Sequence[tuple[str, str]],
        suspensions: Sequence[tuple[str, str, str]], time: float, duration: float,
    ) -> None:
        """A step is about to be submitted: rows and operations, holds (request, reason), suspensions (request, mode,
        reason), and how long planning took in seconds."""

    @hookspec
    def hotswap_nothing_planned(self, holds: Sequence[tuple[str, str]], time: float) -> None:
        """A scheduler was asked and planned nothing, so that no step was submitted; it may have said why (request,
        reason)."""

    @hookspec
    def hotswap_plan_failed(self, component: str, error: str, time: float) -> None:
        """A scheduler raised; its plan was undone."""

    @hookspec
    def hotswap_step_finished(
        self, verdict: "Verdict", requests: Sequence["RequestState"], voided: Sequence[str], usage: "CacheUsage",
        time: float, duration: float,
    ) -> None:
        """A step was collected: ``requests`` are those of ``verdict.rows``; ``voided`` names rows of requests that had
        ended; ``duration`` is the time from submission to collection in seconds."""

    @hookspec
    def hotswap_pages_evicted(self, events: Sequence["CacheEvent"], time: float) -> None:
        """The KV manager's page events since the last step."""

    @hookspec
    def hotswap_cache_reset(self, time: float) -> None:
        """Everything reusable is being forgotten, in the cache and by the KV transfer."""

    @hookspec
    def hotswap_pages_leaked(self, owners: dict[str, int], time: float) -> None:
        """Nothing runs, yet pages were held: by whom, and how many; they have been given back."""

    @hookspec
    def hotswap_transfers_ended(self, counters: Mapping[str, int], time: float) -> None:
        """Transfers of pages have ended; ``counters`` are the KV transfer's totals, by its own names."""

    @hookspec
    def hotswap_switch_begins(self, switch: "SwitchSetup", time: float) -> None:
        """Other parts are about to be put in place between two steps: enough to do it again."""

    @hookspec
    def hotswap_switch_undone(self, time: float) -> None:
        """Something raised before all of them were in place: the parts are those of before."""

    @hookspec
    def hotswap_component_exchanged(
        self, path: str, kind: str, old: str, new: str, options: dict[str, Any], pause: float, handed_over: int,
        recomputed: int, problem: str, time: float,
    ) -> None:
        """The component at config ``path`` was exchanged while serving, one call a component: labels, the options of
        the one that was asked for, seconds without a step, requests that kept their pages and that lost them.
        ``problem``: it failed in its first steps, why, and ``new`` is the old one again; else empty."""

    @hookspec
    def hotswap_server_routes(self, app: Any) -> None:
        """The HTTP application is being built: add routes. Called once an engine: of several replicas' observers, the
        first adds the route and the others join it."""
