"""Kernels run on the threads of torch's operators, are kept, and have what numba does not offer."""

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hotswap.plugins.cpu import team
from hotswap.plugins.cpu.team import Kernel, Words, compile_kernels

numba = pytest.importorskip("numba")

from numba.core.registry import cpu_target  # noqa: E402

from hotswap.plugins.cpu import compiling, machine, row_loops, vectors  # noqa: E402  # they import numba


def count_up(data):
    at = machine.words(data)
    for _ in range(1000):
        machine.fetch_add(at[0], 1)
    machine.fetch_add(at[0] + 8, 1)


@pytest.fixture
def threads():
    """``threads(3)``: torch's operators have so many."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


def run(kernel, *arrays, shared=False):
    """The first of ``arrays`` after a run of ``kernel``, whose words are their addresses."""
    words = Words(8 * len(arrays))
    words.memory[words.skip : words.skip + words.size] = np.array([array.ctypes.data for array in arrays]).tobytes()
    compile_kernels([kernel])
    kernel(words, shared)
    return arrays[0]


def test_a_kernel_runs_once_on_each_of_torch_s_threads_or_on_the_calling_one(kept, threads):
    kernel = Kernel(count_up)
    for count in (1, 2, 5):
        threads(count)
        for shared in (True, False):
            total, members = run(kernel, np.zeros(2, np.int64), shared=shared)
            assert members == (count if shared else 1)
            assert total == 1000 * members


def test_a_kernel_that_nobody_has_compiled_is_named():
    with pytest.raises(RuntimeError, match="count_up is called, and nobody has compiled it"):
        Kernel(count_up)(Words(8), shared=False)


def test_a_kernel_is_kept_until_any_of_its_sources_changes(kept, monkeypatch):
    def hits():
        kernel = Kernel(count_up)
        assert run(kernel, np.zeros(2, np.int64)).tolist() == [1000, 1]
        return kernel._compiled.cache_hits

    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(team, "_sources", lambda: "another")
    assert [hits(), hits()] == [0, 1]


@machine.called
def twice(address):
    machine.fetch_add(address, machine.smaller(2, 3))


@machine.called
def four_times(address):
    twice(address)
    twice(address)


def count_in_parts(data):
    at = machine.words(data)
    twice(at[0])
    four_times(at[0])


@pytest.mark.skipif(numba.version_info.short not in compiling.TRIED, reason="numba's own pipeline compiles")
def test_what_a_kernel_calls_is_compiled_as_a_part_of_it_alone_and_kept_with_it(kept):
    for expected_hits in (0, 1):
        kernel = Kernel(count_in_parts)
        assert run(kernel, np.zeros(1, np.int64)).tolist() == [6]
        assert kernel._compiled.cache_hits == expected_hits
    for function in (twice, four_times, machine.smaller):
        assert function.overloads
        assert not any(made.library._finalized for made in function.overloads.values()), function


NEWER = """
import numba, numpy as np
numba.version_info = numba.version_info._replace(short=(0, 999))
from hotswap.plugins.cpu import compiling
assert compiling.KernelCompiler is numba.core.compiler.Compiler
from tests.attention.test_cpu_team import Kernel, count_in_parts, run
print(run(Kernel(count_in_parts), np.zeros(1, np.int64)))
"""


def test_a_version_of_numba_that_nobody_has_tried_compiles_by_its_own_pipeline(tmp_path):
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", NEWER], cwd=root, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, text=True,
        capture_output=True, timeout=120)
    assert found.stdout.strip() == "[6]", found.stderr


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(28, "No space left on device")])
def test_where_nothing_can_be_kept_kernels_are_compiled_anew_and_the_log_says_so_once(error, monkeypatch, caplog):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(
        "numba.core.caching.FunctionCache." + ("__init__" if isinstance(error, RuntimeError) else "save_overload"),
        refuse)
    team._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert run(Kernel(count_up), np.zeros(2, np.int64)).tolist() == [1000, 1]
        numbers = np.zeros(4096, np.float32)
        run(Kernel(powers), numbers)
    assert (numbers == 1).all()
    assert gc.isenabled(), "again"
    [message] = caplog.messages
    assert "compiled anew at each start" in message and "NUMBA_CACHE_DIR" in message
    team._warn_once.cache_clear()


BFLOAT16 = np.uint16(0)


def round_numbers(data):
    at = machine.words(data)
    row_loops.take(at[0], 1 << 16, numba.float32(1.001), at[1], BFLOAT16)
    row_loops.give(at[1], numba.float32(1), at[0], 1 << 16, BFLOAT16)


def test_bfloat16_is_widened_exactly_and_rounded_to_nearest_even(kept):
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    run(Kernel(round_numbers), bits, np.zeros(1 << 16, np.float32))
    got = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    exact = numbers.float() * torch.tensor(1.001)
    if vectors.pairs_are_multiplied(cpu_target.target_context, numba.uint16):  # then it rounds
        exact = torch.where(exact.abs() < 2.0**-126, torch.copysign(torch.zeros(()), exact), exact)
    expected = exact.bfloat16()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


def powers(data):
    numbers = machine.float32_at(machine.words(data)[0])
    for i in range(4096):
        numbers[i] = row_loops.power(numbers[i])


def test_powers_of_two_are_right_to_three_parts_in_ten_million(kept):
    numbers = np.linspace(-150, 8, 4096, dtype=np.float32)
    numbers[:4] = (-np.inf, 0, -125.9, -1e-30)
    expected = np.exp2(numbers.astype(np.float64))
    run(Kernel(powers), numbers)
    reached = numbers > 0
    assert not numbers[0]
    assert numbers[1] == 1
    assert expected[~reached].max() < 2e-38
    assert np.abs(numbers[reached] / expected[reached] - 1).max() < 3e-7
