"""The adapter to the FlashAttention packages, over a stand-in with their signatures and their refusals.

The stand-in shows that the arguments mean what they should; that the real packages agree, the gpu tests show.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import BatchLimits, GraphLevel, GroupShape
from hotswap.core.registry import Registry
from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention, check_static_attention
from hotswap.plugins.attention import flash
from hotswap.plugins.attention.composite import CompositeAttention
from hotswap.plugins.attention.flash import FlashAttention

STAND_IN = Path(__file__).with_name("stand_in_flash")
CAPABILITIES = {2: (8, 6), 3: (9, 0), 4: (10, 0)}


@pytest.fixture
def install(monkeypatch):
    """``install(capability, **versions)`` makes the stand-in importable as far as ``versions`` of distributions say,
    and gives the device that capability. Returns the names of the functions that are called from then on."""
    spec = importlib.util.spec_from_file_location("install_flash", STAND_IN / "install_flash.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield lambda capability, **versions: module.install(monkeypatch, capability, versions)
    module.forget()


EVERY = {"flash-attn": "2.8.3", "flash_attn_3": "3.0.0b1", "flash-attn-4": "4.0.0b36"}


def backend_of(install, number):
    install(CAPABILITIES[number], **EVERY)
    backend = FlashAttention()
    assert f"FlashAttention-{number} " in backend.support().note
    return backend


CASES = [
    "decode", "uneven lengths", "padded", "one key for all", "one head a key", "float16", "bfloat16", "head dim 96",
    "head dim 256", "window 1", "window 6", "window, long", "softcap", "softcap and window", "page size 1",
    "page size 4", "prefill of several blocks"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [2, 3, 4])
def test_agrees_with_dense_attention(install, number, name):
    backend = backend_of(install, number)
    cases = {case.name: case for case in attention_cases(backend.support())}
    if name not in cases:
        pytest.skip(f"no case of FlashAttention-{number}")
    check_attention(backend, cases[name])


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("queries", [1, 4])
def test_steps_of_a_static_layout_agree_with_dense_attention(install, number, window, queries):
    backend = backend_of(install, number)
    assert backend.support().graph_level == GraphLevel.UNIFORM
    size = (backend.support().page_sizes or (16,))[0]
    window = window and window * size // 256
    check_static_attention(backend, AttentionCase("static", dtype="float16", page_size=size, window=window), queries)


def test_equal_rows_take_the_kernel_for_decoding_and_others_the_one_for_any_lengths(install):
    calls = install((8, 0), **EVERY)
    backend = FlashAttention()
    case = AttentionCase("calls", page_size=256, dtype="float16")
    check_attention(backend, replace(case, rows=((1, 7), (1, 90), (1, 31))))
    assert set(calls) == {"varlen", "kvcache"}  # the past is written in rows of different lengths
    calls.clear()
    check_attention(backend, replace(case, rows=((1, 0), (1, 0))))
    assert set(calls) == {"kvcache"}


class WideWindow(FlashAttention):
    """Takes the window for the number of keys before the query's own."""

    def bind(self, group, shape, limits):
        return super().bind(group, replace(shape, window=shape.window + 1), limits)


def test_a_window_that_is_one_too_wide_is_found(install):
    install((9, 0), **EVERY)
    with pytest.raises(AssertionError, match="differs from dense"):
        check_attention(WideWindow(), AttentionCase("window", window=6, dtype="float16"))


def test_keys_that_a_window_gave_back_are_not_even_loaded(install, monkeypatch):
    install((9, 0), **EVERY)
    case = AttentionCase("window", window=6, page_size=4, dtype="float16", rows=((3, 90), (1, 40)))
    check_attention(FlashAttention(), case)
    monkeypatch.setattr(flash, "_visible_pages", lambda window, layout, pages: pages.page_table)
    with pytest.raises(AssertionError):  # a tile reaches into pages of NaN
        check_attention(FlashAttention(), case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are compiled, and the stand-in is on the CPU")
@pytest.mark.parametrize("order", ["flash, then triton", "triton, then flash"])
def test_flash_and_triton_share_pages(install, order):
    triton = pytest.importorskip("hotswap.plugins.attention.triton.backend").TritonAttention()
    install((9, 0), **EVERY)
    pair = {"prefill": FlashAttention(), "decode": triton}
    if order == "triton, then flash":
        pair = dict(zip(pair, reversed(pair.values()), strict=True))
    both = CompositeAttention(
        CompositeAttention.Options(**{role: backend.name for role, backend in pair.items()}), pair)
    assert "FlashAttention-3" in both.support().note
    rows, sizes = ((1, 16), (3, 30), (20, 5), (1, 5)), {"heads": 2, "kv_heads": 1, "page_size": 4, "padding": 1}
    check_attention(both, AttentionCase("pair", rows=rows, dtype="float16", window=6, **sizes))
    check_attention(both, AttentionCase("pair", rows=((1, 16), (1, 5)), dtype="float16", **sizes))


# What is chosen


@pytest.mark.parametrize(("capability", "installed", "number"), [
    ((8, 0), EVERY, 2), ((8, 9), EVERY, 2), ((9, 0), EVERY, 3), ((10, 0), EVERY, 4), ((12, 0), EVERY, 2),
    ((9, 0), {"flash-attn": "2.8.3", "flash_attn_3": "2.0"}, 2),
    ((10, 0), {"flash-attn": "2.8.3", "flash-attn-4": "3.9"}, 2),
])
def test_the_newest_generation_that_is_made_for_the_device_is_taken_and_said(install, capability, installed, number):
    install(capability, **installed)
    note = FlashAttention().support().note
    assert note.startswith(f"FlashAttention-{number} ")
    assert f"capability {capability[0]}.{capability[1]}" in note


def test_a_generation_can_be_asked_for(install):
    install((9, 0), **EVERY)
    assert FlashAttention(FlashAttention.Options(version=2)).support().page_sizes == (256, 512, 1024)
    with pytest.raises(ConfigError, match=r"FlashAttention-4 is for capabilities from 10\.0 .* the device has 9\.0"):
        FlashAttention(FlashAttention.Options(version=4)).support()


def test_without_a_device_or_on_an_old_one_it_is_refused(install):
    install(None, **EVERY)
    with pytest.raises(ConfigError, match="capability 8.0 or more, and none was found") as caught:
        FlashAttention().support()
    assert caught.value.path == "attention"
    install((7, 5), **EVERY)
    with pytest.raises(ConfigError, match=r"the device has 7\.5"):
        FlashAttention().support()


def test_a_device_that_cannot_be_asked_is_a_refusal_so_that_auto_takes_another_backend(monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: the device is busy\nmore of it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    with pytest.raises(ConfigError, match=r"\(CUDA error: the device is busy\)") as caught:
        FlashAttention().support()
    assert caught.value.path == "attention"


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(flash, "device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    config = load_config({"model": "m", "attention": "flash", "device": "cuda"}, environ={}).config
    with pytest.raises(ConfigError, match=r"hotswap\[flash\]") as caught:
        check_config(config, Registry())
    assert "FlashAttention-3 (flash_attn_3) cannot be imported" in str(caught.value)


@pytest.mark.parametrize("version", ["1.0.9", "3.0", "a version that does not say its number"])
def test_a_version_out_of_range_is_refused_with_the_range(install, version):
    install((8, 0), **{"flash-attn": version})
    with pytest.raises(ConfigError, match=f"flash-attn from 2 to below 3, and {version} is installed"):
        FlashAttention().support()


def test_a_package_without_pages_is_too_old(install, monkeypatch):
    install((8, 0), **{"flash-attn": "2.4.0"})
    module = importlib.import_module("flash_attn")

    def flash_attn_varlen_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)): ...

    monkeypatch.setattr(module, "flash_attn_varlen_func", flash_attn_varlen_func)
    with pytest.raises(ConfigError, match=r"2\.4\.0 is too old: it has no flash_attn_varlen_func\(softcap"):
        FlashAttention().support()


@pytest.mark.parametrize(("changes", "problem"), [
    ({"dtype": "float32"}, "does not take 'float32', but bfloat16, float16"),
    ({"kvcache": {"block_size": 16}}, "does not take 16, but 256, 512, 1024"),
    ({"device": "cuda"}, "does not take 'cuda', but cpu"),
])
def test_what_the_package_does_not_take_is_refused_with_the_key_to_change(install, changes, problem):
    install((8, 0), **EVERY)
    config = load_config({"model": "m", "attention": "flash", "device": "cpu", **changes}, environ={}).config
    with pytest.raises(ConfigError, match=problem):
        check_config(config, Registry())


@pytest.mark.parametrize("number", [2, 3])
def test_the_stand_in_refuses_what_the_packages_refuse(install, number):
    backend = backend_of(install, number)
    with pytest.raises(RuntimeError, match="fp16 and bf16"):
        check_attention(backend, AttentionCase("float32", page_size=256))
    if number == 2:
        with pytest.raises(RuntimeError, match="divisible by 256"):
            check_attention(backend, AttentionCase("page", page_size=16, dtype="float16"))


def test_pages_are_zeroed_and_lie_as_the_packages_read_them(install):
    install((8, 0), **EVERY)
    keys, values = FlashAttention().allocate(
        GroupShape(4, 2, 64, 256, 1.0), 3, BatchLimits(1, 1, 1, "cpu", "bfloat16"))
    assert keys.shape == values.shape == (3, 256, 2, 64)
    assert keys.dtype == torch.bfloat16
    assert not keys.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_the_real_package_agrees_with_dense_attention(name):
    backend = FlashAttention()
    try:
        cases = {case.name: case for case in attention_cases(backend.support())}
    except ConfigError as error:
        pytest.skip(error.message)
    if name not in cases:
        pytest.skip("no case of this generation")
    check_attention(backend, cases[name], "cuda")
