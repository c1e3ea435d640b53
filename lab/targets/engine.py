"""An engine in this process, spoken to without HTTP: nothing lies between its tokens and the clock."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotswap.core.errors import HotswapError
from hotswap.core.request import FinishReason, Request, RequestOutput
from hotswap.lab.processes import cpu_of_this_process
from hotswap.lab.targets.probe import Probe, Told
from hotswap.lab.targets.target import Activity, Ending, Hearer, Outgoing
from hotswap.server.frontend import Frontend, Prompt, derived_seed
from hotswap.server.served import Served, served_by

if TYPE_CHECKING:
    from hotswap.core.engine.build import Built

_FINE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class EngineTarget:
    """A ``Target``. ``fields``: sampling fields that every request has; all others are the model's defaults, as they
    are for the server's clients. Requests that bring no seed are seeded by their id, so that every arm draws alike."""

    can_reset = True

    def __init__(self, built: "Built", fields: Mapping[str, Any], now: Callable[[], float]) -> None:
        self._built, self._fields, self._now = built, dict(fields), now
        self.served: Served = served_by(built)
        self._frontend = Frontend(self.served)
        self._sampling = self._frontend.sampling(self._fields)
        self._probes = [self._attach(index) for index in range(len(built.engines))]
        self._began = 0.0

    def _attach(self, index: int) -> Probe:
        one = self._built.engines[index]
        loop, groups = one.engine.loop, list(one.cache_plan.groups.values())
        pages = sum(group.num_pages for group in groups)  # those that only pad a batch have memory, too
        whole = len(groups) == 1 and all(spec.window is None for spec in one.made.info.cache_specs)
        probe = Probe(
            loop.pool, self.kv_bytes() / len(self._built.engines) / pages, groups[0].page_size if whole else None,
            lambda: loop.parts.kv.owners())
        one.engine.call(lambda: one.components.add(probe))
        return probe

    def kv_bytes(self) -> int:
        """Of the caches of all ranks."""
        return sum(report["kv_bytes"] for report in self._built.ranks())

    def send(self, request: Outgoing, hearer: Hearer) -> None:
        try:
            self._built.engine.add(self._request(request), _Sink(self, request, hearer))
        except HotswapError as error:
            hearer.ended(Ending(self._now(), error=f"refused: {error}"))

    def _request(self, outgoing: Outgoing) -> Request:
        sampling = self._sampling.model_copy(update={"max_tokens": outgoing.max_tokens})
        request = self._frontend.requests(outgoing.id, [Prompt(list(outgoing.prompt))], sampling)[0]
        return request if sampling.seed is not None else replace(request, seed=derived_seed(request.id, 0))

    def now(self) -> float:
        return self._now()

    def told(self, id: str) -> Told:
        """What the engines' loops know of a request that has ended; its wait is that at the first of them."""
        found = [probe.told(id) for probe in self._probes]
        queued = [told.queued for told in found if told.queued is not None]
        return Told(queued[0] if queued else None, sum(told.preemptions for told in found))

    def abort(self, id: str) -> None:
        self._built.engine.abort(f"{id}-0")

    def reset(self) -> None:
        self._built.engine.reset()

    def begin(self) -> None:
        self._began = cpu_of_this_process()  # looks at all processes: behind it the block begins
        for probe in self._probes:
            probe.begin(self._now())

    def finish(self) -> Activity:
        counts = [probe.counts() for probe in self._probes]
        total = Counter[str]()
        for one in counts:
            total.update(one.engine)
        timeline = sorted(point for one in counts for point in one.timeline)
        return Activity(cpu_of_this_process() - self._began, dict(total), timeline)

    def problem(self) -> str | None:
        return next((one.engine.failure for one in self._built.engines if one.engine.failure is not None), None)

    def effective(self) -> Mapping[str, Any]:
        """All of it, with the model's defaults."""
        return self._sampling.model_dump(mode="json", exclude_defaults=True) | {"max_tokens": "…"}

    def close(self) -> None:
        self._built.engine.stop()


class _Sink:
    """Hears of a request on the loop's thread."""

    def __init__(self, target: EngineTarget, request: Outgoing, hearer: Hearer) -> None:
        self._target, self._hearer = target, hearer
        self._id, self._prompt_tokens, self._tokens, self._cached = f"{request.id}-0", len(request.prompt), 0, 0

    def __call__(self, output: RequestOutput) -> None:
        now = self._target.now()
        if output.token_ids:
            self._tokens += len(output.token_ids)
            self._hearer.arrived(now, len(output.token_ids), output.token_ids)
        self._cached = max(self._cached, output.cached_tokens)
        reason = output.finish_reason
        if reason is None:
            return
        told = self._target.told(self._id)
        error = None if reason in _FINE else f"{reason.value}: {output.error or 'it was aborted'}"
        self._hearer.ended(Ending(
            now, reason.value, error, self._prompt_tokens, self._tokens, self._cached, told.queued, told.preemptions))
