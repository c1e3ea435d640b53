"""The ``cpu`` operators: tells :mod:`hotswap.plugins.cpu.operator_kernels` where the tensors are."""

import struct
from functools import partial
from importlib import import_module

import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.operators import Operators, OperatorSet
from hotswap.plugins.cpu import operator_words as w
from hotswap.plugins.cpu.team import Kernel, ThreadWords, Words, check_numba, compile_kernels

SHARED_FROM = 32_768
"""Numbers that are worth another thread: to fork and to join takes as long as a thread needs for about so many."""

_WORDS = struct.Struct(f"q{8 * (w.COUNTER - w.NEXT - 1)}x{w.EPS - w.COUNTER}qf4x")
"""All of them, with nothing between NEXT and COUNTER."""


class CPUOperators(Operators):
    """Kernels of our own for CPUs: each operator is one pass over memory, and one call. Compiled by numba, on torch's
    threads.

    Choose it on CPUs, where a decoding step of few rows otherwise spends more time on starting torch's operators than
    in them. It needs numba and no compiler; at the first start its kernels are compiled, and then they are kept.
    float32 and bfloat16.
    """

    def bind(self, device: str, dtype: torch.dtype) -> OperatorSet:
        if device != "cpu":
            raise ConfigError(f"{self.label} runs on cpu, not on {device}; choose other operators", "model.operators")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"{self.label} takes float32 and bfloat16, not {dtype}; choose other operators", "model.operators")
        check_numba("operators on the CPU")
        kernels = import_module("hotswap.plugins.cpu.operator_kernels")  # late: it imports numba
        kernel: Kernel = getattr(kernels, f"operate_{str(dtype).rpartition('.')[2]}")
        compile_kernels([kernel])
        return _CPUOperatorSet(kernel, dtype)


class _CPUOperatorSet(OperatorSet):
    def __init__(self, kernel: Kernel, dtype: torch.dtype) -> None:
        self._kernel, self._itemsize, self._words = kernel, dtype.itemsize, ThreadWords(partial(Words, _WORDS.size))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = x if x.dim() == 3 else x.view(-1, 1, x.shape[-1])
        tokens, heads, size = rows.shape
        self._run(
            w.NORM, tokens, heads, size, rows.data_ptr(), rows.stride(0), rows.stride(1), 0, 0, weight.data_ptr(), 0,
            out.data_ptr(), eps)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        tokens, size = x.shape
        self._run(
            w.ADD_NORM, tokens, 1, size, x.data_ptr(), x.stride(0), 0, residual.data_ptr(), residual.stride(0),
            weight.data_ptr(), 0, out.data_ptr(), eps)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        tokens, heads, size = x.shape
        self._run(
            w.ROTATE, tokens, heads, size, x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), cos.stride(0),
            sin.data_ptr(), sin.stride(0), 0, 0.0)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, size, dtype=gate_up.dtype)
        self._run(
            w.GATE, tokens, 1, size, gate_up.data_ptr(), gate_up.stride(0), 0, 0, 0, 0, 0, out.data_ptr(), 0.0)
        return out

    def _run(
        self, operator: int, tokens: int, heads: int, size: int, x: int, x_token: int, x_head: int, other: int,
        other_token: int, vector: int, vector_token: int, out: int, eps: float,
    ) -> None:
        """Strides count numbers here."""
        shared = tokens > 1 and tokens * heads * size >= 2 * SHARED_FROM
        # Small, so that a thread that has lost its core delays nobody.
        share = -(-tokens // (4 * torch.get_num_threads())) if shared else tokens
        words, step = self._words.of_call(), self._itemsize
        _WORDS.pack_into(
            words.memory, words.skip, 0, words.address, operator, tokens, share, heads, size, step, x, x_token * step,
            x_head * step, other, other_token * step, vector, vector_token * step, out, eps)
        self._kernel(words, shared)
