"""The cpu backend passes the kit, gives equal bits with any neighbours and threads, and shares its pages."""

import os
import platform
import subprocess
import sys
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
from hotswap.plugins.cpu import team

LONG = ((1, 700), (1, 255), (1, 256), (2, 1100), (40, 1300), (1, 3))
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

    def __init__(self, rows, dtype="bfloat16", page_size=16):
        self.rows, self.page_size, self.dtype = rows, page_size, getattr(torch, dtype)
        self.shape = GroupShape(6, 2, 64, page_size, 0.125)
        counts = [-(-(queries + past) // page_size) for queries, past in rows]
        self.tables = np.zeros((len(rows), max(counts)), np.int32)
        pages = np.random.default_rng(0).permutation(sum(counts)) + 1
        for row, count in enumerate(counts):
            self.tables[row, :count], pages = pages[:count], pages[count:]
        random = torch.Generator().manual_seed(0)
        self.cache = tuple(
            torch.randn(1 + sum(counts), 2, page_size, 64, generator=random).to(self.dtype) for _ in range(2))
        self.inputs = [
            [torch.randn(queries, heads, 64, generator=random).to(self.dtype) for heads in (6, 2, 2)]
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


def test_equal_bits_with_any_neighbours_and_any_number_of_threads():
    batch = Batch(ROWS)
    state, everyone = batch.bind(), range(len(ROWS))
    expected = batch.attend(state, everyone)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for order in (everyone, everyone[::-1], *([row] for row in everyone)):
            for row, got in zip(order, batch.attend(state, order), strict=True):
                assert torch.equal(got, expected[row]), f"row {row} of {list(order)} on {count} threads"


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


OLD_PROCESSOR = """
from hotswap.core.testing.attention import AttentionCase, check_attention
from hotswap.plugins.attention.cpu import CPUAttention
from hotswap.plugins.cpu.attention_kernels import attend_bfloat16

case = AttentionCase("mixed", rows=((1, 300), (17, 20), (5, 4)), head_dim=72, dtype="bfloat16")
check_attention(CPUAttention(), case)
assert "zmm" not in attend_bfloat16._compiled._library.get_asm_str()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that family")
def test_a_processor_without_avx512_gets_kernels_of_its_own(tmp_path):
    """One of 2003: no AVX, no FMA, and nothing for 16-bit numbers."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", OLD_PROCESSOR], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
