"""The cpu backend passes the kit, gives equal bits with any neighbours and threads, and shares its pages."""

import threading

import numpy as np
import pytest
import torch

from hotswap.core.engine.exchange import shares_pages
from hotswap.core.errors import ConfigError
from hotswap.core.execution.layout import batch_layout
from hotswap.core.interfaces.attention import BatchLimits, GroupShape
from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention
from hotswap.plugins.attention.composite import CompositeAttention
from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.cpu import attention_words as w
from hotswap.plugins.cpu import team

LONG = ((1, 700), (1, 511), (1, 512), (2, 1100), (40, 1300), (1, 3))
"""Rows whose keys are divided into several parts, and rows at the edges of a part."""


@pytest.fixture(autouse=True)
def threads():
    """More than a test needs; the answer is not to depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [
    *attention_cases(CPUAttention().support()),
    AttentionCase("parts", rows=LONG, heads=3, kv_heads=1),
    AttentionCase("parts, bfloat16", rows=LONG, heads=3, kv_heads=1, dtype="bfloat16"),
    AttentionCase("parts behind a window", rows=LONG, heads=2, kv_heads=1, window=300),
    *(AttentionCase(f"a small last tile, {dtype}", rows=((33, 1000), (66, 230)), heads=3, kv_heads=1, dtype=dtype)
      for dtype in ("float32", "bfloat16")),
    AttentionCase("greater parts, and none", rows=((70, 5500), (1, 3), (1100, 0)), heads=3, kv_heads=1),
    AttentionCase("more heads a key than a short row has", rows=LONG[:4], heads=16, kv_heads=1, head_dim=32),
    *(AttentionCase(f"head dim {dim}, {dtype}", head_dim=dim, dtype=dtype, heads=2, kv_heads=1,
                    rows=((1, 30), (17, 20), (2, 33)))
      for dim in (1, 8, 20, 72, 100) for dtype in ("float32", "bfloat16", "float16")),
    *(AttentionCase(f"page size {size}", page_size=size, heads=2, kv_heads=2) for size in (3, 128)),
    *(AttentionCase(f"{heads} heads a key", heads=heads, kv_heads=1, head_dim=16, rows=((1, 30), (3, 9), (1, 0)))
      for heads in (2, 4, 5, 7, 9)),
], ids=str)
def test_agrees_with_dense_attention(case):
    check_attention(CPUAttention(), case)


class Batch:
    """Rows of (queries, past) over random pages, of which any may be asked, in any order."""

    def __init__(self, rows, dtype="bfloat16", page_size=16, dims=64):
        self.rows, self.page_size, self.dtype = rows, page_size, getattr(torch, dtype)
        self.shape = GroupShape(6, 2, dims, page_size, 0.125)
        counts = [-(-(queries + past) // page_size) for queries, past in rows]
        self.tables = np.zeros((len(rows), max(counts)), np.int32)
        pages = np.random.default_rng(0).permutation(sum(counts)) + 1
        for row, count in enumerate(counts):
            self.tables[row, :count], pages = pages[:count], pages[count:]
        random = torch.Generator().manual_seed(0)
        self.cache = tuple(
            torch.randn(1 + sum(counts), 2, page_size, dims, generator=random).to(self.dtype) for _ in range(2))
        self.inputs = [
            [torch.randn(queries, heads, dims, generator=random).to(self.dtype) for heads in (6, 2, 2)]
            for queries, _ in rows]
        self.limits = BatchLimits(sum(queries for queries, _ in rows), len(rows), max(counts), "cpu", dtype)

    def bind(self):
        return CPUAttention().bind("group", self.shape, self.limits)

    def attend(self, state, order):
        """The outputs of the rows in ``order``."""
        queries, past = (np.array(column) for column in zip(*(self.rows[i] for i in order), strict=True))
        tables = self.tables[list(order)]
        q, k, v = (torch.cat(tensors) for tensors in zip(*(self.inputs[i] for i in order), strict=True))
        out = torch.full_like(q, float("nan"))
        backend = CPUAttention()
        backend.plan(state, batch_layout(queries, past, {"group": (tables, self.page_size)}, "cpu"))
        backend.run(state, q, k, v, self.cache, out)
        return torch.split(out, queries.tolist())


ROWS = ((1, 20), (40, 600), (3, 700), (1, 1500), (9, 0), (1, 0))


@pytest.mark.parametrize("rows", [ROWS, ((70, 5500), (1, 300), (40, 300))], ids=["parts", "greater parts"])
def test_equal_bits_with_any_neighbours_and_any_number_of_threads(rows):
    batch = Batch(rows)
    state, everyone = batch.bind(), range(len(rows))
    expected = batch.attend(state, everyone)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for order in (everyone, everyone[::-1], *([row] for row in everyone)):
            for row, got in zip(order, batch.attend(state, order), strict=True):
                assert torch.equal(got, expected[row]), f"row {row} of {list(order)} on {count} threads"


def test_a_step_of_little_work_asks_for_no_smaller_team_than_torch_s(monkeypatch):
    """libgomp would end the other threads, and start new ones for torch's next operator."""
    asked, parallel = [], team._parallel()
    monkeypatch.setattr(team, "_parallel", lambda: lambda *call: (asked.append(call[2]), parallel(*call)))
    batch = Batch(((1, 20),))
    batch.attend(batch.bind(), [0])
    assert asked == [3], "two key heads are two items"


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("past", [0, 10_000, 130_000])
@pytest.mark.parametrize("queries", [4, 32, 33, 512, 4096])
def test_partial_results_take_bounded_memory_and_a_long_row_is_still_shared(queries, past, window):
    page_size, heads, dims = 128, 2, 64
    shape = GroupShape(3 * heads, heads, dims, page_size, 0.125, window)
    table = np.zeros((1, -(-(queries + past) // page_size)), np.int32)
    backend = CPUAttention()
    state = backend.bind("group", shape, BatchLimits(queries, 1, table.size, "cpu", "bfloat16"))
    backend.plan(state, batch_layout(np.array([queries]), np.array([past]), {"group": (table, page_size)}, "cpu"))
    assert state.words[w.NUM_PARTIALS] <= 3 * w.MOST_PARTS * w.TILE_ROWS * heads * (dims + 2)
    if past >= 10_000 and window is None:
        assert state.words[w.NUM_ITEMS] >= w.MOST_PARTS // 2 * heads


AREAS = (w.SUMS, w.SCORES, w.PLACES, w.COLUMNS, w.LINES, w.GREATEST, w.TOTALS, w.LANE_TOTALS)
"""Of a thread's scratch memory, behind the queries and in this order."""


@pytest.mark.parametrize(("dims", "dtype"), [(1, "float32"), (20, "bfloat16"), (72, "float32"), (72, "bfloat16")])
def test_every_area_of_scratch_memory_holds_what_is_written_there(dims, dtype):
    torch.set_num_threads(1)
    batch, order, guard = Batch(((40, 100), (1, 300)), dtype, dims=dims), [0, 1], 8192
    state = batch.bind()
    for place, area in enumerate((*AREAS, w.SCRATCH_BYTES), 1):
        state.words[area] += place * guard
    batch.attend(state, order)  # after which the memory is there
    scratch = state._held[w.SCRATCH].view(np.uint8)
    guards = [slice(end - guard, end) for end in state.words[[*AREAS, w.SCRATCH_BYTES]].tolist()]
    for each in guards:
        scratch[each] = 0xA5
    batch.attend(state, order)
    assert [bool((scratch[each] == 0xA5).all()) for each in guards] == [True] * len(guards)


@pytest.mark.parametrize("queries", [1, 2, 40])
def test_in_bfloat16_nothing_is_rounded_but_weights_and_results(queries):
    """Each by one part in 2^8: in every number, whatever the processor has for bfloat16."""
    past = 600
    batch = Batch(((queries, past),))
    [found] = batch.attend(batch.bind(), [0])
    q = batch.inputs[0][0].double().unflatten(1, (2, 3))
    keys, values = (
        cache[batch.tables[0]].transpose(0, 1).flatten(1, 2)[:, : queries + past].double() for cache in batch.cache)
    scores = torch.einsum("tkgd,ksd->tkgs", q, keys) * 0.125
    later = torch.arange(queries + past) > past + torch.arange(queries)[:, None]
    weights = scores.masked_fill(later[:, None, None], -torch.inf).softmax(-1)
    exact, magnitude = (
        torch.einsum("tkgs,ksd->tkgd", weights, each).flatten(1, 2) for each in (values, values.abs()))
    allowed = 2**-8 * (exact.abs() + 1.01 * magnitude)
    assert ((found.double() - exact).abs() <= allowed).all()


def test_several_engines_may_attend_at_once():
    batches = [Batch(ROWS), Batch(ROWS[::-1])]
    states = [batch.bind() for batch in batches]
    expected = [batch.attend(state, range(len(ROWS))) for batch, state in zip(batches, states, strict=True)]
    wrong = []

    def attend(which):
        for _ in range(20):
            for got, right in zip(batches[which].attend(states[which], range(len(ROWS))), expected[which], strict=True):
                if not torch.equal(got, right):
                    wrong.append(which)

    engines = [threading.Thread(target=attend, args=(which,)) for which in (0, 1)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    assert not wrong


def test_steps_that_need_more_room_than_any_before_get_it():
    batch = Batch(ROWS)
    state = batch.bind()
    small = batch.attend(state, [0])[0]
    batch.attend(state, range(len(ROWS)))
    assert torch.equal(batch.attend(state, [0])[0], small)


def test_a_query_of_nan_harms_no_neighbour():
    batch = Batch(ROWS)
    state, everyone = batch.bind(), range(len(ROWS))
    expected = batch.attend(state, everyone)
    for row in (0, 1, 2):
        whole = batch.inputs[row][0].clone()
        batch.inputs[row][0][-1] = float("nan")
        got = batch.attend(state, everyone)
        batch.inputs[row][0] = whole
        assert got[row][-1].isnan().all()
        assert torch.equal(got[row][:-1], expected[row][:-1])
        assert all(torch.equal(got[other], expected[other]) for other in everyone if other != row)


@pytest.mark.parametrize("pair", [(CPUAttention, TorchAttention), (TorchAttention, CPUAttention)], ids=["cpu", "torch"])
@pytest.mark.parametrize("case", [
    AttentionCase("decodes that begin pages", rows=((1, 16), (1, 32), (1, 5)), heads=2, kv_heads=1),
    AttentionCase("window", rows=((1, 16), (3, 30), (20, 5)), heads=2, kv_heads=1, window=6, page_size=4, padding=1),
], ids=str)
def test_it_shares_pages_with_the_torch_backend(case, pair):
    """The kit's pages are full of NaN, and the torch backend reads pages to their ends."""
    prefill, decode = pair[0](), pair[1]()
    options = CompositeAttention.Options(prefill="a", decode="b")
    check_attention(CompositeAttention(options, {"prefill": prefill, "decode": decode}), case)
    assert shares_pages(prefill, decode) and shares_pages(decode, prefill)


def test_without_numba_it_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(team, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install numba"):
        CPUAttention()


def test_without_a_team_it_runs_on_one_thread_and_says_so(monkeypatch):
    batch = Batch(ROWS)
    state = batch.bind()
    expected = batch.attend(state, range(len(ROWS)))
    assert CPUAttention().support().note == ""
    monkeypatch.setattr(team, "_parallel", lambda: None)
    assert "one thread" in CPUAttention().support().note
    for got, right in zip(batch.attend(state, range(len(ROWS))), expected, strict=True):
        assert torch.equal(got, right)
