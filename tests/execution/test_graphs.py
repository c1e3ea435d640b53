"""Captured steps, on a stand-in that records operations on addresses and replays them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hotswap.core.config.schema import Config
from hotswap.core.errors import ConfigError
from hotswap.core.execution import graphs, worker
from hotswap.core.execution.graphs import choose_keys, default_sizes, reserve_bytes
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.static import GraphKey, StaticBatch
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.attention import AttentionSupport, GraphLevel
from hotswap.core.interfaces.kv_transfer import TransferWorker
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.testing.graphs import ReadBackError, RecordingGraphs, StaleMemoryError
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.speculators.none import NoSpeculator

MAX_LEN = 160
KEYS = (GraphKey(1, 1), GraphKey(2, 1), GraphKey(4, 1))
VERIFY = (*KEYS, GraphKey(2, 4), GraphKey(4, 4))


@pytest.fixture
def make(model, make_host_of, monkeypatch):
    """``make(keys)`` gives a host whose worker has captured ``keys``; ``host.events`` counts what its steps told."""
    monkeypatch.setitem(graphs.DEVICES, "cpu", RecordingGraphs)

    def build(keys=KEYS, speculator=None, attention=TorchAttention, page_size=4, num_pages=200, max_running=4):
        settings = WorkerSettings("float32", "cpu", MAX_LEN, 256, max_running, graphs=keys)
        backend = attention(attention.Options(graphs=True))
        made = ModelWorker(
            model, model.facts({}), backend, speculator or NoSpeculator(), (), settings, lambda: 0.0)
        host = make_host_of(made, page_size, num_pages)
        host.graphs = made._runner.graphs
        return host

    return build


def decode(host, requests, count):
    """``count`` steps in which every request of ``requests`` gets a token."""
    for _ in range(count):
        for request in requests:
            host.row(request)
        for row in host.step().values():
            assert row.error is None, row.error


def outputs(host, prompts, count):
    """Each prompt's next tokens, all decoded together."""
    for name, prompt in prompts.items():
        host.new(name, prompt)
        host.prefill(name)
    decode(host, prompts, count - 1)
    return {name: host.tokens[name][len(prompt) :] for name, prompt in prompts.items()}


def expected(reference, prompts, count):
    return {name: reference.greedy(prompt, count) for name, prompt in prompts.items()}


def check_lengths(make, reference):
    """Texts that begin around a page's end, and one that grows to the greatest length."""
    random = torch.Generator().manual_seed(1)
    lengths = {"one": 1, "page": 4, "more": 5, "long": MAX_LEN - 9}
    prompts = {name: torch.randint(0, 60, (length,), generator=random).tolist() for name, length in lengths.items()}
    host = make()
    assert outputs(host, prompts, 9) == expected(reference, prompts, 9)
    assert host.graphs.counts.totals["graph_replays"] == 1 + 8  # the prompt of one token, too


def test_texts_around_a_pages_end_and_up_to_the_limit_get_their_tokens(make, reference):
    check_lengths(make, reference)


class NarrowTable(StaticBatch):
    """One column too few."""

    def fill(self, key, slots, lengths, past):
        super().fill(key, slots, lengths, past)
        for table in self.page_tables.values():
            table[:, -2:] = 0


def test_a_table_that_is_too_narrow_is_caught(make, reference, monkeypatch):
    monkeypatch.setattr(graphs, "StaticBatch", NarrowTable)
    with pytest.raises(AssertionError):
        check_lengths(make, reference)


def check_poison(make, reference, prompts):
    """Three rows in a graph of four, its tensors full of garbage before each step."""
    three = {name: prompts[name] for name in "abe"}
    host = make(keys=(GraphKey(4, 1),))
    batch = host.graphs._batch
    for name, prompt in three.items():
        host.new(name, prompt)
        host.prefill(name)
    for _ in range(5):
        for tensor in (batch.inputs, batch.positions, batch.kv_lens, *batch.page_tables.values(),
                       *batch.slots.values()):
            tensor.fill_(1 << 20)
        decode(host, three, 1)
    found = {name: host.tokens[name][len(prompt) :] for name, prompt in three.items()}
    assert host.graphs.counts.totals["graph_replays"] >= 5
    assert found == expected(reference, three, 6)


def test_whatever_lay_in_the_static_tensors_is_overwritten(make, reference, prompts):
    check_poison(make, reference, prompts)


class StaleRows(StaticBatch):
    """Leaves padding rows as they were."""

    def fill(self, key, slots, lengths, past):
        tensors = [self.inputs, self.positions, self.kv_lens, *self.page_tables.values(), *self.slots.values()]
        before = [tensor.clone() for tensor in tensors]
        super().fill(key, slots, lengths, past)
        if len(slots):  # not at the capture
            for tensor, old in zip(tensors, before, strict=True):
                tensor[len(slots) * key.queries :] = old[len(slots) * key.queries :]


def test_a_row_of_an_earlier_replay_that_is_still_visible_is_caught(make, reference, prompts, monkeypatch):
    monkeypatch.setattr(graphs, "StaticBatch", StaleRows)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_poison(make, reference, prompts)


def check_pages(make, prompts, script):
    """Pages of others, and the tokens that a row has computed before, keep every byte while rows are filled up."""
    host = make(VERIFY, script(lambda request, tokens, slots: [7][:slots]))
    for name in "cde":
        host.new(name, prompts[name])
        host.prefill(name)
    layers = host.worker._runner._cache._layers.values()
    before = [tensor.clone() for layer in layers for tensor in layer.cache]
    written = {group: set() for group in host.free}
    replays = host.graphs.counts.totals["graph_replays"]
    for name, drafts in (("d", 1), ("e", 0)):  # "c" does not run; a draft makes rows of four tokens
        first = host.bound[name]
        host.row(name, 1, drafts)
        for group, table in host.tables[name].items():
            written[group] |= {(table[at // host.page_size], at % host.page_size) for at in range(first, first + 2)}
    for row in host.step().values():
        assert row.error is None, row.error
    assert host.graphs.counts.totals["graph_replays"] == replays + 1
    after = [(group, tensor) for group, layer in zip(host.free, layers, strict=True) for tensor in layer.cache]
    for (group, tensor), old in zip(after, before, strict=True):
        pages, slots = (old != tensor).any(-1).any(1).nonzero(as_tuple=True)
        changed = {(page, slot) for page, slot in zip(pages.tolist(), slots.tolist(), strict=True) if page}
        assert changed <= written[group], f"{changed - written[group]} of {group} were written"
        assert changed


def test_filling_rows_up_writes_no_page_of_a_request(make, prompts, script):
    check_pages(make, prompts, script)


class DummyInUse(StaticBatch):
    """Padding goes to page 2."""

    def _pages(self, group):
        source = super()._pages(group)
        return SimpleNamespace(pages=source.pages, page_size=source.page_size, dummy_page=2)


def test_padding_that_writes_into_a_real_page_is_caught(make, prompts, script, monkeypatch):
    monkeypatch.setattr(graphs, "StaticBatch", DummyInUse)
    with pytest.raises(AssertionError, match="were written"):
        check_pages(make, prompts, script)


class NewBuffers(TorchAttention):
    """Plans each captured step in new tensors."""

    def plan(self, state, layout):
        state.static.clear()
        super().plan(state, layout)


def test_a_buffer_that_is_allocated_again_after_the_capture_is_caught(make, prompts):
    host = make(attention=NewBuffers)
    host.new("a", prompts["a"])
    host.prefill("a")
    host.row("a")
    verdict = host.worker.execute(host.take())
    assert "StaleMemoryError" in verdict.error
    assert "freed" in verdict.error


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_rows_with_different_numbers_of_drafts_share_a_graph(make, reference, prompts, script, accepted):
    truth = {name: prompt + reference.greedy(prompt, 25) for name, prompt in prompts.items()}
    turn = itertools.count()

    def plan(request, tokens, slots):
        count = next(turn) % (slots + 1)  # from none to all of them
        right = truth[request][len(tokens) : len(tokens) + min(accepted, count)]
        return (right + [1] * count)[:count]

    host = make(VERIFY, script(plan))
    names = "bcde"
    for name in names:
        host.new(name, prompts[name])
        host.prefill(name)
    before = host.graphs.counts.totals["graph_replays"]
    for _ in range(6):
        for name in names:
            host.row(name, 1, 3)
        host.step()
    for name in names:
        assert host.tokens[name] == truth[name][: len(host.tokens[name])]
    assert sum(row.accepted for verdict in host.verdicts for row in verdict.rows) > 0 or not accepted
    assert host.graphs.counts.totals["graph_replays"] == before + 6


def test_a_request_of_nan_harms_no_neighbour_in_its_graph(make, reference, prompts, script, poison):
    host = make(VERIFY, script(lambda request, tokens, slots: [5][: slots if request == "e" else 0]))
    host.new("nan", [3, 4, 5, poison])
    host.row("nan", 3)  # the last token, which is NaN, is computed in the graph
    host.step()
    for name in "de":
        host.new(name, prompts[name])
        host.prefill(name)
    host.row("nan", 1)
    for name in "de":
        host.row(name, 1, 1)
    rows = host.step()
    assert rows["nan"].error is not None
    for name in "de":
        assert rows[name].error is None
        assert host.tokens[name] == prompts[name] + reference.greedy(prompts[name], 2 + rows[name].accepted)
    host.drop("nan")
    for _ in range(3):
        for name in "de":
            host.row(name, 1, 1)
        host.step()
    for name in "de":
        got = host.tokens[name]
        assert got == prompts[name] + reference.greedy(prompts[name], len(got) - len(prompts[name]))
    assert host.graphs.counts.totals["graph_replays"] >= 4


def test_each_eager_step_is_counted_with_its_reason(make, prompts, script):
    host = make((GraphKey(2, 1), GraphKey(2, 4)), script(lambda request, tokens, slots: [1, 2, 3][:slots]))
    host.new("e", prompts["e"])
    host.prefill("e")
    assert host.graphs.counts.totals == {"graph_captures": 2, "eager_long_rows": 1}
    assert host.verdicts[-1].counts == {"graph_captures": 2, "eager_long_rows": 1}
    for name in "ab":
        host.new(name, prompts[name])
    host.row("a", 2)
    host.step()
    assert host.verdicts[-1].counts == {"eager_short_texts": 1}
    host.prefill("a")
    host.prefill("b")
    for name in "abe":
        host.row(name)
    host.step()
    assert host.verdicts[-1].counts == {"eager_many_rows": 1}
    for name in "be":
        host.row(name)
    host.step()
    assert host.verdicts[-1].counts == {"graph_replays": 1}


def test_a_row_that_would_be_filled_up_with_lost_pages_runs_eagerly(make, reference, prompts, script):
    host = make((GraphKey(1, 4),), script(lambda request, tokens, slots: []))
    host.new("e", prompts["e"])
    host.prefill("e")
    # The window is 6: the query at 37 sees 32 to 37, those before it pages that are given back now.
    table = host.worker._runner._table.tables["window"]
    slot = host.worker._runner._table.get("e").slot
    table.pages[slot, : 32 // 4] = 0
    host.row("e")
    host.step()
    assert host.verdicts[-1].counts == {"eager_lost_pages": 1}
    assert host.tokens["e"] == prompts["e"] + reference.greedy(prompts["e"], 2)


def test_the_first_of_two_steps_in_flight_keeps_its_results(make, prompts):
    host = make()
    for name in "ab":
        host.new(name, prompts[name])
        host.prefill(name)
    table, found = host.worker._runner._table, host.graphs
    slots = np.array([table.get(name).slot for name in "ab"])
    ones, past = np.ones(2, np.int64), table.computed[slots]
    for name in "ab":
        host.grant(name, host.bound[name] + 1)
    host.step()
    with torch.inference_mode():
        key = found.find(slots, ones, past)
        found.prepare(key, slots, ones, past)
        [first] = found.replay(key, ones)
        kept = first.clone()
        found.prepare(key, slots[::-1].copy(), ones, past[::-1].copy())
        [second] = found.replay(key, ones)
    assert torch.equal(first, kept)
    assert torch.allclose(second, kept.flip(0), atol=1e-5)


# What is chosen


class Graphable:
    """Stands for an attention backend."""

    def __init__(self, level=GraphLevel.UNIFORM, device=None):
        self.level, self.label, self.device = level, "kind:name", device

    def graph_device(self, device):
        return self.device

    def support(self):
        return AttentionSupport(graph_level=self.level)


def choose(
        graphs="auto", sizes=None, device="cuda:0", level=GraphLevel.UNIFORM, capturable=("bfloat16",), lookahead=0,
        ranks=1, brought=None):
    notes = []
    config = Config(
        model="m", scheduler={"max_running": 6, "max_batch_tokens": 20},
        execution={"graphs": graphs, "batch_sizes": sizes})
    facts = ModelFacts("TinyForCausalLM", 2, 8, 16, 32, capturable=capturable)
    return choose_keys(config, device, "bfloat16", Graphable(level, brought), facts, lookahead, ranks, notes), notes


@pytest.mark.parametrize(("changes", "reason"), [
    ({"device": "cpu"}, "the device is cpu, and graphs need cuda"),
    ({"level": GraphLevel.NEVER}, "kind:name does not say"),
    ({"capturable": ()}, "TinyForCausalLM does not say"),
    ({"capturable": ("float32",)}, "TinyForCausalLM does not say that its steps may be captured in bfloat16"),
    ({"ranks": 2}, "2 ranks"),
])
def test_what_cannot_be_captured_is_eager_with_a_note_or_refused(changes, reason):
    keys, [note] = choose(**changes)
    assert keys == ()
    assert note.startswith("graphs: off (auto: ")
    assert reason in note
    with pytest.raises(ConfigError, match=reason) as caught:
        choose("full", **changes)
    assert caught.value.path == "execution.graphs"
    assert choose("off", **changes) == ((), [])


def test_auto_says_what_it_captures():
    keys, [note] = choose(lookahead=3)
    assert keys == tuple(GraphKey(rows, m) for m, sizes in ((1, (1, 2, 4, 6)), (4, (1, 2, 4, 5))) for rows in sizes)
    assert "8 steps of up to 6 rows of 1 or 4 tokens" in note


def test_a_backend_may_bring_along_what_records_and_then_steps_are_recorded_as_they_come():
    class Quick(RecordingGraphs):
        on_demand = True

    keys, [note] = choose(device="cpu", lookahead=3, brought=Quick())
    assert keys == (GraphKey(20, 1),)
    assert note == (
        "graphs: steps of up to 20 tokens are recorded when as many come again "
        "(auto: kind:name and TinyForCausalLM allow it)")
    assert choose(device="cpu", sizes=[1, 4], brought=Quick())[0] == (GraphKey(4, 1),)
    assert choose(device="cpu", brought=RecordingGraphs())[0] == choose()[0]


def test_one_token_a_row_is_all_that_some_backends_allow():
    assert {key.queries for key in choose(lookahead=3, level=GraphLevel.ONE_TOKEN)[0]} == {1}


def test_no_batch_is_captured_that_no_step_could_have():
    assert choose(sizes=[6, 1], lookahead=3)[0] == (GraphKey(6, 1), GraphKey(1, 1), GraphKey(1, 4))
    with pytest.raises(ConfigError, match="no step has 7 rows, with scheduler.max_running 6") as caught:
        choose(sizes=[1, 7])
    assert caught.value.path == "execution.batch_sizes"


@pytest.mark.parametrize(("section", "problem"), [
    ({"graphs": "off", "batch_sizes": [1]}, "keep one"),
    ({"batch_sizes": [4, 4]}, "twice"),
    ({"batch_sizes": []}, "at least 1"),
    ({"batch_sizes": [0]}, "greater than or equal to 1"),
    ({"graphs": "on"}, "'auto', 'full' or 'off'"),
])
def test_a_bad_section_is_refused(section, problem):
    with pytest.raises(ValueError, match=problem):
        Config(model="m", execution=section)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 20, 24, 100, 256])
def test_the_default_sizes_end_at_the_most_and_leave_little_padding(most):
    sizes = default_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(17, most + 1):
        captured = next(size for size in sizes if size >= rows)
        assert (captured - rows) / captured <= 1 / 3


# Memory


def test_memory_of_graphs_is_set_aside_before_pages_are_divided(model, monkeypatch):
    monkeypatch.setitem(graphs.DEVICES, "cpu", RecordingGraphs)
    monkeypatch.setattr(worker, "free_bytes", lambda device: 10 << 30)

    def free(keys):
        settings = WorkerSettings("float32", "cpu", MAX_LEN, 256, 4, graphs=keys)
        return ModelWorker(
            model, model.facts({}), TorchAttention(), NoSpeculator(), (), settings, lambda: 0.0).info().free_bytes

    per_token = 20 * 32 * 4
    assert free(()) - free(KEYS) == reserve_bytes(RecordingGraphs(), KEYS, 2, per_token) > 4 * per_token


def test_a_capture_without_memory_says_what_to_lower(make, monkeypatch):
    class Full(RecordingGraphs):
        def capture(self, run):
            if len(self.graphs) == 2:
                raise torch.OutOfMemoryError("planted")
            return super().capture(run)

    monkeypatch.setattr(worker, "capturing_device", lambda device, attention: Full(device))
    with pytest.raises(ConfigError, match="memory ended after 2 of 3 graphs: .* MiB were free, .*kvcache.memory"):
        make()


# The stand-in


def test_a_replay_reads_what_is_there_now_and_runs_no_python():
    device, calls = RecordingGraphs(), []
    x, weight, out = torch.zeros(2, 4), torch.randn(4, 4), torch.zeros(2, 4)

    def run():
        calls.append(1)
        y = torch.nn.functional.linear(x, weight).softmax(-1).reshape(4, 2).view(2, 4) + len(calls)
        z = torch.empty_like(y)
        torch.mul(y, 2, out=z)
        z.chunk(2, -1)[0].add_(1)
        out.copy_(z)

    with torch.inference_mode():
        replay = device.capture(run)
        assert len(calls) == 2
        x.copy_(torch.randn(2, 4))
        replay()
        wanted = (torch.nn.functional.linear(x, weight).softmax(-1) + 2) * 2  # the second call is what was recorded
        wanted[:, :2] += 1
    assert torch.allclose(out, wanted)
    assert len(calls) == 2


def test_the_stand_in_refuses_memory_that_was_freed():
    device, out = RecordingGraphs(), torch.zeros(3)
    owner = [torch.ones(3)]
    replay = device.capture(lambda: out.copy_(owner[0]).neg_())
    replay()
    assert out.tolist() == [-1, -1, -1]
    owner.clear()
    with pytest.raises(StaleMemoryError, match=r"\[3\] of torch.float32 that has been freed"):
        replay()


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: bool(x.any()),
                                  lambda x: x[x > 0]])
def test_the_stand_in_refuses_what_waits_for_the_device(read):
    with torch.inference_mode(), pytest.raises(ReadBackError):
        RecordingGraphs().capture(lambda: read(torch.ones(2)))


def test_what_a_capture_leaves_in_its_own_memory_is_of_no_use():
    leaked = []
    replay = RecordingGraphs().capture(lambda: leaked.append(torch.ones(2) * 3))
    assert leaked[1].isnan().all()
    replay()
    assert leaked[1].isnan().all()


# For speculators


def test_a_speculator_can_capture_where_graphs_are_on(make, make_host, script):
    bound = []

    class Binding(script):
        def bind(self, services):
            bound.append(services.capture)

    make(KEYS, Binding(lambda *_: []))
    make_host(speculator=Binding(lambda *_: []))
    counter = torch.zeros(1)
    replay = bound[0](lambda: counter.add_(1))
    assert counter == 2  # warmed up, and run as it was recorded: on a real device recording runs nothing
    replay()
    assert counter == 3
    assert bound[1] is None


class Layerwise(TransferWorker):
    """Moves pages between the layers of a step."""

    layerwise = True

    def register(self, cache, terms): ...

    def begin(self, message): ...

    def report(self, wait_s):
        return []


def test_a_transfer_between_layers_leaves_steps_eager_or_is_refused(model, monkeypatch, caplog):
    monkeypatch.setitem(graphs.DEVICES, "cpu", RecordingGraphs)

    def build(**settings):
        return ModelWorker(
            model, model.facts({}), TorchAttention(), NoSpeculator(), (),
            WorkerSettings("float32", "cpu", MAX_LEN, 256, 4, graphs=KEYS, **settings), lambda: 0.0,
            transfer=Layerwise())

    assert build()._placed.device is None
    assert "graphs: off after all, since the KV transfer works between the layers" in caplog.text
    with pytest.raises(ConfigError, match="'full' was asked for, but the KV transfer") as caught:
        build(needs_graphs=True)
    assert caught.value.path == "execution.graphs"
