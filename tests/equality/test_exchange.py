"""Parts are exchanged while requests run, and the outputs are those of an engine that was let be."""

import copy
import gc
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotswap.core.engine import assembly as assembly_module
from hotswap.core.engine import client as client_module
from hotswap.core.engine import exchange as exchange_module
from hotswap.core.engine import switch as switch_module
from hotswap.core.engine.exchange import EngineExchange
from hotswap.core.engine.trial import Trial
from hotswap.core.errors import ConfigError, ExchangeError, ExchangeUnderWayError
from hotswap.core.execution import worker as worker_module
from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.runner import ModelRunner
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import Component

SCHEDULERS = ("static", "continuous", "chunked", "prefill_first")
POLICIES = ("fcfs", "priority", "fair_share", "shortest_first", "longest_prefix_first")
MANAGERS = ("paged", "prefix", "radix", "contiguous")
EVICTIONS = ("lru", "fifo", "lfu", "slru")
ATTENTION = (["attention=torch"], ["attention=cpu"], ["attention={use: composite, prefill: torch, decode: torch}"])
STREAMS = 16
TOKENS = 40


def change(rng: random.Random, now: dict[str, Any], drafts: list[str]) -> list[str]:
    """One to three parts, at random, in one exchange. ``now``: the effective config."""
    choices = [
        [f"scheduler={rng.choice(SCHEDULERS)}"], [f"scheduler.policy={rng.choice(POLICIES)}"],
        [f"kvcache={rng.choice(MANAGERS)}"], [f"speculator={rng.choice(drafts)}"], rng.choice(ATTENTION),
    ]
    if now["kvcache"]["use"] in ("prefix", "radix"):
        choices.append([f"kvcache.eviction={rng.choice(EVICTIONS)}"])
    parts = {sets[0].partition("=")[0]: sets for sets in rng.sample(choices, rng.choice([1, 1, 1, 2, 3]))}
    if "kvcache" in parts:
        parts.pop("kvcache.eviction", None)
    return [text for sets in parts.values() for text in sets]


def exchange_at_random(engine: Any, count: int, seed: int, drafts: list[str]) -> Counter[str]:
    """Of ``count`` exchanges: how many changed a part at each config path, and what they came to."""
    rng, seen = random.Random(seed), Counter[str]()
    while seen["exchanges"] < count:
        [report] = engine.built.exchange(change(rng, engine.built.effective(), drafts))
        if not report.parts:
            continue
        seen["exchanges"] += 1
        seen.update(part.path for part in report.parts)
        seen["handed over"] += report.effect.handed_over
        seen["recomputed"] += report.effect.recomputed
        seen["proven"] += report.proven
    return seen


@pytest.mark.parametrize(("depth", "count"), [(1, 25), (2, 60)])
def test_exchanges_at_random_change_no_output(run, tiny, depth, count):
    rng = random.Random(depth)
    engine = run(tiny.config("chunked", "prefix", "none", depth, num_blocks=1 + 6 * 32))
    prompts = [tiny.prompt(rng.randrange(1, 60), rng) for _ in range(STREAMS)]
    expected = engine.generate(prompts, TOKENS)
    seen = engine.under_load(prompts, expected, lambda: exchange_at_random(engine, count, depth, ["none", "ngram"]))
    print(seen)
    assert all(seen[path] for path in (
        "scheduler", "scheduler.policy", "kvcache", "kvcache.eviction", "speculator", "attention"))
    assert seen["handed over"] and seen["recomputed"]
    assert seen["proven"] > 0.8 * count
    engine.assert_clean()


PLANTED = '''
from dataclasses import replace

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import RequestOptions
from hotswap.core.interfaces.scheduler import Row, StepPlan
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.schedulers.continuous import ContinuousScheduler
from hotswap.plugins.speculators.ngram import NgramSpeculator


class Fuse:
    """Burns at the ``after``-th call of one of its methods."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.calls = 0

    def burn(self, after=3):
        self.calls += 1
        if self.calls >= after:
            raise RuntimeError("planted")


class Asked(RequestOptions):
    soon: bool = False


class Own(ContinuousScheduler):
    RequestOptions = Asked


class PlanRaises(Fuse, ContinuousScheduler):
    def plan(self, ctx):
        self.burn()
        return super().plan(ctx)


class PlansNonsense(ContinuousScheduler):
    def plan(self, ctx):
        return StepPlan([Row("nobody", 1)])


class AdmitRaises(Fuse, ContinuousScheduler):
    def admit(self, view):
        self.burn(3)
        super().admit(view)


class ObserveRaises(Fuse, ContinuousScheduler):
    def observe(self, outcome):
        self.burn()
        super().observe(outcome)


class ReserveRaises(Fuse, PrefixKVCache):
    def reserve(self, *arguments, **named):
        self.burn()
        return super().reserve(*arguments, **named)


class CommitRaises(Fuse, PrefixKVCache):
    def commit(self, *arguments):
        self.burn()
        return super().commit(*arguments)


class FenceRaises(Fuse, PrefixKVCache):
    def on_fence(self, fence):
        self.burn()
        super().on_fence(fence)


class AdoptRaises(Fuse, PrefixKVCache):
    def adopt(self, state):
        super().adopt(state)
        self.burn(1)


class ConfigureRefuses(PrefixKVCache):
    def configure(self, *arguments):
        raise ConfigError("planted", "kvcache")


class ProposeRaises(Fuse, NgramSpeculator):
    def propose(self, rows):
        self.burn()
        return super().propose(rows)


class ObservesNothing(NgramSpeculator):
    def observe(self, rows, taps):
        raise RuntimeError("planted")


class LoadRefuses(NgramSpeculator):
    def load(self):
        raise ConfigError("planted", "speculator")


class RunRaises(Fuse, TorchAttention):
    def run(self, *arguments):
        self.burn(7)
        super().run(*arguments)


class BindRaises(TorchAttention):
    def bind(self, *arguments):
        raise RuntimeError("planted")


class NoNumbers(TorchAttention):
    def run(self, state, q, k, v, cache, out): ...


class BindRaisesLater(Fuse, NgramSpeculator):
    def needs(self):
        if self.calls:
            raise RuntimeError("planted")
        return super().needs()

    def load(self):
        self.calls = 1
        return super().load()


class OwnPages(TorchAttention):
    def support(self):
        return replace(super().support(), layouts=())
'''
POINTS = {
    "scheduler": ("Own", "PlanRaises", "PlansNonsense", "AdmitRaises", "ObserveRaises"),
    "kvcache": ("ReserveRaises", "CommitRaises", "FenceRaises", "AdoptRaises", "ConfigureRefuses"),
    "speculator": ("ProposeRaises", "ObservesNothing", "LoadRefuses", "BindRaisesLater"),
    "attention": ("RunRaises", "BindRaises", "NoNumbers", "OwnPages"),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A package of somebody's, found as if pip had installed it; components are named after their classes."""
    (tmp_path / "planted_parts.py").write_text(PLANTED)
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(
        f"[hotswap.{kind}]\n" + "\n".join(f"{name} = planted_parts:{name}" for name in names)
        for kind, names in POINTS.items()))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("planted_parts", None)


class Hearing(Observer):
    """What observers are told of exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, str, str]] = []
        self.costs: list[tuple[float, int, int]] = []

    @hookimpl
    def hotswap_component_exchanged(
        self, old: str, new: str, problem: str, pause: float, handed_over: int, recomputed: int,
    ) -> None:
        self.heard.append((old, new, problem))
        self.costs.append((pause, handed_over, recomputed))


@pytest.fixture
def loaded(run, tiny, planted):
    """An engine, prompts for it, and the outputs that it gives."""
    engine = run(tiny.config("chunked", "prefix", "none", 2, num_blocks=1 + 6 * 32))
    rng = random.Random(3)
    prompts = [tiny.prompt(rng.randrange(1, 60), rng) for _ in range(10)]
    engine.hearing = Hearing()
    engine.built.components.add(engine.hearing)
    return engine, prompts, engine.generate(prompts, TOKENS)


@pytest.mark.parametrize(("sets", "blamed"), [
    (["scheduler=PlanRaises"], "scheduler 'PlanRaises' raised"),
    (["scheduler=PlansNonsense"], "scheduler 'PlansNonsense' made an invalid plan"),
    (["scheduler=ObserveRaises"], "scheduler 'ObserveRaises' raised"),
    (["kvcache=ReserveRaises"], "kvcache 'ReserveRaises' raised"),
    (["kvcache=CommitRaises"], "kvcache 'CommitRaises' raised"),
    (["kvcache=FenceRaises"], "kvcache 'FenceRaises' raised"),
    (["speculator=ProposeRaises"], "speculator:ProposeRaises made no proposal"),
    (["speculator=ObservesNothing"], "speculator 'ObservesNothing' raised in observe"),
    (["attention=RunRaises"], "attention 'RunRaises' raised"),
    (["attention=RunRaises", "kvcache=radix", "scheduler=Own"], "attention 'RunRaises' raised"),
])
def test_a_part_that_raises_in_its_first_steps_gives_way_again_and_no_request_ends(loaded, sets, blamed, caplog):
    engine, prompts, expected = loaded
    before, labels = engine.built.effective(), [part["name"] for part in engine.built.listing()]

    def exchange() -> str:
        with pytest.raises(ExchangeError) as caught:
            engine.built.exchange(sets)
        return str(caught.value)

    message = engine.under_load(prompts, expected, exchange)
    assert blamed in message
    assert engine.generate(prompts, TOKENS) == expected
    assert engine.built.effective() == before
    assert sorted(part["name"] for part in engine.built.listing()) == sorted(labels)
    assert engine.seen["error"] == engine.seen["abort"] == 0
    assert engine.built.engine.health() is None
    there, back = engine.hearing.heard[:len(sets)], engine.hearing.heard[len(sets):]
    assert [(old, new) for old, new, _ in back] == [(new, old) for old, new, _ in there]
    assert all(blamed in problem for *_, problem in back)
    told = [record for record in caplog.records if "gives way again to" in record.getMessage()]
    assert len(told) == len(sets) and all(
        record.levelname == "ERROR" and blamed in record.getMessage() for record in told)
    engine.assert_clean()


@pytest.mark.parametrize(("sets", "error", "message"), [
    (["kvcache=ConfigureRefuses"], ConfigError, "planted"), (["speculator=LoadRefuses"], ConfigError, "planted"),
    (["kvcache=AdoptRaises"], ExchangeError, "kvcache 'AdoptRaises' raised"),
    (["attention=BindRaises"], ConfigError, "a rehearsal: attention 'BindRaises' raised in bind"),
    (["attention=NoNumbers"], ConfigError, "attention:NoNumbers has given what is no number"),
    (["speculator=BindRaisesLater"], ExchangeError, "speculator 'BindRaisesLater' raised in needs"),
    (["scheduler=AdmitRaises", "kvcache=radix"], ExchangeError, "scheduler 'AdmitRaises' raised"),
    (["kvcache.num_blocks=9"], ConfigError, "needs 33 pages"),
    (["attention=flash"], ConfigError, "FlashAttention needs a CUDA device"),
    (["scheduler=Own", "speculator={use: ngram, max_draft: 99}"], ConfigError, "max_batch_tokens"),
])
def test_what_cannot_be_put_in_place_changes_nothing(loaded, sets, error, message):
    engine, prompts, expected = loaded
    before = engine.built.effective()

    def exchange() -> str:
        with pytest.raises(error) as caught:
            engine.built.exchange(sets)
        return str(caught.value)

    assert message in engine.under_load(prompts, expected, exchange)
    assert engine.built.effective() == before
    assert engine.generate(prompts, TOKENS) == expected
    assert not engine.hearing.heard
    assert engine.seen["error"] == engine.seen["abort"] == 0
    engine.assert_clean()


@pytest.mark.parametrize(("sets", "recomputed"), [
    (["scheduler=Own"], False), (["attention=OwnPages"], True), (["kvcache.num_blocks=150"], True),
    (["kvcache.block_size=8", "kvcache.num_blocks=70"], True), (["kvcache=radix", "scheduler=Own"], False),
])
def test_parts_of_a_stranger_s_package_and_other_sizes_are_exchanged(loaded, sets, recomputed):
    engine, prompts, expected = loaded
    [report] = engine.under_load(prompts, expected, lambda: engine.built.exchange(sets))
    assert report.proven
    assert bool(report.effect.recomputed) is recomputed
    assert engine.generate(prompts, TOKENS) == expected
    assert ("Own" in engine.built.request_options) is ("scheduler=Own" in sets), "what requests may ask of it"
    assert engine.hearing.heard == [(part.old, part.new, "") for part in report.parts]
    effect = report.effect
    assert engine.hearing.costs == [(effect.pause_s, effect.handed_over, effect.recomputed)] * len(report.parts)
    assert effect.pause_s > 0
    for text in sets:
        path, _, value = text.partition("=")
        section, _, key = path.partition(".")
        assert str(engine.built.effective()[section][key or "use"]) == value
    engine.assert_clean()


@pytest.fixture(scope="module")
def noisy(tiny, tmp_path_factory):
    """The tiny model with noise on its weights: a draft model that is often right."""
    model, noise = copy.deepcopy(tiny.reference.model), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.03 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    path = tmp_path_factory.mktemp("noisy-llama")
    model.save_pretrained(path)
    return path


def test_a_draft_model_comes_and_goes(run, tiny, noisy):
    """Its weights are loaded beside serving; its cache group divides the memory anew."""
    engine = run(tiny.config("chunked", "prefix", "none", 2, num_blocks=1 + 6 * 32))
    rng = random.Random(4)
    prompts = [tiny.prompt(rng.randrange(1, 60), rng) for _ in range(10)]
    expected = engine.generate(prompts, TOKENS)
    draft = f"speculator={{use: draft, model: '{noisy}', max_draft: 3}}"

    def exchange() -> list[Any]:
        return [engine.built.exchange(sets)[0] for sets in (
            [draft], ["kvcache=radix"], ["attention={use: composite, prefill: torch, decode: torch}"],
            ["speculator=ngram", "kvcache=prefix"], [draft, "scheduler=static"], ["speculator=none"])]

    reports = engine.under_load(prompts, expected, exchange)
    assert [len(report.parts) for report in reports] == [1, 1, 1, 2, 2, 1]
    assert engine.seen["accepted"] and engine.seen["rejected"]
    assert reports[0].effect.recomputed, "another cache group"
    assert not any(reports[i].effect.handed_over for i in (0, 3, 4, 5)), "other cache groups"
    assert set(engine.built.cache_plan.groups) == {"full"}
    assert engine.generate(prompts, TOKENS) == expected
    engine.assert_clean()
    assert engine.seen["error"] == 0


def test_logprobs_seeds_and_children_go_on_over_an_exchange(run, tiny):
    """What needs state on the worker: random draws, penalties, logprobs of the prompt, prompts that are shared."""
    engine = run(tiny.config("chunked", "prefix", "none", 2, num_blocks=1 + 6 * 32))
    rng = random.Random(5)
    prompt, other = tiny.prompt(50, rng), tiny.prompt(40, rng)
    asked = [
        {"prompt": other, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 7},
        {"prompt": other, "max_tokens": TOKENS, "ignore_eos": True, "repetition_penalty": 1.3, "logprobs": 2},
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "prompt_logprobs": 1},
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True},
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 12},
    ]

    def answers() -> list[Any]:
        children = [{**fields, "fork_of": engine.name(3)} if index == 4 else fields
                    for index, fields in enumerate(asked)]
        return [
            (answer.finish_reason, answer.token_ids,
             pytest.approx([one.logprob for one in answer.logprobs], abs=1e-3),
             pytest.approx([one.logprob if one else 0.0 for one in answer.prompt_logprobs or ()], abs=1e-3))
            for answer in engine.answer(*children)]

    engine.built.engine.reset()
    expected, box = answers(), []
    changes = (["kvcache=contiguous"], ["kvcache=paged"], ["kvcache=prefix", "scheduler=static"],
               ["attention={use: composite, prefill: torch, decode: torch}"], ["scheduler=chunked", "kvcache=radix"])
    thread = threading.Thread(target=lambda: box.extend(engine.built.exchange(sets)[0] for sets in changes * 3))
    thread.start()
    rounds = 0
    while thread.is_alive() or not rounds:
        for found, wanted in zip(answers(), expected, strict=True):
            assert found[:2] == wanted[:2]
            assert found[2].expected == wanted[2]
            assert found[3].expected == wanted[3]
        rounds += 1
    thread.join()
    assert len(box) == 15
    assert sum(report.effect.recomputed for report in box)
    assert sum(report.effect.handed_over for report in box)
    engine.assert_clean()


def test_engines_exchange_one_after_the_other_or_one_alone(deploy, tiny, planted):
    config = tiny.config("chunked", "prefix", "none", 1, parallel=[{"use": "data", "replicas": 2}])
    deployed = deploy(config)
    rng = random.Random(6)
    prompts = [tiny.prompt(rng.randrange(1, 60), rng) for _ in range(8)]
    expected = deployed.generate(prompts, TOKENS)
    boxes = deployed.submit(prompts, TOKENS)
    reports = deployed.built.exchange(["kvcache=radix", "scheduler.policy=priority"])
    assert [answer.token_ids for answer in deployed.wait(boxes)] == expected
    assert [report.replica for report in reports] == ["0", "1"]
    assert not deployed.built.deviations()
    [alone] = deployed.built.exchange(["scheduler=continuous"], "1")
    assert alone.replica == "1"
    uses = {name: config["scheduler"]["use"] for name, config in deployed.built.deviations().items()}
    assert uses == {"1": "continuous"}
    assert deployed.built.effective()["scheduler"]["use"] == "chunked"
    with pytest.raises(ConfigError, match="there is no engine '7'; there are '0', '1'"):
        deployed.built.exchange(["scheduler=continuous"], "7")
    deployed.built.exchange(["scheduler=continuous"])
    assert not deployed.built.deviations(), "the one that had it already stays as it is"
    assert deployed.generate(prompts, TOKENS) == expected
    deployed.assert_clean()


def test_the_host_tier_lives_through_an_exchange(run, tiny):
    engine = run(tiny.config(
        "chunked", "prefix", "none", 2, kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": 0}))
    prompts = tiny.prompts()
    expected = engine.generate(prompts, TOKENS)
    reports = engine.under_load(prompts, expected, lambda: [
        engine.built.exchange(sets)[0] for sets in (["kvcache=radix"], ["scheduler=prefill_first"], ["kvcache=prefix"],
                                                    ["speculator=ngram"], ["kvcache.eviction=fifo"])])
    assert all(report.effect.recomputed == 0 for report in reports)
    assert engine.built.engine.loads().extra["kv_transfer"]["swaps_out"]
    with pytest.raises(ConfigError, match="pages would lie elsewhere than kv_transfer:host has told others"):
        engine.built.exchange(["kvcache.num_blocks=60"])
    assert engine.generate(prompts, TOKENS) == expected
    engine.assert_clean()


def test_every_rank_exchanges_its_parts(run, tiny, noisy):
    """Two tensor ranks: parts of workers are prepared, put in place and taken back on both, or on none."""
    engine = run(tiny.config("chunked", "prefix", "none", 1, parallel=[{"use": "tensor", "size": 2}]))
    prompts = tiny.prompts()
    expected = engine.generate(prompts, TOKENS)
    changes = (
        ["kvcache=radix", "scheduler=continuous"], ["attention={use: composite, prefill: torch, decode: torch}"],
        ["speculator=ngram"], ["kvcache.num_blocks=70"],
        [f"speculator={{use: draft, model: '{noisy}', max_draft: 2}}", "attention=torch"], ["speculator=none"])
    reports = engine.under_load(
        prompts, expected, lambda: [engine.built.exchange(sets)[0] for sets in changes])
    assert all(report.parts for report in reports)
    assert engine.seen["accepted"]
    with pytest.raises(ConfigError, match="none was found|no checkpoint|there is no") as caught:
        engine.built.exchange(["speculator={use: draft, model: /no/such/model}"])
    assert caught.value.path.startswith("speculator")
    assert engine.generate(prompts, TOKENS) == expected
    assert engine.built.engine.health() is None
    engine.assert_clean()


def test_stages_exchange_and_hear_no_token_twice(run, tiny):
    engine = run(tiny.config("chunked", "prefix", "ngram", 2, parallel=[{"use": "pipeline", "size": 2}]))
    prompts = tiny.prompts()
    expected = engine.generate(prompts, TOKENS)
    changes = (["kvcache=radix"], ["attention={use: composite, prefill: torch, decode: torch}"], ["speculator=none"],
               ["kvcache=contiguous", "kvcache.num_blocks=129"], ["speculator=ngram", "kvcache=prefix"])
    reports = engine.under_load(
        prompts, expected, lambda: [engine.built.exchange(sets)[0] for sets in changes])
    assert all(report.parts for report in reports)
    with pytest.raises(ConfigError, match="stages"):
        engine.built.exchange(["speculator={use: draft, model: nowhere}"])
    assert engine.generate(prompts, TOKENS) == expected
    engine.assert_clean()


def test_two_hundred_exchanges_leave_nothing_behind(run, tiny, planted, monkeypatch, request):
    """As many caches, tables and components live afterwards as before, those of parts that were taken back included."""
    monkeypatch.setattr(exchange_module, "IDLE_S", 0.0)
    engine = run(tiny.config("chunked", "prefix", "none", 2, attention="torch"))
    prompts = tiny.prompts()
    expected = engine.generate(prompts, 8)

    def alive() -> Counter[str]:
        kinds = (PagedCache, RequestTable, ModelRunner, Component, Trial, EngineExchange, threading.Thread)
        return Counter(type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), kinds))

    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    before = alive()
    for number in range(40):
        for sets in (["scheduler=continuous", "kvcache=radix"], ["speculator=ngram"], [
                "attention={use: composite, prefill: torch, decode: torch}"], ["kvcache.num_blocks=60"]):
            engine.built.exchange(sets)
        engine.built.exchange(["scheduler=chunked", "kvcache=prefix", "kvcache.num_blocks=45", "speculator=none",
                               "attention=torch"])
        if number % 10 == 0:
            with pytest.raises(ConfigError):
                engine.built.exchange(["attention=NoNumbers"])
            assert engine.generate(prompts, 8) == expected
    assert engine.generate(prompts, 8) == expected, "which settles the last one"
    assert set(alive() - before) == {"LeastRecentlyUsed"}, "a trie knows its parents, and has one: the only ring"
    gc.collect()
    assert not alive() - before
    engine.assert_clean()


def test_both_roles_exchange_while_pages_travel_between_them(deploy, tiny):
    """Pages that a peer reads are waited for; managers that keep them may be exchanged, others may not."""
    parallel = [{"use": "disaggregated", "prefill": 1, "decode": 1}]
    deployed = deploy(tiny.config("chunked", "prefix", "none", 2, parallel=parallel, kv_transfer="shm"))
    prompts = tiny.prompts()
    expected = deployed.generate(prompts, TOKENS)
    for sets in (["kvcache=radix"], ["scheduler=continuous"], ["kvcache=prefix", "speculator=ngram"]):
        boxes = deployed.submit(prompts, TOKENS)
        reports = deployed.built.exchange(sets)
        assert [report.replica for report in reports] == ["prefill0", "decode0"]
        assert [answer.token_ids for answer in deployed.wait(boxes)] == expected
    with pytest.raises(ConfigError, match="pages would lie elsewhere than kv_transfer:shm has told others"):
        deployed.built.exchange(["kvcache.num_blocks=77"])
    assert deployed.generate(prompts, TOKENS) == expected
    assert all(seen["error"] == 0 for seen in deployed.seen)
    deployed.assert_clean()


def test_what_was_prepared_for_an_exchange_that_failed_is_not_put_in_place_by_the_next(loaded, monkeypatch):
    engine, prompts, expected = loaded

    def late(loop: Any) -> float:
        raise ExchangeError("a transfer of pages did not end")

    with monkeypatch.context() as patch:
        patch.setattr(switch_module, "drain", late)
        with pytest.raises(ExchangeError, match="did not end"):
            engine.built.exchange(["attention=RunRaises"])
    [report] = engine.under_load(prompts, expected, lambda: engine.built.exchange(["kvcache.num_blocks=150"]))
    assert report.proven
    assert engine.generate(prompts, TOKENS) == expected
    engine.assert_clean()


@pytest.mark.parametrize("fails", [False, True])
def test_an_exchange_that_took_too_long_is_left_to_the_loop_and_no_other_begins_before_its_end(
    loaded, monkeypatch, caplog, fails,
):
    engine, prompts, expected = loaded
    built, [one] = engine.built, engine.built.engines
    executor, held, go = one.made.parts.executor, threading.Event(), threading.Event()
    drain, prepare, asked = switch_module.drain, executor.prepare, list[list[str]]()

    def slow(loop: Any) -> float:
        held.set()
        assert go.wait(30)
        if fails:
            raise ExchangeError("a transfer of pages did not end")
        return drain(loop)

    monkeypatch.setattr(executor, "prepare", lambda parts: (asked.append([*parts]), prepare(parts))[1])
    with monkeypatch.context() as patch:
        patch.setattr(switch_module, "drain", slow)
        patch.setattr(client_module, "wait", lambda answers, timeout: held.wait(30))
        with pytest.raises(ExchangeError, match="though it has begun with it; what it comes to is logged"):
            built.exchange(["attention={use: composite, prefill: torch, decode: torch}"])
    try:
        for sets in (["attention=OwnPages"], ["scheduler=Own"]):
            with pytest.raises(ExchangeUnderWayError, match="an exchange that took too long is still under way"):
                built.exchange(sets)
        assert asked == [["attention"]], "nothing was taken away from the loop, and nothing put in its place"
    finally:
        go.set()
    until = time.monotonic() + 30
    while one.exchanging:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert (built.effective()["attention"]["use"] == "composite") is not fails
    assert asked[1:] == ([[]] if fails else []), "what was prepared is let go where it is not put in place"
    assert ("an exchange that took too long has failed: " in caplog.text) is fails
    assert engine.generate(prompts, TOKENS) == expected
    [report] = built.exchange(["attention=OwnPages"])
    assert report.parts
    assert engine.generate(prompts, TOKENS) == expected
    engine.assert_clean()


def test_the_cache_keeps_its_bytes_whatever_is_free_during_an_exchange(run, tiny, noisy, monkeypatch):
    free = [1 << 40]
    monkeypatch.setattr(worker_module, "free_bytes", lambda device: free[0])
    config = tiny.config("chunked", "prefix", "none", 1)
    config["kvcache"].pop("num_blocks", None)
    whole = run(config).built.cache_plan.groups["full"].num_pages
    monkeypatch.setattr(assembly_module, "cache_room", scarce(assembly_module.cache_room))
    monkeypatch.setattr(exchange_module, "cache_room", assembly_module.cache_room)
    engine = run(config)
    begun = engine.built.cache_plan
    assert begun.groups["full"].num_pages < whole
    for percent in (50, 300):
        free[0] = (1 << 40) * percent // 100
        for speculator in ("ngram", "none"):
            [report] = engine.built.exchange([f"speculator={speculator}"])
            assert engine.built.cache_plan == begun
            assert report.effect.recomputed == 0
    [report] = engine.built.exchange([f"speculator={{use: draft, model: '{noisy}', max_draft: 3}}"])
    assert engine.built.cache_plan.groups["full"].num_pages < begun.groups["full"].num_pages
    engine.built.exchange(["speculator=none"])
    assert engine.built.cache_plan == begun
    engine.assert_clean()


def scarce(room: Any) -> Any:
    """``cache_room`` where what is free at the start is half of what could ever be used."""
    begun: list[float] = []

    def bounded(config: Any, info: Any, max_model_len: int) -> Any:
        whole = room(config, info, max_model_len)
        begun.append(whole.num_bytes / 2 / info.free_bytes)
        return replace(whole, num_bytes=int(begun[0] * info.free_bytes))

    return bounded


def test_a_trial_that_fails_after_the_answer_takes_back_what_requests_may_ask(run, tiny, planted, monkeypatch):
    monkeypatch.setattr(exchange_module, "IDLE_S", 0.0)
    engine = run(tiny.config("chunked", "prefix", "none", 1))
    prompts = tiny.prompts()
    expected = engine.generate(prompts, 8)
    [report] = engine.built.exchange(["scheduler=Own", "kvcache=ReserveRaises"])
    assert not report.proven
    assert "Own" in engine.built.request_options
    assert engine.generate(prompts, 8) == expected
    assert engine.built.effective()["scheduler"]["use"] == "chunked"
    assert "Own" not in engine.built.request_options


def test_what_requests_may_ask_of_a_part_is_known_while_one_of_the_same_name_takes_its_place(
    run, tiny, planted, monkeypatch,
):
    monkeypatch.setattr(exchange_module, "IDLE_S", 0.0)
    built = run(tiny.config("chunked", "prefix", "none", 1)).built
    built.exchange(["scheduler=Own"])
    hub, seen = built.components.observers, list[bool]()
    forget = hub.forget
    monkeypatch.setattr(hub, "forget", lambda label: (forget(label), seen.append("Own" in built.request_options)))
    built.exchange(["scheduler.policy=priority"])
    assert seen and all(seen)


def test_a_request_that_leaves_itself_no_token_takes_no_part_back(loaded, monkeypatch):
    monkeypatch.setattr(exchange_module, "IDLE_S", 0.0)
    engine, prompts, expected = loaded
    [report] = engine.built.exchange(["attention={use: composite, prefill: torch, decode: torch}"])
    assert not report.proven
    fine = [{"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True} for prompt in prompts]
    *answers, bad = engine.answer(*fine, {
        "prompt": prompts[0], "max_tokens": 9, "min_tokens": 5, "allowed_token_ids": [7], "stop_token_ids": [7]})
    assert "no token is left to choose" in bad.error
    assert [answer.token_ids for answer in answers] == expected
    assert engine.built.effective()["attention"]["use"] == "composite"
    assert [problem for *_, problem in engine.hearing.heard] == [""]
    engine.assert_clean()
