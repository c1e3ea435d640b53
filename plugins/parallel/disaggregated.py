"""Prefill and decode on engines of their own, so that long prompts do not hold up running answers."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part, Requirement
from hotswap.core.interfaces.deployment import (
    Deployment,
    EngineClient,
    EngineFactory,
    EngineStatus,
    EventListener,
    Loads,
    Role,
)
from hotswap.core.request import FinishReason, Handoff, OutputSink, Request, RequestOutput
from hotswap.plugins.parallel.fleet import Fleet, summed

logger = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"


class Disaggregated(Deployment):
    """``prefill`` engines compute prompts and sample the first token; ``decode`` engines go on with the keys and values
    that a KV transfer brings.

    Choose it where prompts are long and answers must flow evenly: neither holds up the other, and each role gets the
    strategies that suit it. It needs a fast way between the engines, and a token costs the transfer of its whole prompt
    once. After DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024).

    Whatever goes wrong on the way is made good by computing again. After a transfer that fails the decode engine does
    it. Where the decode engines are down or full, prefill engines go on by themselves; where the prefill engines are
    down, decode engines compute prompts.
    """

    class Options(ComponentOptions):
        prefill: Annotated[int, Field(ge=1, le=1024)] = 1
        """How many engines compute prompts."""
        decode: Annotated[int, Field(ge=1, le=1024)] = 1
        """How many engines compute the rest."""
        prefill_parallel: list[ComponentRef] | None = None
        """Strategies of each prefill engine; by default those behind this one in the list."""
        decode_parallel: list[ComponentRef] | None = None
        """Strategies of each decode engine; by default those behind this one in the list."""
        prefill_router: Annotated[ComponentRef, Part("router")] = ComponentRef(use="prefix_aware")
        """Which prefill engine gets a request."""
        decode_router: Annotated[ComponentRef, Part("router")] = ComponentRef(use="least_loaded")
        """Which decode engine goes on with it."""

    options: Options

    def describe(self) -> Description:
        why = "its engines hand requests over, and computing every prompt twice would be for nothing"
        return Description(frozenset({"peers"}), (Requirement("kv_transfer", "handoff", why, "kv_transfer.use"),))

    def roles(self) -> list[Role]:
        options = self.options
        return [
            Role(name, count, None if own is None else tuple(own), f"{name}_parallel")
            for name, count, own in (
                (PREFILL, options.prefill, options.prefill_parallel), (DECODE, options.decode, options.decode_parallel))
        ]

    def start(self, factories: Sequence[EngineFactory], now: Callable[[], float]) -> EngineClient:
        prefill, decode = Fleet.start(*(
            ([factory for factory in factories if factory.role == name], self.parts[f"{name}_router"])
            for name in (PREFILL, DECODE)))
        return Pair(prefill, decode, now)


@dataclass
class _Leg:
    """A live request. ``tokens``: what the prefill engine has sampled; ``cached``: what it found in its cache."""

    request: Request
    sink: OutputSink
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False


class Pair:
    """Implements ``EngineClient``: requests pass from the prefill fleet to the decode fleet. Sinks are called from the
    loops' threads, so nothing here waits."""

    def __init__(self, prefill: Fleet, decode: Fleet, now: Callable[[], float]) -> None:
        self._prefill, self._decode, self._now = prefill, decode, now
        self._lock = threading.Lock()
        self._legs: dict[str, _Leg] = {}
        self._handed_over = self._kept_back = 0
        prefill.stand_in = partial(self._alive, decode, DECODE)
        decode.stand_in = partial(self._alive, prefill, PREFILL)

    def add(self, request: Request, sink: OutputSink) -> None:
        leg = _Leg(request, sink)
        with self._lock:
            taken = self._legs.setdefault(request.id, leg) is not leg
        if taken:
            error = f"a request with the id {request.id!r} lives already; give each its own"
            return sink(RequestOutput(request.id, [], "", finish_reason=FinishReason.ERROR, error=error))
        try:
            if self._prefill.health() is None or self._decode.health() is not None:
                self._prefill.add(replace(request, hands_over=self._decode.health() is None), partial(self._first, leg))
            else:
                self._decode.add(request, partial(self._last, leg))
        except BaseException:
            with self._lock:
                del self._legs[request.id]
            raise
        return None

    def abort(self, request_id: str) -> None:
        with self._lock:
            leg = self._legs.get(request_id)
            if leg is None:
                return
            leg.aborted = True  # it may be between the two
        self._prefill.abort(request_id)
        self._decode.abort(request_id)

    def loads(self) -> Loads:
        first, second = self._prefill.loads(), self._decode.loads()
        counts = {"handed_over": self._handed_over, "kept_back": self._kept_back}
        return Loads(
            first.running + second.running, first.waiting + second.waiting, max(first.kv_usage, second.kv_usage),
            len(self._legs), summed([counts, first.extra, second.extra]))

    def engines(self) -> Sequence[EngineStatus]:
        return [*self._prefill.engines(), *self._decode.engines()]

    def watch(self, listener: EventListener) -> None:
        """A prompt is computed where prompts are computed: what decode engines have cached saves nothing."""
        self._prefill.watch(listener)

    def reset(self) -> int:
        return self._prefill.reset() + self._decode.reset()

    def health(self) -> str | None:
        """None while an engine of either role is well: it can do all."""
        first, second = self._prefill.health(), self._decode.health()
        return f"{first}; {second}" if first and second else None

    @property
    def failure(self) -> str | None:
        first, second = self._prefill.failure, self._decode.failure
        return f"{first}; {second}" if first and second else None

    def drain(self, timeout_s: float) -> None:
        """Decode engines take what the prefill engines still hand over."""
        end = self._now() + timeout_s
        self._prefill.drain(timeout_s)
        self._decode.drain(max(0.0, end - self._now()))

    def stop(self) -> None:
        self._prefill.stop()
        self._decode.stop()

    @staticmethod
    def _alive(role: Fleet, name: str) -> str | None:
        """What the log says of a role that is left alone."""
        return f"the {name} engines now do both, prefill and decode" if role.failure is None else None

    def _first(self, leg: _Leg, output: RequestOutput) -> None:
        """From the prefill engine, on its loop's thread."""
        leg.tokens += output.token_ids
        leg.cached = output.cached_tokens
        if output.finish_reason is not FinishReason.HANDOFF:
            return self._deliver(leg, output)
        pages, output.handoff, output.finish_reason = output.handoff, None, None
        leg.sink(output)
        continued = replace(leg.request, continued=Handoff(tuple(leg.tokens), pages))
        if (problem := self._hand_on(continued, leg)) is not None:
            reason = FinishReason.ABORT if leg.aborted else FinishReason.ERROR
            return self._end(leg, reason, f"no engine is left to go on with the request: {problem}")
        if leg.aborted:  # only now, so that its pages are given up by the engine that would have read them
            self.abort(leg.request.id)
        return None

    def _hand_on(self, request: Request, leg: _Leg) -> Exception | None:
        """To a decode engine, or to a prefill engine where none takes it. Returns why nobody did, whatever was raised:
        the client waits, and nobody else would tell it."""
        try:
            self._decode.add(request, partial(self._last, leg))
            self._handed_over += 1
            return None
        except Exception as error:
            self._kept_back += 1
            logger.warning("request %s goes on without a decode engine: %s", request.id, error)
        try:
            self._prefill.add(request, partial(self._last, leg))
            return None
        except Exception as error:
            return error

    def _last(self, leg: _Leg, output: RequestOutput) -> None:
        if leg.tokens:  # what the decode engine did not compute came from the prefill engine
            output.cached_tokens = leg.cached
        self._deliver(leg, output)

    def _deliver(self, leg: _Leg, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            with self._lock:
                self._legs.pop(output.request_id, None)
        leg.sink(output)

    def _end(self, leg: _Leg, reason: FinishReason, error: str | None = None) -> None:
        text = leg.request.detokenizer.finish() if leg.request.detokenizer and reason is FinishReason.ABORT else ""
        self._deliver(leg, RequestOutput(
            leg.request.id, [], text, finish_reason=reason, error=error, cached_tokens=leg.cached))
