"""What every attention backend must do: every layout against dense attention in float64. The whole test file::

    class TestMine(AttentionSuite):
        def make_backend(self):
            return MyAttention()

A backend of many cases may rather have a test for each::

    @pytest.mark.parametrize("case", attention_cases(MyAttention().support()), ids=str)
    def test_my_backend_agrees_with_dense_attention(case):
        check_attention(MyAttention(), case)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from hotswap.core.execution.layout import IntArray, batch_layout
from hotswap.core.interfaces.attention import (
    NHD,
    AttentionBackend,
    AttentionSupport,
    BatchLimits,
    GraphLevel,
    GroupShape,
    PageLayout,
)
from hotswap.core.interfaces.layout import BatchLayout

RAGGED = ((3, 5), (1, 0), (1, 70), (17, 0), (40, 33), (5, 4), (2, 62), (1, 15), (1, 16))
"""(queries, past) of each row: prefills, chunks behind a past, drafts, decodes, and lengths around a page's end."""

MIXED = ((1, 30), (17, 20), (5, 4), (1, 16))
"""A small batch of each kind, for what does not depend on lengths."""

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 6e-3}
"""Greatest ‖out - ref‖₂ / ‖ref‖₂ of a token and head, against float64 on the inputs as rounded."""


@dataclass(frozen=True)
class AttentionCase:
    """One batch. ``padding`` counts dummy rows behind the real ones."""

    name: str
    rows: tuple[tuple[int, int], ...] = RAGGED
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    padding: int = 0
    layout: PageLayout | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> GroupShape:
        return GroupShape(
            self.heads, self.kv_heads, self.head_dim, self.page_size, self.head_dim**-0.5, self.window, self.softcap,
            self.layout)


def attention_cases(support: AttentionSupport) -> list[AttentionCase]:
    """The cases that a backend of this support must pass."""
    pages = [size for size in (1, 4, 16) if support.page_sizes is None or size in support.page_sizes]
    size = pages[-1] if pages else min(support.page_sizes or (16,))
    dtypes = [dtype for dtype in TOLERANCE if support.dtypes is None or dtype in support.dtypes]
    base = AttentionCase("ragged", page_size=size, dtype=min(dtypes, key=TOLERANCE.__getitem__))
    cases = [
        replace(base, name=f"page size {page}", page_size=page, rows=MIXED if page == 1 else RAGGED)
        for page in pages or [size]]
    cases += [
        replace(base, name="decode", rows=((1, 7), (1, 90), (1, 31), (1, 32))),
        replace(base, name="one row", rows=((1, 0),)),
        replace(base, name="prefill of several blocks", rows=((300, 0), (270, 150)), heads=2, kv_heads=1),
        replace(base, name="uneven lengths", rows=((1, 3), (1, 700), (4, 300), (1, 64)), heads=2, kv_heads=1),
        replace(base, name="verification", rows=((5, 60), (5, 11), (5, 0))),
        replace(base, name="padded", padding=3, rows=MIXED),
        replace(base, name="one head a key", heads=3, kv_heads=3, rows=MIXED),
        replace(base, name="one key for all", heads=8, kv_heads=1, rows=MIXED),
    ]
    dims = [dim for dim in (64, 80, 96, 112, 128, 256) if support.head_dims is None or dim in support.head_dims]
    cases += [replace(base, name=f"head dim {dim}", head_dim=dim, rows=MIXED, heads=3, kv_heads=1) for dim in dims]
    cases += [replace(base, name=dtype, dtype=dtype, rows=MIXED) for dtype in dtypes]
    if support.windows:
        base = replace(base, rows=((3, 5), (1, 70), (40, 33), (2, 62), (1, 15)), heads=3, kv_heads=1)
        cases += [replace(base, name=f"window {window}", window=window) for window in (1, 6, 16, 64)]
        cases.append(replace(base, name="window, long", window=20, heads=2, kv_heads=1,
            rows=((150, 0), (40, 200), (1, 300), (3, 140))))
        if 256 in dims:  # small tiles: some hold no key that the last queries see
            cases.append(replace(base, name="window, large heads", window=6, head_dim=256, rows=((70, 9),), heads=1))
    if support.softcap:
        cases.append(replace(base, name="softcap", softcap=5.0))
    if support.softcap and support.windows:
        cases.append(replace(base, name="softcap and window", softcap=5.0, window=9))
    return cases


def _groups(case: AttentionCase) -> bool:
    """Whether a case is about which query head reads which key head."""
    return case.name == "verification" or case.kv_heads in (1, case.heads)


class AttentionSuite:
    """Subclass it and provide ``make_backend``."""

    device: str = "cpu"

    def make_backend(self) -> AttentionBackend:
        raise NotImplementedError("return a new instance of the backend under test")

    def cases(self) -> list[AttentionCase]:
        """Those that its ``support()`` leaves it."""
        support = self.make_backend().support()
        if support.devices is not None and self.device not in support.devices:
            pytest.skip(f"it does not run on {self.device}; it runs on {', '.join(support.devices)}")
        return attention_cases(support)

    def _check(self, chosen: Callable[[AttentionCase], bool]) -> None:
        for case in filter(chosen, self.cases()):
            check_attention(self.make_backend(), case, self.device)

    def test_ragged_batches_with_padded_rows_agree_with_dense_attention(self) -> None:
        self._check(lambda case: case.window is None and case.softcap is None and not _groups(case))

    def test_groups_of_query_heads_read_their_own_key_heads(self) -> None:
        self._check(lambda case: case.window is None and case.softcap is None and _groups(case))

    def test_a_window_hides_what_is_older(self) -> None:
        self._check(lambda case: case.window is not None)

    def test_a_softcap_squashes_the_scores(self) -> None:
        self._check(lambda case: case.softcap is not None and case.window is None)

    def test_its_pages_lie_as_it_says(self) -> None:
        backend, case = self.make_backend(), self.cases()[0]
        limits = BatchLimits(16, 4, 4, self.device, case.dtype)
        sizes = {"page": 5, "token": case.page_size, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
        axes = backend.page_axes()
        assert axes[0] == "page", f"the first dimension counts pages, not {axes[0]}"
        for tensor in backend.allocate(case.shape, 5, limits):
            assert tensor.shape[0] == 5
            if set(axes) <= sizes.keys():
                assert tuple(tensor.shape) == tuple(sizes[axis] for axis in axes), f"page_axes() says {axes}"

    def test_in_every_layout_that_it_shares_another_would_find_the_keys_and_values(self) -> None:
        """As where backends are exchanged while serving, or `composite` has two of them over the same pages."""
        layouts = self.make_backend().support().layouts
        if not layouts:
            pytest.skip("its pages are its own")
        for layout in layouts:
            case = replace(self.cases()[0], name=f"layout {layout}", layout=layout, rows=MIXED)
            check_attention(self.make_backend(), case, self.device)
            if set(layout) == set(NHD):
                check_pages(self.make_backend(), case, self.device)

    def test_steps_of_a_graph_read_what_they_are_given_each_time(self) -> None:
        if self.make_backend().support().graph_level is GraphLevel.NEVER:
            return
        uniform = self.make_backend().support().graph_level > GraphLevel.ONE_TOKEN
        for queries in (1, 4) if uniform else (1,):
            check_static_attention(self.make_backend(), self.cases()[0], queries, self.device)


def check_attention(backend: AttentionBackend, case: AttentionCase, device: str = "cpu") -> None:
    """The batch agrees with dense attention; so does each order of its rows, and each row without its neighbours.

    Every page starts full of NaN, the dummy page too, and so does each output: a backend that reads what was not
    written fails.
    """
    rows = [_random_row(case, seed, queries, past) for seed, (queries, past) in enumerate(case.rows)]
    expected = [_dense(case, row) for row in rows]
    bench = _Bench(backend, case, rows, device)
    everyone = list(range(len(rows)))
    together = bench.attend(everyone)
    for order in (everyone, everyone[::-1]):
        for index, got in zip(order, together if order == everyone else bench.attend(order), strict=True):
            error = _error(got, expected[index])
            assert error <= TOLERANCE[case.dtype], (
                f"{case.name}: row {index} of {case.rows[index]} (queries, past) at place {order.index(index)} of "
                f"{len(order)} differs from dense attention by {error:.3g}, allowed {TOLERANCE[case.dtype]}")
    rounding = max(backend.support().rounding, torch.finfo(getattr(torch, case.dtype)).eps)
    for index in everyone:
        [alone] = bench.attend([index])
        error = ((alone - together[index]).abs().max() / alone.abs().max().clamp(min=1)).item()
        assert error <= rounding, (
            f"{case.name}: row {index} of {case.rows[index]} changes by {error:.3g} with its neighbours; "
            f"the backend declares a rounding of {rounding}")


def check_pages(backend: AttentionBackend, case: AttentionCase, device: str = "cpu") -> None:
    """Each key and value lies, as it was given, where ``case.layout`` says."""
    assert case.layout is not None
    rows = [_random_row(case, seed, queries, past) for seed, (queries, past) in enumerate(case.rows)]
    bench = _Bench(backend, case, rows, device)
    bench.attend(range(len(rows)))
    for name, tensor in zip("kv", bench.cache, strict=True):
        pages = tensor.permute([case.layout.index(axis) for axis in NHD]).cpu()
        for row, table in zip(rows, bench.tables, strict=True):
            given = getattr(row, name)
            at = torch.arange(len(given))
            found = pages[torch.from_numpy(table).long()[at // case.page_size], at % case.page_size]
            assert torch.equal(found, given), f"{case.name}: the pages hold other {name} than they were given"


def check_static_attention(
    backend: AttentionBackend, case: AttentionCase, queries: int = 1, device: str = "cpu",
) -> None:
    """Steps of four rows of ``queries`` tokens through one static layout, as graphs need it, agree with dense attention
    whatever the step before them was: for texts of lengths around a page's end and up to the bound."""
    count, size = 4, case.page_size
    pages = max(2, 96 // size)
    longest, random = pages * size, np.random.default_rng(0)
    limits = BatchLimits(count * longest, count, pages, device, case.dtype)
    cache, state = backend.allocate(case.shape, 1 + count * pages, limits), backend.bind("group", case.shape, limits)
    static: BatchLayout | None = None
    for step in range(4):
        for tensor in cache:
            tensor.fill_(float("nan"))
        lengths = np.maximum(random.choice([1, size, size + 1, longest - 1, longest], count), queries)
        rows = [_random_row(case, seed, queries, int(length) - queries) for seed, length in enumerate(lengths)]
        tables = 1 + random.permutation(count * pages).astype(np.int32).reshape(count, pages)
        _write_past(backend, case, rows, tables, state, cache, device)
        visible = _visible(case, lengths, queries, pages)
        fresh = batch_layout(
            np.full(count, queries), lengths - queries, {"group": (np.where(visible, tables, 0), size)}, device)
        static = _refilled(static, fresh, np.where(visible, tables, 0), longest)
        backend.plan(state, static)
        q, k, v = _batch([(row, row.past, row.past + queries) for row in rows], device, 0)
        out = torch.full_like(q, float("nan"))
        backend.run(state, q, k, v, cache, out)
        for row, got in zip(rows, torch.split(out, queries), strict=True):
            error = _error(got, _dense(case, row))
            assert error <= TOLERANCE[case.dtype], (
                f"{case.name}: in step {step} of a static layout, {queries} queries behind {row.past} differ from "
                f"dense attention by {error:.3g}, allowed {TOLERANCE[case.dtype]}")


def _visible(case: AttentionCase, lengths: IntArray, queries: int, pages: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which pages of each row, [rows, pages], hold keys that a query may see."""
    first = np.zeros_like(lengths) if case.window is None else np.maximum(lengths - queries - case.window + 1, 0)
    at = np.arange(pages)
    return (at >= first[:, None] // case.page_size) & (at * case.page_size < lengths[:, None])


def _refilled(static: BatchLayout | None, fresh: BatchLayout, tables: IntArray, longest: int) -> BatchLayout:
    """The values of ``fresh``, with tables of full width, in the tensors of ``static`` where there are some."""
    group = fresh.groups["group"]
    wide = replace(group, page_table=torch.from_numpy(tables.copy()).to(group.slots.device))
    if static is None:
        return replace(fresh, groups={"group": wide}, kv_lens_max=[longest] * len(tables), static=True)
    kept = static.groups["group"]
    for old, new in (
        (static.positions, fresh.positions), (static.kv_lens, fresh.kv_lens),
        (kept.page_table, wide.page_table), (kept.slots, wide.slots),
    ):
        old.copy_(new)
    return static


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest relative error of a token and head; NaN counts as infinite."""
    error = (got.double().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.nan_to_num(float("inf")).max())


@dataclass
class _Row:
    """q [queries + past, H, D]; k, v [queries + past, K, D]: the whole sequence, of which the last part is asked."""

    queries: int
    past: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _random_row(case: AttentionCase, seed: int, queries: int, past: int) -> _Row:
    random = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    length = queries + past
    q, k, v = (
        torch.randn(length, heads, case.head_dim, generator=random).to(dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return _Row(queries, past, q * 2, k * 2, v)


def _dense(case: AttentionCase, row: _Row) -> torch.Tensor:
    """[queries, H, D] float64, by the definition."""
    group = case.heads // case.kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (row.k, row.v))
    q = row.q[row.past :].double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * case.shape.scale
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    at = torch.arange(len(k))
    asked = at[row.past :, None]
    hidden = at[None, :] > asked
    if case.window is not None:
        hidden |= at[None, :] <= asked - case.window
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class _Bench:
    """A cache that holds the rows' past, and asks them in any order."""

    def __init__(self, backend: AttentionBackend, case: AttentionCase, rows: Sequence[_Row], device: str) -> None:
        self._backend, self._case, self._rows, self._device = backend, case, rows, device
        lengths = np.array([row.queries + row.past for row in rows])
        self.tables, num_pages = _scattered_tables(lengths, case.page_size)
        limits = BatchLimits(
            max_tokens=int(lengths.sum()) + case.padding, max_rows=len(rows) + case.padding,
            max_pages_per_row=self.tables.shape[1], device=device, dtype=case.dtype)
        self.cache = backend.allocate(case.shape, num_pages, limits)
        for tensor in self.cache:
            tensor.fill_(float("nan"))
        self._state = backend.bind("group", case.shape, limits)
        _write_past(backend, case, rows, self.tables, self._state, self.cache, device)

    def attend(self, order: Sequence[int]) -> list[torch.Tensor]:
        """The outputs [queries, H, D] of the rows in ``order``; dummy rows come behind them."""
        case, rows = self._case, [self._rows[i] for i in order]
        queries = np.array([row.queries for row in rows] + [1] * case.padding)
        past = np.array([row.past for row in rows] + [0] * case.padding)
        tables = np.concatenate([self.tables[list(order)], np.zeros((case.padding, self.tables.shape[1]), np.int32)])
        if case.window is not None:  # pages that no query sees any more have gone to others
            dead = np.maximum(past - case.window + 1, 0) // case.page_size
            tables[np.arange(tables.shape[1]) < dead[:, None]] = 0
        layout = batch_layout(queries, past, {"group": (tables, case.page_size)}, self._device, num_rows=len(rows))
        q, k, v = _batch([(row, row.past, row.past + row.queries) for row in rows], self._device, case.padding)
        out = torch.full_like(q, float("nan"))
        self._backend.plan(self._state, layout)
        self._backend.run(self._state, q, k, v, self.cache, out)
        return list(torch.split(out, queries.tolist()))[: len(rows)]


def _write_past(
    backend: AttentionBackend, case: AttentionCase, rows: Sequence[_Row], tables: IntArray, state: Any,
    cache: tuple[torch.Tensor, torch.Tensor], device: str,
) -> None:
    """Compute what comes before the rows' queries."""
    older = [(i, row.past) for i, row in enumerate(rows) if row.past]
    if older:
        index, pasts = (np.array(column) for column in zip(*older, strict=True))
        layout = batch_layout(pasts, np.zeros_like(pasts), {"group": (tables[index], case.page_size)}, device)
        backend.plan(state, layout)
        q, k, v = _batch([(rows[i], 0, past) for i, past in older], device, 0)
        backend.run(state, q, k, v, cache, torch.full_like(q, float("nan")))


def _batch(parts: Sequence[tuple[_Row, int, int]], device: str, padding: int) -> list[torch.Tensor]:
    """q, k, v of the parts' tokens, with padding tokens of ones behind them."""
    stacks = [[getattr(row, name)[begin:end] for row, begin, end in parts] for name in "qkv"]
    return [torch.cat([*stack, torch.ones_like(stack[0][:1]).repeat(padding, 1, 1)]).to(device) for stack in stacks]


def _scattered_tables(lengths: IntArray, page_size: int) -> tuple[IntArray, int]:
    """Page tables [rows, P] int32 with pages in random order, and the number of pages; page 0 is the dummy."""
    counts = -(-lengths // page_size)
    pages = np.random.default_rng(0).permutation(int(counts.sum())) + 1
    tables = np.zeros((len(lengths), int(counts.max())), np.int32)
    for row, (begin, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
        tables[row, :count] = pages[begin : begin + count]
    return tables, len(pages) + 1
