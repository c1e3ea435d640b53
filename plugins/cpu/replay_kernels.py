"""Calls of kernels, one after the other, without Python between them. :mod:`.replay_words` has the names of the words.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu import replay_words as w
from hotswap.plugins.cpu.machine import copy, words, words_at
from hotswap.plugins.cpu.team import Kernel

ADDRESS = ir.IntType(8).as_pointer()


@Kernel
def replay(data):
    """On one thread, which is the first of the team for each call that is shared."""
    at = words(data)
    call = at[w.CALLS]
    for _ in range(at[w.COUNT]):
        of = words_at(call)
        copy(of[w.WORDS], of[w.KEPT], of[w.SIZE])
        if of[w.SHARED] and at[w.PARALLEL]:
            _share(at[w.PARALLEL], of[w.KERNEL], of[w.WORDS], at[w.THREADS])
        else:
            _run(of[w.KERNEL], of[w.WORDS])
        call += w.NUM_FIELDS * 8


@intrinsic
def _run(typing, kernel, data):
    """``kernel(data)``, both of them addresses."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.VoidType(), [ADDRESS]).as_pointer()
        kernel, data = arguments
        builder.call(builder.inttoptr(kernel, function), [builder.inttoptr(data, ADDRESS)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _share(typing, parallel, kernel, data, threads):
    """``parallel(kernel, data, threads, 0)``: see :func:`hotswap.plugins.cpu.team.parallel_address`."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [ADDRESS, ADDRESS, word, word]).as_pointer()
        parallel, kernel, data, threads = arguments
        addresses = [builder.inttoptr(address, ADDRESS) for address in (kernel, data)]
        numbers = [builder.trunc(threads, word), ir.Constant(word, 0)]
        builder.call(builder.inttoptr(parallel, function), [*addresses, *numbers])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate
