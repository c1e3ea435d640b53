"""Metrics for Prometheus, under vLLM's names with ``hotswap:`` before them."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hotswap.core.config.describe import public_name
from hotswap.core.engine.drafts import DraftCounts
from hotswap.core.engine.pool import RequestState
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.kvcache import CacheUsage
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.scheduler import SuspendMode
from hotswap.core.request import FinishReason
from hotswap.plugins.observers.histogram import Histogram, LastTokens

_FAST_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_SLOW_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_S),
    "inter_token_latency_seconds": (
        "Between tokens of a request; tokens that came in one step share the time since the one before.", _FAST_S),
    "request_time_per_output_token_seconds": (
        "(Last token - first token) / (tokens - 1), once a request of two tokens or more.", _FAST_S),
    "e2e_request_latency_seconds": ("From arrival to the end.", _SLOW_S),
    "request_queue_time_seconds": ("From arrival to the first step.", _SLOW_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", _SLOW_S),
    "request_decode_time_seconds": ("From the first token to the end.", _SLOW_S),
    "request_prompt_tokens": ("Prompt tokens a request.", _TOKENS),
    "request_generation_tokens": ("Output tokens a request.", _TOKENS),
    "iteration_tokens_total": ("Tokens computed in a step, drafts included.", _TOKENS),
    "step_duration_seconds": ("From submission to collection of a step.", _STEP_S),
    "plan_duration_seconds": ("Planning of a step.", _STEP_S),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that have started.",
    "generation_tokens": "Output tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Suspensions of running requests.",
    "num_swaps": "Suspensions whose pages were saved; the others compute them again.",
    "spec_decode_num_drafts": "Rows with drafts.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "spec_decode_draft_seconds": "Time of workers that went into drafting.",
    "spec_decode_verify_seconds": "Time of workers that went into steps with drafts, drafting aside.",
    "steps": "Steps collected.",
    "failed_plans": "Plans that were undone because the scheduler raised.",
    "evicted_pages": "Cached pages given to other requests.",
    "leaked_pages": "Pages that were held although nothing ran, and were given back.",
    "component_exchanges": "Components exchanged while serving.",
    "component_rollbacks": "Components that failed in their first steps after an exchange, and gave way again.",
    "exchange_recomputed_requests": "Requests that lost their pages in an exchange and were computed again.",
}


class _Totals(NamedTuple):
    """What can be read off requests, ended or alive, without counting during a step."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    def plus(self, state: RequestState) -> "_Totals":
        """What another engine has done of a request, that engine counts."""
        before = state.request.continued
        counts = state.first_scheduled_at is not None and before is None
        length = state.prompt_length if counts else 0
        return _Totals(
            self.prompt_tokens + length,
            self.generation_tokens + state.output_length - (len(before.tokens) if before else 0),
            self.prefix_cache_queries + length, self.prefix_cache_hits + ((state.cached_tokens or 0) if counts else 0))


class _Source(Collector):
    """What prometheus-client calls when it is asked. Not Metrics itself: both have a ``describe``."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def joined(sources: Iterable[Iterable[Metric]]) -> Iterator[Metric]:
    """The families of several engines: each name once, with the samples of all."""
    families: dict[str, Metric] = {}
    for family in itertools.chain.from_iterable(sources):
        known = families.setdefault(family.name, family)
        if known is not family:
            known.samples.extend(family.samples)
    yield from families.values()


class Metrics(Observer):
    """Counts requests, tokens, steps, cache hits and drafts, and serves them at ``/metrics``.

    Choose it whenever somebody watches. Every request ends in exactly one ``finished_reason``; the gauges are read off
    the live requests when Prometheus asks, so that they cannot drift. Its registry is its own: nothing of the process
    is shown. The engines of a deployment are told apart by the label ``replica``; sums over it are the server's.
    """

    class Options(ComponentOptions):
        vllm_alias: bool = False
        """Publish everything under ``vllm:`` names too."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._lock = threading.Lock()  # an ending moves a request's numbers from the live to the ended
        self._live: dict[str, RequestState] = {}
        self._ended = _Totals()
        self._reasons = {reason.value: 0 for reason in FinishReason}
        self._counts: Counter[str] = Counter()
        self._drafts = DraftCounts()
        self._events: Counter[str] = Counter()
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._first: dict[str, RequestState] = {}  # have begun, and have no token yet
        self._last_tokens = LastTokens()
        self._kv_usage = self._kv_peak = 0.0
        self._transfers: Mapping[str, int] = {}
        self._last_pause = 0.0
        self._exchanged_at: float | None = None
        self._model = self._replica = ""
        self._prefixes = ["hotswap:", "vllm:"] if self.options.vllm_alias else ["hotswap:"]

    @property
    def registry(self) -> CollectorRegistry:
        """A new one, of this engine's metrics alone."""
        registry = CollectorRegistry()
        registry.register(_Source(self.families))
        return registry

    # What happens

    @hookimpl
    def hotswap_engine_started(
        self, versions: dict[str, str], config: dict[str, Any], replica: str, time: float,
    ) -> None:
        self._replica = replica
        server, model = config.get("server", {}), config.get("model", {})
        self._model = server.get("served_model_name") or public_name(model.get("path") or model.get("name") or "")

    @hookimpl
    def hotswap_request_arrived(self, request: RequestState, time: float) -> None:
        self._live[request.id] = request
        if request.request.continued is not None:
            self._last_tokens.begin(request.id, time)

    @hookimpl
    def hotswap_request_finished(self, request: RequestState, reason: str, time: float) -> None:
        with self._lock:
            if self._live.pop(request.id, None) is None:
                return
            self._ended = self._ended.plus(request)
            self._reasons[reason] += 1
        self._first.pop(request.id, None)
        last = self._last_tokens.end(request.id)
        if request.first_token_at is None or reason not in (
                FinishReason.STOP, FinishReason.LENGTH, FinishReason.HANDOFF):
            return
        if request.request.continued is None:
            self._observe_prefill(request, request.first_token_at, last is None)
        if reason != FinishReason.HANDOFF:
            self._observe_ended(request, request.first_token_at, time, last)

    @hookimpl
    def hotswap_step_planned(
        self, message: StepMessage, holds: Sequence[tuple[str, str]],
        suspensions: Sequence[tuple[str, str, str]], time: float, duration: float,
    ) -> None:
        self._counts["num_preemptions"] += len(suspensions)
        self._counts["num_swaps"] += sum(mode == SuspendMode.SWAP.value for _, mode, _ in suspensions)
        self._histograms["plan_duration_seconds"].observe(duration)
        self._histograms["iteration_tokens_total"].observe(sum([n + drafts for _, n, drafts in message.rows]))
        for new in message.new:
            state = self._live.get(new.id)
            if state is not None and state.first_token_at is None:  # else it comes back from a suspension
                self._first[new.id] = state

    @hookimpl
    def hotswap_step_finished(
        self, verdict: Verdict, requests: Sequence[RequestState], voided: Sequence[str], usage: CacheUsage,
        time: float, duration: float,
    ) -> None:
        self._counts["steps"] += 1
        if verdict.counts:
            self._events.update(verdict.counts)
        self._histograms["step_duration_seconds"].observe(duration)
        self._kv_usage = (usage.held + usage.fenced) / max(1, usage.total)
        self._kv_peak = max(self._kv_peak, usage.held / max(1, usage.total))
        self._observe_gaps(verdict, time)
        if self._first:
            self._observe_first_tokens()

    @hookimpl
    def hotswap_plan_failed(self, component: str, error: str, time: float) -> None:
        self._counts["failed_plans"] += 1

    @hookimpl
    def hotswap_pages_evicted(self, events: Sequence[Any], time: float) -> None:
        self._counts["evicted_pages"] += sum(len(event.keys) for event in events if event.kind == "evicted")

    @hookimpl
    def hotswap_transfers_ended(self, counters: Mapping[str, int], time: float) -> None:
        self._transfers = dict(counters)

    @hookimpl
    def hotswap_pages_leaked(self, owners: dict[str, int], time: float) -> None:
        self._counts["leaked_pages"] += sum(owners.values())

    @hookimpl
    def hotswap_component_exchanged(self, pause: float, recomputed: int, problem: str, time: float) -> None:
        self._counts["component_rollbacks" if problem else "component_exchanges"] += 1
        if time != self._exchanged_at:  # several in one exchange
            self._counts["exchange_recomputed_requests"] += recomputed
        self._exchanged_at, self._last_pause = time, pause

    def _observe_gaps(self, verdict: Verdict, time: float) -> None:
        rows = verdict.rows
        several = {row.request: len(row.kept) for row in rows if len(row.kept) > 1}
        gap = self._histograms["inter_token_latency_seconds"]
        kept = {row.request for row in rows if row.kept}
        for seconds, tokens, requests in self._last_tokens.step(kept, several, time):
            gap.observe(seconds / tokens, tokens * requests)
        self._drafts.add(verdict)

    def _observe_first_tokens(self) -> None:
        for state in list(self._first.values()):
            if state.first_token_at is not None:
                del self._first[state.id]
                self._last_tokens.begin(state.id, state.first_token_at)
                self._histograms["time_to_first_token_seconds"].observe(state.first_token_at - state.arrival)

    def _observe_prefill(self, state: RequestState, first: float, only: bool) -> None:
        """``only``: its first token was its last here."""
        histograms, begun = self._histograms, state.first_scheduled_at or first
        if only:
            histograms["time_to_first_token_seconds"].observe(first - state.arrival)
        histograms["request_queue_time_seconds"].observe(begun - state.arrival)
        histograms["request_prefill_time_seconds"].observe(first - begun)
        histograms["request_prompt_tokens"].observe(state.prompt_length)

    def _observe_ended(self, state: RequestState, first: float, time: float, last: float | None) -> None:
        histograms = self._histograms
        if last is not None:
            histograms["inter_token_latency_seconds"].observe(time - last)
        histograms["e2e_request_latency_seconds"].observe(time - state.arrival)
        histograms["request_decode_time_seconds"].observe(time - first)
        histograms["request_generation_tokens"].observe(state.output_length)
        if state.output_length > 1:
            histograms["request_time_per_output_token_seconds"].observe((time - first) / (state.output_length - 1))

    # What is told

    @hookimpl
    def hotswap_server_routes(self, app: Any) -> None:
        from starlette.responses import Response

        shown: list[Metrics] | None = getattr(app.state, "metrics", None)
        if shown is not None:  # another engine's has added the route
            shown.append(self)
            return
        shown = app.state.metrics = [self]
        registry = CollectorRegistry()
        registry.register(_Source(lambda: joined(one.families() for one in shown)))

        def metrics() -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        app.add_api_route("/metrics", metrics, include_in_schema=False)

    def families(self) -> Iterator[Metric]:
        """Every metric, under every prefix."""
        with self._lock:
            live, totals, reasons = list(self._live.values()), self._ended, dict(self._reasons)
            for state in live:
                totals = totals.plus(state)
        running = sum(state.running for state in live)
        gauges = {
            "num_requests_running": ("Requests that hold cache pages.", running),
            "num_requests_waiting": ("Requests that wait.", len(live) - running),
            "kv_cache_usage_perc": ("Pages that are not free for the taking, 1 is all.", self._kv_usage),
            "kv_cache_peak_perc": ("Most pages that requests have held at a time, 1 is all.", self._kv_peak),
            "exchange_last_pause_seconds": ("Time without a step in the last exchange of parts.", self._last_pause),
        }
        drafts, positions = self._drafts, self._drafts.by_position
        counts = {
            **self._counts, **totals._asdict(), "spec_decode_num_drafts": drafts.rows,
            "spec_decode_num_draft_tokens": sum(drafted for drafted, _ in positions),
            "spec_decode_num_accepted_tokens": sum(accepted for _, accepted in positions),
            "spec_decode_draft_seconds": drafts.draft_s, "spec_decode_verify_seconds": drafts.verify_s,
        }
        gauges["spec_decode_acceptance_length"] = (
            "Tokens that a row with drafts yields, the target's own included; 0 as long as there was none.",
            drafts.acceptance_length if positions else 0)
        for prefix in self._prefixes:
            yield from self._families(prefix, gauges, counts, reasons)
            yield from self._positions(prefix, positions)

    def _positions(self, prefix: str, positions: Sequence[tuple[int, int]]) -> Iterator[Metric]:
        labels, values = self._labels()
        for name, column, text in (("draft", 0, "Drafted"), ("accepted", 1, "Accepted")):
            counter = CounterMetricFamily(
                f"{prefix}spec_decode_num_{name}_tokens_per_pos",
                f"{text} tokens, by their place among a row's drafts, from 0.", labels=[*labels, "position"])
            for position, counts in enumerate(positions):
                counter.add_metric([*values, str(position)], counts[column])
            yield counter

    def _labels(self) -> tuple[list[str], list[str]]:
        """Names and values of the labels that every sample has."""
        if self._replica:
            return ["model_name", "replica"], [self._model, self._replica]
        return ["model_name"], [self._model]

    def _families(
        self, prefix: str, gauges: dict[str, tuple[str, float]], counts: dict[str, float], reasons: dict[str, int],
    ) -> Iterator[Metric]:
        labels, values = self._labels()
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(prefix + name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(prefix + name, text, labels=labels)
            counter.add_metric(values, counts.get(name, 0))
            yield counter
        moved = CounterMetricFamily(
            prefix + "kv_transfer", "What the KV transfer has done, by its own names.", labels=[*labels, "event"])
        for event, count in self._transfers.items():
            moved.add_metric([*values, event], count)
        yield moved
        events = CounterMetricFamily(
            prefix + "worker_events", "What happened in the workers' steps, by event.", labels=[*labels, "event"])
        for event, count in dict(self._events).items():
            events.add_metric([*values, event], count)
        yield events
        ended = CounterMetricFamily(
            prefix + "request_success", "Requests that have ended, by reason.", labels=[*labels, "finished_reason"])
        for reason, count in reasons.items():
            ended.add_metric([*values, reason], count)
        yield ended
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(prefix + name, text, labels=labels)
            histogram.add_metric(values, self._histograms[name].buckets(), self._histograms[name].total)
            yield histogram
