"""What kernels need of the machine and numba does not offer: addresses, atomic counters, copies.

Imports numba: import this module where a part is bound, and nowhere before.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.plugins.cpu.compiling import KernelCompiler

called = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=KernelCompiler)
"""Decorates small functions that kernels call. Not ``fastmath``: that would reach into the vectors, too, and undo what
``exp`` does to be exact; loops that are to become vectors are written as such."""

inlined = njit(error_model="numpy", inline="always")
"""Decorates large functions that are called at one place: they become part of the kernel before types are known, so
that LLVM, too, sees one function. Of small functions the copies would take longer to compile than calls."""


def _pointer_to(of):
    """What gives a pointer to numbers ``of`` a type, which are read and written by their index.

    Not an array, of which numba would pass on and take apart seven parts, and count references: kernels took a tenth to
    a third longer to compile."""
    kind = types.CPointer(of)

    @intrinsic
    def at(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return at


words_at, int32_at, float32_at = map(_pointer_to, (types.int64, types.int32, types.float32))
"""The numbers from an address on, without end."""


@intrinsic
def words(typing, data):
    """A kernel's words, without end: as :func:`words_at`, from its argument."""
    kind = types.CPointer(types.int64)

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(kind))

    return kind(types.voidptr), generate


@called
def smaller(a, b):
    """``min``, which numba compiles anew for each call."""
    return a if a < b else b


@called
def larger(a, b):
    """As :func:`smaller`."""
    return a if a > b else b


@intrinsic
def fetch_add(typing, address, amount):
    """Add to the int64 at ``address``, in one piece for all threads; returns what was there before. What a thread has
    written before is seen by those that add later."""

    def generate(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def watch(typing, address):
    """The int64 at ``address``, which other threads change."""

    def generate(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing):
    """Between two looks at what another thread is about to change."""

    def generate(context, builder, signature, arguments):
        if context.codegen().magic_tuple()[0].startswith("x86_64"):
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def copy(typing, target, source, size):
    """``size`` bytes between two addresses."""

    def generate(context, builder, signature, arguments):
        to, origin = (builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def clear(typing, target, size):
    """Set ``size`` bytes to zero."""

    def generate(context, builder, signature, arguments):
        target, size = arguments
        cgutils.memset(builder, builder.inttoptr(target, cgutils.voidptr_t), size, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def float_of(typing, bits):
    """A float32 from the low 32 bits of an integer."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate
