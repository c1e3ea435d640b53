"""The Triton kernels in Triton's interpreter: the conformance kit, what the kit is blind to, and planted faults."""

import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import NHD, BatchLimits, GroupShape
from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention, check_static_attention
from hotswap.plugins.attention.triton import backend, tiles
from hotswap.plugins.attention.triton.backend import TritonAttention

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled here: see test_triton_gpu.py")

SEEDS = range(20, 30)
LIMITS = BatchLimits(max_tokens=8, max_rows=4, max_pages_per_row=2, device="cpu", dtype="float32")
SHAPE = GroupShape(heads=4, kv_heads=2, head_dim=64, page_size=16, scale=0.125)


@pytest.mark.parametrize("case", attention_cases(TritonAttention().support()), ids=str)
def test_agrees_with_dense_attention(case):
    check_attention(TritonAttention(), case)


def random_case(seed: int) -> AttentionCase:
    """Prompts, chunks behind a past, drafts and decodes; page size, head ratio and features at random."""
    rng = random.Random(seed)
    kinds = [
        lambda: (rng.randint(1, 50), 0), lambda: (rng.randint(17, 40), rng.randint(1, 60)),
        lambda: (rng.randint(2, 16), rng.randint(0, 60)), lambda: (1, rng.randint(0, 99)),
    ]
    kv_heads = rng.choice([1, 2])
    return AttentionCase(
        f"random {seed}", rows=tuple(rng.choice(kinds)() for _ in range(rng.randint(1, 4))),
        heads=kv_heads * rng.choice([1, 3, 4, 8]), kv_heads=kv_heads, head_dim=rng.choice([64, 80, 96, 128]),
        page_size=rng.choice([8, 16, 32, 64]), window=rng.choice([None, None, rng.randint(1, 100)]),
        softcap=rng.choice([None, 5.0, 30.0]), dtype=rng.choice(["float32", "float16", "bfloat16"]),
        padding=rng.choice([0, 2]))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_batches_agree_with_dense_attention(seed):
    check_attention(TritonAttention(), random_case(seed))


def test_the_random_batches_have_every_page_size_head_ratio_head_size_and_dtype():
    cases = [random_case(seed) for seed in SEEDS]
    assert {case.page_size for case in cases} == {8, 16, 32, 64}
    assert {case.heads // case.kv_heads for case in cases} == {1, 3, 4, 8}
    assert {case.head_dim for case in cases} == {64, 80, 96, 128}
    assert {case.dtype for case in cases} == {"float32", "float16", "bfloat16"}


class TokensFirst(TritonAttention):
    """The same kernels over pages in the other layout."""

    def allocate(self, shape, num_pages, limits):
        keys, values = super().allocate(replace(shape, layout=NHD), num_pages, limits)
        assert keys.shape[1:] == (shape.page_size, shape.kv_heads, shape.head_dim)
        return keys, values

    def bind(self, group, shape, limits):
        return super().bind(group, replace(shape, layout=NHD), limits)


def test_pages_of_the_other_layout_give_the_same():
    check_attention(TokensFirst(), AttentionCase("window", rows=((1, 15), (20, 5), (3, 9)), window=6, page_size=4))


class Distant(TritonAttention):
    """Its pages lie behind 2^31 elements of a larger pool, which takes memory only where it is written."""

    def allocate(self, shape, num_pages, limits):
        page = shape.kv_heads * shape.page_size * shape.head_dim
        self.far = 2**31 // page
        size = (self.far + num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        self.pools = tuple(torch.from_numpy(np.zeros(size, np.float16)) for _ in range(2))
        return tuple(pool[-num_pages:] for pool in self.pools)

    def plan(self, state, layout):
        pages = layout.groups["group"]
        far = replace(
            pages, page_table=pages.page_table + self.far, slots=pages.slots + self.far * pages.page_size)
        super().plan(state, replace(layout, groups={"group": far}))

    def run(self, state, q, k, v, cache, out):
        super().run(state, q, k, v, self.pools, out)


def test_a_pool_may_hold_more_elements_than_32_bits_count():
    check_attention(Distant(), AttentionCase("far", rows=((1, 40), (20, 5)), dtype="float16"))


class Recorder:
    """Stands in for the kernels: what is launched is kept, as (kernel's name, grid, arguments, constants)."""

    def __init__(self):
        self.launches = []

    def __getattr__(self, name):
        recorder = self

        class Kernel:
            def __getitem__(self, grid):
                return lambda *args, **constants: recorder.launches.append((name, grid, args, constants))

        return Kernel()


class Replaying(TritonAttention):
    """Launches in each static step what the first one would have launched, as a CUDA graph does: the same kernels,
    grids, numbers and tensors. The step's inputs are copied to where those launches look for them."""

    recorder, replays = None, 0

    def plan(self, state, layout):
        self.static = layout.static
        super().plan(state, layout)

    def run(self, state, q, k, v, cache, out):
        if self.static:
            self.replay(state, cache, q, k, v, out)
        else:
            super().run(state, q, k, v, cache, out)

    def replay(self, state, cache, *inputs):
        if self.recorder is None:
            self.recorder, self.inputs = Recorder(), [tensor.clone() for tensor in inputs]
            kernels, self._kernels = self._kernels, self.recorder
            q, k, v, out = self.inputs
            super().run(state, q, k, v, cache, out)
            self._kernels = kernels
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        for name, grid, args, constants in self.recorder.launches:
            getattr(self._kernels, name)[grid](*args, **constants)
        inputs[-1].copy_(self.inputs[-1])
        self.replays += 1


@pytest.mark.parametrize(("queries", "case"), [
    (1, AttentionCase("decode", heads=2, kv_heads=1)),
    (5, AttentionCase("verify", heads=2, kv_heads=1)),
    (5, AttentionCase("verify in a window", heads=2, kv_heads=1, window=21, page_size=8)),
    (20, AttentionCase("uniform chunks", heads=2, kv_heads=1)),
], ids=str)
def test_a_step_that_is_replayed_sees_nothing_of_the_one_that_was_captured(queries, case):
    attention = Replaying()
    check_static_attention(attention, case, queries)
    assert attention.replays > 2
    kernels = [name for name, *_ in attention.recorder.launches]
    assert kernels == ["write_kv", *(["attend_tiles"] if queries == 20 else ["attend_splits", "reduce_splits"])]


def test_a_row_is_split_as_its_length_asks_and_the_splits_are_as_many_as_the_limits_allow():
    state = TritonAttention().bind("group", SHAPE, replace(LIMITS, max_pages_per_row=1000))
    assert state.splits == tiles.SLOTS == 16
    assert TritonAttention().bind("group", SHAPE, LIMITS).splits == 1


KERNELS = Path(backend.__file__).with_name("kernels.py")
LONG = AttentionCase("long", rows=((1, 700), (1, 300)), heads=2, kv_heads=1)
MANY = AttentionCase("several tiles", rows=((40, 33),))
WINDOW = AttentionCase("window", rows=((40, 33), (3, 20)), window=6)
LARGE = AttentionCase("window, large heads", window=6, head_dim=256, rows=((70, 9),), heads=1, kv_heads=1)

FAULTS = {
    "a query does not see its own key": (MANY, "keys[None, :] <= positions", "keys[None, :] < positions"),
    "a query sees the key behind it": (MANY, "keys[None, :] <= positions", "keys[None, :] - 1 <= positions"),
    "a chunk forgets its past": (MANY, "tl.where(real, past + query, -1)", "tl.where(real, query, -1)"),
    "the sum of values is not scaled down": (LONG, "v, acc * older[:, None]", "v, acc"),
    "the sum of weights is not scaled down": (LONG, "total * older + tl.sum", "total + tl.sum"),
    "the window is a key too wide": (WINDOW, "> positions[:, None] - WINDOW", ">= positions[:, None] - WINDOW"),
    "the window is a key too narrow": (WINDOW, "> positions[:, None] - WINDOW", "- 1 > positions[:, None] - WINDOW"),
    "the keys begin a key too late": (WINDOW, "position - WINDOW + 1, 0", "position - WINDOW + 2, 0"),
    "pages lie closer than they do": (MANY, "pages * page_stride", "pages * (slot_stride * PAGE_SIZE)"),
    "a key's place in its page is wrong": (MANY, "keys % PAGE_SIZE * slot", "(keys + 1) % PAGE_SIZE * slot"),
    "what lies beyond the end is loaded": (
        MANY, "v = tl.load(v_cache + places[:, None] + dims[None, :], mask=inside, other=0.0)",
        "v = tl.load(v_cache + places[:, None] + dims[None, :])"),
    "a line that has seen no key": (
        LARGE, "shift = tl.where(new_top == float(\"-inf\"), 0.0, new_top)\n        weights",
        "shift = new_top\n        weights"),
    "splits are added without weights": (LONG, "o_tile * newer[:, None]", "o_tile"),
    "a split takes keys of the next": (
        LONG, "tl.minimum(begin + size, kv_len)", "tl.minimum(begin + size + BLOCK_N, kv_len)"),
    "a split is left out": (LONG, "tl.cdiv(kv_len - oldest, size)", "(kv_len - oldest) // size"),
    "heads of a group are swapped": (
        MANY, "* out_token + (kv_head * GROUP + line % GROUP)", "* out_token + (kv_head * GROUP + (line + 1) % GROUP)"),
    "scores are not capped": (AttentionCase("softcap", rows=((3, 30),), softcap=5.0), "if SOFTCAP:", "if False:"),
    "new keys go to the slot behind": (MANY, "slot % PAGE_SIZE * slot_stride", "(slot + 1) % PAGE_SIZE * slot_stride"),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes what the interpreter is given
@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_finds(fault, tmp_path):
    case, right, wrong = FAULTS[fault]
    text = KERNELS.read_text("utf-8")
    assert text.count(right) == 1
    path = tmp_path / "faulty_kernels.py"
    path.write_text(text.replace(right, wrong), "utf-8")
    spec = importlib.util.spec_from_file_location("faulty_kernels", path)
    attention = TritonAttention()
    attention._kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attention._kernels)
    with pytest.raises(AssertionError, match="differs from dense"):
        check_attention(attention, case)


def test_a_cpu_without_the_interpreter_is_refused_with_what_to_do(monkeypatch):
    assert "interpreter, which is slow" in TritonAttention().support().note
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not TritonAttention().support().note
    assert TritonAttention().support().devices == ("cuda",)
    with pytest.raises(ConfigError, match="only in Triton's interpreter. Set TRITON_INTERPRET=1 .* give device: cuda"):
        TritonAttention().bind("group", SHAPE, LIMITS)


def test_where_triton_is_missing_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package triton, .* pip install 'hotswap\[triton\]'"):
        TritonAttention()


def test_a_step_beyond_the_limits_is_our_own_mistake_and_said_in_numbers():
    case = AttentionCase("large", rows=((1, 0),) * 5, heads=4)

    class Narrow(TritonAttention):
        def bind(self, group, shape, limits):
            return super().bind(group, shape, LIMITS)

    with pytest.raises(AssertionError, match=r"a step of \(5, 1, 5\) .* that were bound: \(4, 2, 8\)"):
        check_attention(Narrow(), case)
