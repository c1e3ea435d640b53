"""Prompts at one engine, the rest at another: the same tokens, and nothing that a client could tell."""

import importlib.util
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.errors import ConfigError, QueueFullError
from hotswap.core.request import FinishReason, Handoff
from hotswap.plugins.kv_transfer import peer
from hotswap.plugins.kv_transfer.peer import make_folder
from hotswap.plugins.kv_transfer.shm import SharedMemoryWorker
from hotswap.plugins.kv_transfer.tcp import TcpWorker

WIRES = {"shm": SharedMemoryWorker, "tcp": TcpWorker}


def disaggregated(tiny: Any, prefill: int = 1, decode: int = 1, **changes: Any) -> dict[str, Any]:
    return tiny.config("chunked", "prefix", changes.pop("speculator", "none"), changes.pop("depth", 2), **{
        "parallel": [{"use": "disaggregated", "prefill": prefill, "decode": decode}], "kv_transfer": "shm", **changes})


def counts(running: Any, name: str) -> list[int]:
    """A counter of each engine's KV transfer."""
    return [built.engine.loop.transfers.counters()[name] for built in running.built.engines]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("prefill", "decode", "depth"), [(1, 1, 1), (2, 2, 2)])
def test_the_tokens_are_those_of_one_engine(
    deploy: Any, book: Any, tiny: Any, prefill: int, decode: int, depth: int, wire: str,
) -> None:
    running = deploy(disaggregated(tiny, prefill, decode, depth=depth, kv_transfer=wire))
    prompts = tiny.prompts()
    for abort in ({}, {}, {1: 3, 4: 3}):
        for prompt, output in zip(prompts, running.generate(prompts, 24, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    first, second = running.seen[:prefill], running.seen[prefill:]
    assert sum(seen["handoff"] for seen in first) == 3 * len(prompts)
    assert sum(seen["length"] for seen in first) == 0
    assert sum(seen["length"] for seen in second) == 3 * len(prompts) - 2
    assert all(seen["length"] for seen in second)
    assert sum(counts(running, "kept")) == 3 * len(prompts)
    assert sum(counts(running, "fetched")) >= 2 * len(prompts), "the others were cached there already"
    assert sum(counts(running, "failed")) == sum(counts(running, "refused")) == sum(counts(running, "expired")) == 0


@pytest.mark.parametrize("wire", [*WIRES, pytest.param("nixl", marks=pytest.mark.skipif(
    not importlib.util.find_spec("nixl_cu12"), reason="needs the extra nixl"))])
def test_the_decode_engine_computes_nothing_twice(deploy: Any, tiny: Any, wire: str) -> None:
    """One token a step and row, the first of which is the token that the prefill engine sampled."""
    running = deploy(disaggregated(tiny, kv_transfer=wire, num_blocks=300))
    prompts = tiny.prompts()
    running.generate(prompts, 12)
    running.assert_clean()
    prefill, decode = running.seen
    assert decode["computed"] == 11 * len(prompts)
    assert decode["widest row"] == 1
    assert decode["cached tokens"] == sum(map(len, prompts))
    assert prefill["computed"] + prefill["cached tokens"] == sum(map(len, prompts))
    brought = sum(counts(running, "fetched_tokens"))
    assert 0 < brought <= decode["cached tokens"]
    running.generate(prompts, 12)
    assert sum(counts(running, "fetched_tokens")) - brought < brought, "what it has already is not read again"


def test_metrics_tell_of_each_engine_what_its_transfer_counts(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny, num_blocks=300, observers=["metrics"]))
    prompts = tiny.prompts()
    running.generate(prompts, 4)
    running.assert_clean()
    for number, event in enumerate(("read", "fetched")):
        [metrics] = [part for part in running.built.engines[number].components if part.label == "observer:metrics"]
        samples = {
            sample.labels["event"]: sample.value for family in metrics.families() for sample in family.samples
            if sample.name == "hotswap:kv_transfer_total"}
        assert samples == running.built.engines[number].engine.loop.transfers.counters()
        assert samples[event] == len(prompts)


@pytest.mark.parametrize("wire", WIRES)
def test_a_window_and_pages_that_have_left_it(deploy: Any, run: Any, windowed: Any, wire: str) -> None:
    """Of a sliding-window group the prefill engine has only the last pages; they are enough."""
    config = windowed.config("chunked", "prefix", "none", 2)
    prompts = windowed.prompts()
    alone = run(config).generate(prompts, 16)
    running = deploy({**config, "parallel": [{"use": "disaggregated"}], "kv_transfer": wire})
    assert running.generate(prompts, 16) == alone
    running.assert_clean()
    assert counts(running, "fetched")[1] == len(prompts)


class Planted(RuntimeError):
    """A failure that a test asked for."""


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("share", [1, 3])
def test_a_transfer_that_fails_ends_in_recomputation(
    deploy: Any, book: Any, tiny: Any, monkeypatch: Any, wire: str, share: int,
) -> None:
    """``share``: every so many reads break off, after something has been written already."""
    worker, reads = WIRES[wire], itertools.count()
    honest = worker.read

    def broken(self: Any, ticket: Any, peer: Any, wanted: Any) -> None:
        if next(reads) % share:
            return honest(self, ticket, peer, wanted)
        honest(self, ticket, peer, [(read._replace(layers=read.layers[:1]), span) for read, span in wanted])
        raise Planted("the connection was cut")

    monkeypatch.setattr(worker, "read", broken)
    monkeypatch.setattr("hotswap.plugins.kv_transfer.peer.FAILURES", 1000)  # it is tried every time
    running = deploy(disaggregated(tiny, kv_transfer=wire, num_blocks=300))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    failed = counts(running, "failed")[1]
    assert failed >= len(prompts) // share
    assert counts(running, "fetched")[1] == len(prompts) - failed
    assert running.seen[1]["computed"] > 11 * len(prompts)
    assert counts(running, "read")[0] == len(prompts), "the keeper hears that a reader is done, even if it failed"


def test_an_engine_that_cannot_be_read_from_is_left_alone_for_a_while_and_then_tried_again(
    deploy: Any, book: Any, tiny: Any, monkeypatch: Any,
) -> None:
    honest = TcpWorker.read

    def broken(self: Any, *arguments: Any) -> None:
        raise TimeoutError("nothing comes back")

    monkeypatch.setattr(TcpWorker, "read", broken)
    running = deploy(disaggregated(tiny, kv_transfer="tcp", num_blocks=300))
    transfer = running.built.engines[1].engine.loop.transfers.component
    prompts = tiny.prompts()
    for prompt in prompts:
        book.compare(tiny.reference, prompt, running.generate([prompt], 4)[0])
    assert (counts(running, "failed")[1], counts(running, "shunned")[1]) == (3, len(prompts) - 3)
    clock = transfer._now
    monkeypatch.setattr(transfer, "_now", lambda: clock() + 31)
    running.generate([[9, 8, 7]], 4)
    assert (counts(running, "failed")[1], counts(running, "shunned")[1]) == (4, len(prompts) - 3)
    monkeypatch.setattr(TcpWorker, "read", honest)
    monkeypatch.setattr(transfer, "_now", lambda: clock() + 62)
    running.generate([[9, 8, 6], [9, 8, 5]], 4)
    assert counts(running, "fetched")[1] == 2
    running.assert_clean()


@pytest.mark.parametrize("wire", WIRES)
def test_pages_whose_time_has_passed_are_never_read(
    deploy: Any, book: Any, tiny: Any, monkeypatch: Any, wire: str,
) -> None:
    worker = WIRES[wire]
    honest = worker.read

    def late(self: Any, *arguments: Any) -> None:
        time.sleep(0.4)
        honest(self, *arguments)

    monkeypatch.setattr(worker, "read", late)
    running = deploy(disaggregated(tiny, kv_transfer={"use": wire, "hold_s": 0.1, "timeout_s": 0.3}))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 8), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    assert counts(running, "expired")[0] > 0
    assert counts(running, "failed")[1] > 0


def test_pages_stay_behind_their_fence_until_they_have_been_read(deploy: Any, tiny: Any, monkeypatch: Any) -> None:
    reading, go = threading.Event(), threading.Event()
    honest = TcpWorker.read

    def slow(self: Any, *arguments: Any) -> None:
        reading.set()
        go.wait(20)
        honest(self, *arguments)

    monkeypatch.setattr(TcpWorker, "read", slow)
    running = deploy(disaggregated(tiny, kv_transfer="tcp"))
    prefill, decode = (built.engine.loop.parts.kv for built in running.built.engines)
    boxes = running.submit([[5] * 20], 8)
    assert reading.wait(10)
    running.built.engine.abort(running.name(0))  # in the middle of the transfer
    assert running.wait(boxes)[0].finish_reason == "abort"
    assert prefill.usage().fenced == 5
    assert decode.usage().fenced == 6, "somebody still writes them"
    go.set()
    running.assert_clean()


@pytest.mark.parametrize("wire", WIRES)
def test_a_ticket_of_another_kind_or_for_other_tokens_is_refused_and_the_prompt_computed(
    deploy: Any, tiny: Any, wire: str, caplog: Any,
) -> None:
    running = deploy(disaggregated(tiny, kv_transfer=wire))
    [[token, *rest]] = running.generate([[5, 6, 7, 8, 9]], 4)
    decode = running.built.engines[1].engine
    good = {"wire": wire, "folder": "/nowhere", "engine": "other", "ranks": 1, "key": "k", "tokens": 5, "digest": "0",
            "first": {"full": 0}}
    for number, pages in enumerate(({**good, "wire": "pigeon"}, good)):
        box: list[Any] = []
        request = replace(running.request(number, [5, 6, 7, 8, 9], max_tokens=4), continued=Handoff((token,), pages))
        ended = threading.Event()
        decode.add(request, lambda output, box=box, ended=ended: (
            box.append(output), ended.set() if output.finish_reason else None))
        assert ended.wait(20)
        assert [token for output in box for token in output.token_ids] == rest
    assert counts(running, "refused")[1] == 2
    assert "pigeon" in caplog.text
    running.assert_clean()


def test_a_request_of_one_token_stays_where_its_prompt_was_computed(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))
    running.generate(tiny.prompts(), 1)
    assert [seen["length"] for seen in running.seen] == [len(tiny.prompts()), 0]


def test_a_first_token_that_ends_the_request_ends_it_at_once(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))
    [[token, *_]] = running.generate([[5, 6, 7]], 4)
    answer = running.wait(running.submit([[5, 6, 7]], 4, stop_token_ids=[token]))[0]
    assert (answer.token_ids, answer.finish_reason) == ([token], FinishReason.STOP)
    assert [seen["stop"] for seen in running.seen] == [1, 0]


def test_seeds_penalties_and_logprobs_go_on_where_they_stopped(deploy: Any, run: Any, tiny: Any) -> None:
    """The position decides a draw, and penalties count what the other engine has kept."""
    fields = {
        "temperature": 0.9, "seed": 7, "presence_penalty": 1.5, "repetition_penalty": 1.2, "logprobs": 2,
        "prompt_logprobs": 1, "max_tokens": 16, "ignore_eos": True}
    prompts = tiny.prompts()
    alone = run(tiny.config("chunked", "prefix", "none", 1)).answer(*({"prompt": p, **fields} for p in prompts))
    running = deploy(disaggregated(tiny))
    answers = running.wait(running.submit(prompts, **fields))
    for mine, theirs in zip(answers, alone, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert [entry.token_id for entry in mine.logprobs] == mine.token_ids
        assert [entry.logprob for entry in mine.logprobs] == pytest.approx(
            [entry.logprob for entry in theirs.logprobs], abs=1e-4)
        assert len(mine.prompt_logprobs or []) == len(theirs.prompt_logprobs or [])


def test_text_goes_on_within_a_character_and_a_stop_string_is_found_across_the_engines(deploy: Any, tiny: Any) -> None:
    from hotswap.core.request import TextDelta

    class Spelling:
        """Gives text for every second token, and stops at the fourth."""

        def __init__(self) -> None:
            self.held: list[int] = []
            self.pushed = self.finished = 0

        def push(self, token_ids: list[int], search_stops_after: int = 0) -> TextDelta:
            self.held += token_ids
            self.pushed += len(token_ids)
            if self.pushed == 4:
                return TextDelta("end", "stop here", len(token_ids))
            if len(self.held) < 2:
                return TextDelta("", None, len(token_ids))
            text, self.held = f"{len(self.held)} ", []
            return TextDelta(text, None, len(token_ids))

        def finish(self) -> str:
            self.finished += 1
            return "finished"

    running, detokenizer = deploy(disaggregated(tiny)), Spelling()
    boxes = running.submit([[5, 6, 7]], 12, detokenizer=detokenizer)
    answer = running.wait(boxes)[0]
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("2 end", FinishReason.STOP, 4)
    assert detokenizer.finished == 0, "the first engine flushes nothing"


def test_either_role_does_all_where_the_other_is_lost(deploy: Any, book: Any, tiny: Any, caplog: Any) -> None:
    prompts = tiny.prompts()
    for lost, name, other in ((1, "decode0", "prefill"), (0, "prefill0", "decode")):
        caplog.clear()
        running = deploy(disaggregated(tiny, kv_transfer={"use": "shm", "hold_s": 0.5}))
        engine = running.built.engine
        boxes = running.submit(prompts, 60)
        running.lose(lost)
        reasons = Counter(answer.finish_reason for answer in running.wait(boxes))
        assert reasons.keys() <= {FinishReason.ERROR, FinishReason.LENGTH}
        assert (engine.health(), engine.failure) == (None, None)
        for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
            book.compare(tiny.reference, prompt, output)
        told = f"engine {name} is lost, the {other} engines now do both, prefill and decode: "
        assert caplog.text.count(told) == 1
        running.lose(1 - lost)
        assert engine.failure
        assert engine.health()
        assert caplog.text.count("now do both") == 1, "nobody is left to do so"
        assert caplog.text.count(f"engine {other}0 is lost, 0 of 1 serve on: ") == 1


@pytest.mark.parametrize("error", [QueueFullError, ZeroDivisionError], ids=["is full", "fails in a way of its own"])
def test_a_decode_engine_that_takes_nothing_leaves_requests_where_they_are(
    deploy: Any, book: Any, tiny: Any, error: type[Exception],
) -> None:
    running = deploy(disaggregated(tiny, kv_transfer={"use": "shm", "hold_s": 0.5}))  # nobody comes for the pages

    def refuse(request: Any, sink: Any) -> None:
        raise error("planted")

    running.built.engines[1].engine.add = refuse
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert running.built.engine.loads().extra["kept_back"] == len(prompts)
    assert running.seen[0]["length"] == len(prompts)
    running.assert_clean()


def test_an_abort_reaches_a_request_at_either_engine(deploy: Any, tiny: Any) -> None:
    running = deploy(disaggregated(tiny))
    with running.halted():
        boxes = running.submit([[5, 6, 7]] * 3, 40)
        running.built.engine.abort(running.name(1))
    answers = running.wait(boxes)
    assert [answer.finish_reason for answer in answers] == ["length", "abort", "length"]
    assert [len(output) for output in running.generate([[5, 6, 7]], 40, abort={0: 1})] == [1]
    running.assert_clean()


def test_deployments_of_pairs_and_pairs_of_deployments(deploy: Any, book: Any, tiny: Any) -> None:
    pair = {"use": "disaggregated"}
    two = {"use": "data", "replicas": 2}
    prompts = tiny.prompts()
    for parallel, names in (
        ([two, pair], ["0.prefill0", "0.decode0", "1.prefill0", "1.decode0"]),
        ([pair, two], ["prefill0.0", "prefill0.1", "decode0.0", "decode0.1"]),
    ):
        running = deploy(disaggregated(tiny, parallel=parallel))
        assert [built.replica.name for built in running.built.engines] == names
        for prompt, output in zip(prompts, running.generate(prompts, 8), strict=True):
            book.compare(tiny.reference, prompt, output)
        running.assert_clean()
        assert sum(seen["handoff"] for seen in running.seen) == len(prompts)
        counted = {"handed_over": len(prompts), "kept_back": 0, "misrouted": 0}
        assert running.built.engine.loads().extra == counted, "of all pairs, or of the pair of all"


def test_a_start_that_fails_before_the_transfer_tells_only_why_and_leaves_nothing(
    deploy: Any, tiny: Any, tmp_path: Path, monkeypatch: Any,
) -> None:
    """A worker thread that ends with an exception is a warning, and here an error."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hotswap.plugins.kv_transfer.shm.SHARED_MEMORY", tmp_path)
    threads = set(threading.enumerate())
    for wire in WIRES:
        with pytest.raises(ConfigError, match="one request of max_model_len"):
            deploy(disaggregated(tiny, kv_transfer=wire, num_blocks=4))
        assert not list(tmp_path.iterdir())
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive(), thread.name


def test_without_a_transfer_that_hands_over_it_is_refused(deploy: Any, tiny: Any) -> None:
    for transfer in ("none", "host"):
        with pytest.raises(ConfigError, match=r"requires 'handoff' of the kv_transfer.*Change kv_transfer\.use"):
            deploy(disaggregated(tiny, kv_transfer=transfer))


def test_seats_of_other_strategies_are_refused_under_the_roles_own_path(deploy: Any, tiny: Any) -> None:
    parallel = [{"use": "disaggregated", "decode_parallel": [{"use": "tensr"}]}]
    with pytest.raises(ConfigError, match=r"parallel\[0\]\.decode_parallel\[0\].*tensr"):
        deploy(disaggregated(tiny, parallel=parallel))


@pytest.mark.parametrize("wire", WIRES)
def test_with_everything_switched_on(deploy: Any, book: Any, tiny: Any, wire: str) -> None:
    """Chunks, prefix hits, preemption, two steps in flight, copied drafts, and two engines a role."""
    config = tiny.config({"use": "chunked", "max_chunk": 7}, "prefix", {
        "use": "ngram", "min_n": 1, "max_n": 2, "max_draft": 3}, 2, kv_transfer=wire, parallel=[
            {"use": "disaggregated", "prefill": 2, "decode": 2}])
    running = deploy(config)
    prompts = tiny.prompts() + [prompt * 3 for prompt in tiny.prompts()[1:3]]
    for _ in range(2):
        for prompt, output in zip(prompts * 2, running.generate(prompts * 2, 24), strict=True):
            book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    prefill, decode = Counter[str](), Counter[str]()
    for number, seen in enumerate(running.seen):
        (prefill if number < 2 else decode).update(seen)
    assert prefill["cut prompts"] and prefill["cached tokens"] and decode["suspensions"]
    assert decode["accepted"] and decode["rejected"]
    assert prefill["handoff"] == 4 * len(prompts)
    assert sum(counts(running, "fetched")) > len(prompts)
    assert sum(counts(running, "failed")) == 0


def test_the_cache_of_a_draft_model_goes_along(deploy: Any, book: Any, tiny: Any) -> None:
    """The draft is the model itself: as long as its keys and values are right, every draft is accepted."""
    running = deploy(disaggregated(
        tiny, num_blocks=300, speculator={"use": "draft", "model": str(tiny.path), "max_draft": 3}))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 17), strict=True):
        book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    decode = running.seen[1]
    assert counts(running, "fetched")[1] == len(prompts)
    assert decode["cached tokens"] > 0
    assert decode["accepted"] > 0
    assert decode["rejected"] == 0


@pytest.mark.parametrize("wire", WIRES)
def test_random_aborts_leak_nothing_on_either_side(deploy: Any, tiny: Any, wire: str) -> None:
    running = deploy(disaggregated(tiny, 2, 2, kv_transfer={"use": wire, "hold_s": 5}))
    rng, engine = random.Random(5), running.built.engine
    boxes = []
    for index in range(60):
        boxes.append(running.submit_one(index, tiny.prompt(rng.randrange(1, 40), rng), rng.randrange(1, 12)))
        if rng.random() < 0.5:
            engine.abort(running.name(rng.randrange(index + 1)))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
    reasons = Counter(str(answer.finish_reason) for answer in running.wait(boxes))
    assert reasons["abort"] > 5 and reasons["length"] > 5, reasons
    running.assert_clean()
    assert sum(counts(running, "expired")) == 0, "what is aborted is given up at once"


def test_what_a_killed_server_has_left_in_shared_memory_goes_with_the_next_start(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from hotswap.plugins.kv_transfer import peer\n"
        "folder, lock = peer.make_folder(Path(sys.argv[1])); print(folder, flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")})
    theirs = Path(process.stdout.readline().strip())
    mine, lock = make_folder(tmp_path)
    assert theirs.is_dir(), "its owner lives"
    assert theirs.stat().st_mode & 0o777 == 0o700
    process.kill()
    process.communicate()
    (tmp_path / "hotswap-kv-link").symlink_to(mine)
    for name in ("empty", "locked"):  # killed while they were made: before the lock, and before the name that stays
        (tmp_path / f"hotswap-new-{name}").mkdir(mode=0o700)
    (tmp_path / "hotswap-new-locked" / "lock").touch()
    third, other = make_folder(tmp_path)
    assert not list(tmp_path.glob("hotswap-new-*"))
    assert not theirs.exists()
    assert mine.is_dir()
    assert third.is_dir()
    lock.close()
    other.close()


def test_a_folder_that_another_start_takes_for_one_that_was_left_is_made_again(tmp_path, monkeypatch) -> None:
    made = []
    real = peer.tempfile.mkdtemp

    def mkdtemp(**where):
        made.append(real(**where))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(peer.tempfile, "mkdtemp", mkdtemp)
    folder, lock = make_folder(tmp_path)
    assert len(made) == 2 and list(tmp_path.iterdir()) == [folder]
    lock.close()


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_in_two_pairs_that_share_its_weights(deploy: Any, book: Any, smollm2: Any) -> None:
    running = deploy({
        "model": "smollm2-135m-instruct", "dtype": "float32", "device": "cpu", "max_model_len": 256,
        "scheduler": {"use": "chunked", "max_batch_tokens": 64, "max_running": 8},
        "kvcache": {"use": "prefix", "block_size": 16, "num_blocks": 65}, "kv_transfer": "tcp",
        "execution": {"depth": 2}, "observers": [],
        "parallel": [{"use": "data", "replicas": 2}, {"use": "disaggregated"}]})
    models = [next(part for part in built.components if part.kind == "model") for built in running.built.engines]
    assert len(models) == 4
    assert len(set(map(id, models))) == 1
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40000) for _ in range(length)] for length in (5, 33, 48, 70)]
    for prompt, output in zip(prompts, running.generate(prompts, 12), strict=True):
        book.compare(smollm2, prompt, output)
    running.assert_clean()
    assert sum(counts(running, "fetched")) == len(prompts)
    assert sum(seen["computed"] for seen in running.seen) == sum(map(len, prompts)) + 11 * len(prompts)
