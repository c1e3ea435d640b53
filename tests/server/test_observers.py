"""Metrics and bills, watched on the real loop with a fake device."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.kvcache import CacheUsage
from hotswap.core.live import LiveComponents
from hotswap.core.request import Handoff
from hotswap.core.testing.rig import Rig, build, expected, make_rig, random_prompt


def watched(
    use: str, rig_options: dict[str, Any] | None = None, replica: str = "", **options: Any,
) -> tuple[Any, Rig, LiveComponents]:
    live = LiveComponents()
    observer = build("observer", use, **options)
    live.add(observer)
    rig = make_rig(observers=live.observers, **(rig_options or {}))
    rig.start_observers({"model": {"name": "toy"}, "server": {}}, replica)
    return observer, rig, live


def scrape(metrics: Any) -> dict[str, float]:
    """Sample name, with its reason, event or bucket if it has one -> value."""
    from prometheus_client import generate_latest

    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "toy"
            told_apart = ("finished_reason", "event", "le", "position")
            labels = [sample.labels[name] for name in told_apart if name in sample.labels]
            key = labels[0] if labels else None
            found[f"{sample.name}[{key}]" if key else sample.name] = sample.value
    return found


def traffic(rig: Rig, count: int = 30, abort_every: int = 5, seed: int = 1) -> list[Any]:
    rng, shared, requests = random.Random(seed), [3] * 13, []
    for turn in range(count):
        requests.append(rig.add(f"r{turn}", random_prompt(rng, 25, shared), rng.randrange(1, 40)))
        rig.loop.turn()
        rig.clock.advance(0.002)
        if turn % abort_every == 4:
            rig.loop.abort(f"r{turn - rng.randrange(4)}")
    rig.run()
    return requests


def test_what_workers_count_is_added_up_by_event():
    metrics, rig, live = watched("metrics")
    execute = rig.worker.execute

    def counting(message: Any) -> Any:
        verdict = execute(message)
        verdict.counts = {"graph_replays": 1, "eager_long_rows": 2}
        return verdict

    rig.worker.execute = counting
    rig.add("r", [1, 2, 3], 4)
    rig.run()
    found = scrape(metrics)
    steps = found["hotswap:steps_total"]
    assert steps >= 4
    assert found["hotswap:worker_events_total[graph_replays]"] == steps
    assert found["hotswap:worker_events_total[eager_long_rows]"] == 2 * steps


@pytest.mark.parametrize("depth", [1, 2])
def test_metrics_add_up(depth):
    metrics, rig, live = watched("metrics", {"depth": depth, "num_pages": 34, "lookahead": 2, "max_running": 6})
    requests = traffic(rig)
    found = scrape(metrics)
    ends = [rig.client.endings(request.id) for request in requests]
    for reason in ("stop", "length", "abort", "error"):
        assert found[f"hotswap:request_success_total[{reason}]"] == ends.count([reason])
    assert ends.count(["abort"]) > 0
    assert found["hotswap:num_requests_running"] == found["hotswap:num_requests_waiting"] == 0
    assert found["hotswap:generation_tokens_total"] == sum(len(rig.client.tokens(r.id)) for r in requests)
    finished = [r for r, end in zip(requests, ends, strict=True) if end == ["length"]]
    assert found["hotswap:e2e_request_latency_seconds_count"] == len(finished)
    assert found["hotswap:time_to_first_token_seconds_count"] >= len(finished)
    assert found["hotswap:prefix_cache_queries_total"] >= sum(len(r.prompt_token_ids) for r in finished)
    assert 0 < found["hotswap:prefix_cache_hits_total"] < found["hotswap:prefix_cache_queries_total"]
    assert found["hotswap:num_preemptions_total"] > 0
    drafted = found["hotswap:spec_decode_num_draft_tokens_total"]
    assert drafted > found["hotswap:spec_decode_num_accepted_tokens_total"] > 0
    _assert_positions_add_up(found, rig)
    assert found["hotswap:steps_total"] == rig.loop.steps
    assert found["hotswap:step_duration_seconds_bucket[+Inf]"] == rig.loop.steps
    assert not (metrics._live or metrics._first or metrics._last_tokens)
    assert live.observers.failures == 0


def _assert_positions_add_up(found: dict[str, float], rig: Rig) -> None:
    per_position = [
        [found[f"hotswap:spec_decode_num_{name}_tokens_per_pos_total[{position}]"] for position in (0, 1)]
        for name in ("draft", "accepted")]
    drafted, accepted = per_position
    assert sum(drafted) == found["hotswap:spec_decode_num_draft_tokens_total"]
    assert sum(accepted) == found["hotswap:spec_decode_num_accepted_tokens_total"]
    assert drafted[0] == found["hotswap:spec_decode_num_drafts_total"]
    assert accepted[0] > accepted[1] > 0
    assert found["hotswap:spec_decode_acceptance_length"] == pytest.approx(1 + sum(accepted) / drafted[0])
    # The same as /server_info says.
    report = rig.loop.drafts.report()
    assert (report["drafted"], report["accepted"]) == (sum(drafted), sum(accepted))
    assert report["acceptance_rate_by_position"] == pytest.approx(
        [kept / said for said, kept in zip(drafted, accepted, strict=True)])


def test_time_of_drafting_and_verification_is_what_workers_say():
    metrics, rig, _ = watched("metrics", {"lookahead": 2})
    execute = rig.worker.execute

    def timed(message: Any) -> Any:
        verdict = execute(message)
        verdict.durations = {"prepare": 8.0, "propose": 1.0, "forward": 2.0, "sample": 0.5, "observe": 0.25}
        return verdict

    rig.worker.execute = timed
    rig.add("r", [1, 2, 3], 9)
    rig.run()
    found, drafts = scrape(metrics), rig.loop.drafts
    assert found["hotswap:spec_decode_draft_seconds_total"] == drafts.draft_s == 1.25 * rig.loop.steps
    with_drafts = found["hotswap:spec_decode_num_drafts_total"]
    assert 0 < with_drafts < rig.loop.steps
    assert found["hotswap:spec_decode_verify_seconds_total"] == drafts.verify_s == 2.5 * with_drafts


def test_without_a_speculator_there_is_nothing_to_say_of_drafts():
    metrics, rig, _ = watched("metrics")
    rig.add("r", [1, 2, 3], 4)
    rig.run()
    found = scrape(metrics)
    assert not [name for name in found if "_per_pos" in name]
    assert found["hotswap:spec_decode_acceptance_length"] == 0
    assert rig.loop.drafts.report()["acceptance_rate"] is None


def test_waiting_and_running_are_those_of_the_moment():
    metrics, rig, _ = watched("metrics", {"max_running": 2})
    for number in range(5):
        rig.add(f"r{number}", [1, 2, 3], 8)
    rig.loop.turn()
    found = scrape(metrics)
    assert (found["hotswap:num_requests_running"], found["hotswap:num_requests_waiting"]) == (2, 3)
    assert found["hotswap:prompt_tokens_total"] == 6
    rig.run()
    found = scrape(metrics)
    assert (found["hotswap:num_requests_running"], found["hotswap:num_requests_waiting"]) == (0, 0)
    assert found["hotswap:kv_cache_usage_perc"] == 0


def test_the_most_that_requests_have_held_is_remembered():
    metrics, rig, live = watched("metrics")
    held = []

    class Held(Observer):
        @hookimpl
        def hotswap_step_finished(self, usage: CacheUsage) -> None:
            held.append(usage.held / usage.total)

    live.add(Held())
    for number in range(3):
        rig.add(f"r{number}", [1, 2, 3], 9 * (number + 1))
    rig.run()
    found = scrape(metrics)
    assert found["hotswap:kv_cache_peak_perc"] == max(held) > held[-1]
    assert found["hotswap:kv_cache_usage_perc"] < max(held)


def test_exchanges_and_parts_that_gave_way_again_are_counted():
    metrics, _, live = watched("metrics")
    told = {"path": "scheduler", "kind": "scheduler", "old": "scheduler:a", "new": "scheduler:b", "options": {},
            "pause": 0.25, "handed_over": 1, "recomputed": 2, "problem": "", "time": 1.0}
    live.observers.notify("hotswap_component_exchanged", **told)
    live.observers.notify("hotswap_component_exchanged", **told | {"path": "kvcache", "kind": "kvcache"})
    live.observers.notify("hotswap_component_exchanged", **told | {
        "old": "scheduler:b", "new": "scheduler:a", "problem": "it raised", "pause": 0.5, "recomputed": 3, "time": 2.0})
    found = scrape(metrics)
    assert found["hotswap:component_exchanges_total"] == 2
    assert found["hotswap:component_rollbacks_total"] == 1
    assert found["hotswap:exchange_recomputed_requests_total"] == 2 + 3, "two parts of one exchange: once"
    assert found["hotswap:exchange_last_pause_seconds"] == 0.5
    assert live.observers.failures == 0


def test_latencies_are_what_the_clock_says():
    metrics, rig, _ = watched("metrics")
    rig.add("r", [1, 2, 3], 5)
    rig.clock.advance(0.5)
    rig.run()
    found = scrape(metrics)
    assert found["hotswap:time_to_first_token_seconds_sum"] == pytest.approx(0.5, abs=0.01)
    assert found["hotswap:request_queue_time_seconds_sum"] == pytest.approx(0.5, abs=0.01)
    assert found["hotswap:inter_token_latency_seconds_count"] == 4
    assert found["hotswap:inter_token_latency_seconds_sum"] == pytest.approx(0.004)
    assert found["hotswap:request_time_per_output_token_seconds_sum"] == pytest.approx(0.001)
    assert found["hotswap:request_generation_tokens_sum"] == 5


def test_vllms_names_are_an_option():
    metrics, rig, _ = watched("metrics", vllm_alias=True)
    rig.add("r", [1], 1)
    rig.run()
    found = scrape(metrics)
    ours = {name.removeprefix("hotswap:") for name in found if name.startswith("hotswap:")}
    assert ours == {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    assert found["vllm:request_success_total[length]"] == 1


def test_metrics_are_served(start):
    live = LiveComponents()
    live.add(build("observer", "metrics", vllm_alias=True))
    live.observers.notify(
        "hotswap_engine_started", versions={}, replica="", time=0.0,
        config={"model": {"name": "toy"}, "server": {"served_model_name": "mine"}})
    server = start(served={"install_routes": lambda app: live.observers.notify("hotswap_server_routes", app=app)})
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'hotswap:num_requests_running{model_name="mine"} 0.0' in answer.text
    assert "vllm:num_requests_running" in answer.text


# Bills


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_gets_one_bill_and_the_bills_add_up(tmp_path: Path, depth, monkeypatch):
    path = tmp_path / "bills.jsonl"
    options = {"depth": depth, "num_pages": 34, "lookahead": 2, "max_running": 6}
    bill, rig, live = watched("bill", options, path=str(path))
    collect = rig.executor.collect

    def slowly(ticket: int) -> Any:
        rig.clock.advance(0.001)
        return collect(ticket)

    monkeypatch.setattr(rig.executor, "collect", slowly)
    requests = traffic(rig)
    live.observers.notify("hotswap_engine_stopped", time=rig.clock.now())
    lines = {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert len(lines) == len(bill.invoices) == len(requests)
    for request in requests:
        line = lines[request.id]
        assert [line["finish_reason"]] == rig.client.endings(request.id)
        assert line["prompt_tokens"] == len(request.prompt_token_ids)
        assert line["output_tokens"] == len(rig.client.tokens(request.id))
        if line["finish_reason"] == "length":
            assert rig.client.tokens(request.id) == expected(request)
            least = line["prompt_tokens"] + line["output_tokens"] - 1 - line["reused_tokens"]
            assert line["computed_tokens"] >= least
            assert line["page_seconds"] > 0
            assert 0 < line["step_seconds"] <= line["total_seconds"] + 1e-9
    assert any(line["preemptions"] for line in lines.values())
    assert any(line["reused_tokens"] for line in lines.values())
    assert sum(line["step_seconds"] for line in lines.values()) <= rig.clock.now()
    assert not (bill._open or bill._pages or bill._steps or bill._late)
    assert live.observers.failures == 0


def test_a_lone_request_pays_for_exactly_what_it_used():
    bill, rig, _ = watched("bill", {"page_size": 4})
    rig.add("r", [1, 2, 3, 4, 5], 4, tenant="alice")
    rig.run()
    (invoice,) = bill.invoices
    assert (invoice.tenant, invoice.prompt_tokens, invoice.output_tokens, invoice.computed_tokens) == ("alice", 5, 4, 8)
    assert invoice.page_seconds == pytest.approx(2 * invoice.total_seconds, rel=0.5)


def test_only_the_newest_bills_stay_in_memory():
    bill, rig, _ = watched("bill", keep=2)
    for number in range(5):
        rig.add(f"r{number}", [1, 2], 2)
    rig.run()
    assert len(bill.invoices) == 2


def test_the_engines_of_a_deployment_share_one_route_and_are_told_apart_by_a_label():
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app, requests = FastAPI(), 0
    for replica, count in (("0", 3), ("1", 5)):
        metrics, rig, live = watched("metrics", replica=replica)
        live.observers.notify("hotswap_server_routes", app=app)
        traffic(rig, count)
        requests += count
    text = TestClient(app).get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE hotswap:request_success_total counter") == 1
    running = families["hotswap:num_requests_running"].samples
    assert [(sample.labels["replica"], sample.value) for sample in running] == [("0", 0), ("1", 0)]
    ended = {sample.labels["replica"]: 0.0 for sample in running}
    for sample in families["hotswap:request_success"].samples:
        ended[sample.labels["replica"]] += sample.value
    assert ended == {"0": 3, "1": 5}


def test_a_request_in_two_engines_is_counted_once():
    first, prefill, _ = watched("metrics")
    second, decode, _ = watched("metrics")
    request = prefill.add("r", [3] * 13, 6, hands_over=True)
    prefill.run()
    token = prefill.client.tokens("r")
    assert (prefill.client.endings("r"), len(token)) == (["handoff"], 1)
    decode.add("r", [3] * 13, 6, continued=Handoff(tuple(token)))
    decode.run()
    assert token + decode.client.tokens("r") == expected(request)
    counts = [scrape(metrics) for metrics in (first, second)]
    for name, each in {
        "prompt_tokens_total": [13, 0], "generation_tokens_total": [1, 5], "request_success_total[handoff]": [1, 0],
        "request_success_total[length]": [0, 1], "time_to_first_token_seconds_count": [1, 0],
        "request_prefill_time_seconds_count": [1, 0], "e2e_request_latency_seconds_count": [0, 1],
        "inter_token_latency_seconds_count": [0, 5],
    }.items():
        assert [count[f"hotswap:{name}"] for count in counts] == each, name


def test_files_of_several_replicas_have_names_of_their_own(tmp_path):
    for use in ("bill", "decision_log"):
        for replica in ("", "0.decode1"):
            _, rig, live = watched(use, replica=replica, path=tmp_path / f"{use}.jsonl")
            traffic(rig, 2)
            live.observers.notify("hotswap_engine_stopped", time=1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bill.0.decode1.jsonl", "bill.jsonl", "decision_log.0.decode1.jsonl", "decision_log.jsonl"]
