"""Rows are brought to 8 bits; see :mod:`.vectors` for the conventions, and :mod:`.linear_words` for how rows lie."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.plugins.cpu.linear_words import GROUP, MIDDLE, ROW_BYTES, VECTOR
from hotswap.plugins.cpu.vectors import BLOCK, F32, I16, I32, I64, Code, integer, number, vector

WORD = types.int64
I8 = ir.IntType(8)
LARGEST = 127.0
"""Of a row's numbers."""

SMALLEST = 2.0**-119
"""``LARGEST`` divided by more than this is a float32."""

ROUNDS = 1.5 * 2.0**23
"""Where this is added, float32 counts whole numbers: the lowest bits of the sum are the number, rounded."""


def bits_of(form):
    """Of the weights' numbers."""
    return 4 if form == types.int8 else 8


@intrinsic
def shrink(typing, x, size, numbers, place, rows, form, kind):
    """A row in 8 bits, the one at ``place`` in a block of ``rows`` that begins at ``numbers``: each group's numbers,
    its scale, and what the sum of its numbers adds. The largest magnitude becomes 127. Where a group has NaN or
    infinity, its scale is none either; where it has nothing above ``SMALLEST``, its numbers are zero."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder)
        if code.lanes != VECTOR:
            raise RuntimeError(f"weights lie in vectors of {VECTOR}, and here are such of {code.lanes}: see no_kernels")
        x, size, numbers, place, rows, *_ = arguments
        bits, blocks = bits_of(form), builder.udiv(size, I64(BLOCK * GROUP))
        whole, rest = (_Row(code, x, size, numbers, place, rows, bits, kind, masked) for masked in (False, True))
        left = builder.icmp_signed(">", size, code.scaled(blocks, BLOCK * GROUP))
        for step in (_Row.measure, _Row.shrink):
            with code.loop(blocks) as i:
                step(whole, i)
            with builder.if_then(left):
                step(rest, blocks)
        return context.get_dummy_value()

    return types.void(WORD, WORD, WORD, WORD, WORD, form, kind), generate


class _Row:
    """Writes code that brings a row to 8 bits, ``BLOCK`` groups at a time: first all scales are found and then all
    numbers, since a processor looks further ahead where less waits for one another. ``masked``: what is left behind
    whole blocks, where for groups that are not there the last one is taken again."""

    def __init__(self, code, x, size, numbers, place, rows, bits, kind, masked):
        b = code.builder
        self.code, self.x, self.size, self.bits, self.kind = code, x, size, bits, kind
        self.masked, self.last = masked, b.udiv(code.add(size, -1), I64(GROUP))
        self.own = b.add(numbers, code.scaled(place, GROUP))
        self.scales = b.add(numbers, b.add(code.scaled(rows, GROUP), code.scaled(place, 4)))
        self.sums, self.stride = b.add(self.scales, code.scaled(rows, 4)), code.scaled(rows, ROW_BYTES)

    def measure(self, block):
        """The scales of a block's groups; and what their numbers are to be multiplied with, in the place of sums."""
        b, groups = self.code.builder, self._groups(block)
        peaks = self._peaks([magnitudes for _, magnitudes in map(self._read, groups)])
        wrong = b.icmp_signed(">=", peaks, integer(0x7F800000, BLOCK))
        peaks = b.bitcast(peaks, vector(F32, BLOCK))
        scales = b.select(wrong, number(float("nan"), BLOCK), b.fmul(peaks, number(1 / LARGEST, BLOCK)))
        factors = b.select(
            b.fcmp_ordered(">", peaks, number(SMALLEST, BLOCK)), b.fdiv(number(LARGEST, BLOCK), peaks),
            number(0.0, BLOCK))
        for j, group in enumerate(groups):
            for start, values in ((self.scales, scales), (self.sums, factors)):
                b.store(b.extract_element(values, I32(j)), self._at(start, group, F32), align=4)

    def shrink(self, block):
        """A block's numbers, and what their sums add."""
        code, b, groups = self.code, self.code.builder, self._groups(block)
        factors = [code.everywhere(b.load(self._at(self.sums, group, F32), align=4)) for group in groups]
        packed = [self._packed([
            b.bitcast(code.multiply_add(half, factor, number(ROUNDS, VECTOR)), vector(I8, 4 * VECTOR))
            for half in self._read(group)[0]]) for group, factor in zip(groups, factors, strict=True)]
        counts = code.totals([_sum(code, each) for each in packed], b.add)
        sums = (b.mul(counts, integer(-MIDDLE, BLOCK)) if self.bits == 8
                else b.sitofp(counts, vector(F32, BLOCK)))
        for j, group in enumerate(groups):
            b.store(packed[j], self._at(self.own, group, packed[j].type), align=4)
            value = b.extract_element(sums, I32(j))
            if self.bits == 4:
                value = b.fmul(value, b.load(self._at(self.scales, group, F32), align=4))
            b.store(value, self._at(self.sums, group, value.type), align=4)

    def _groups(self, block):
        code, b = self.code, self.code.builder
        found = [code.add(code.scaled(block, BLOCK), j) for j in range(BLOCK)]
        if not self.masked:
            return found
        return [b.select(b.icmp_signed("<", group, self.last), group, self.last) for group in found]

    def _at(self, start, group, of):
        return self.code.at(self.code.builder.add(start, self.code.builder.mul(group, self.stride)), of)

    def _read(self, group):
        """A group's numbers in two vectors; and their magnitudes in one of integers: greater ones have greater bits,
        and NaN and infinity the greatest. Of bfloat16 a vector has every other number, and an integer two of them."""
        code, b, first = self.code, self.code.builder, self.code.scaled(group, GROUP)
        if self.kind == types.float32:
            halves = [self._some(code.add(first, place), F32, VECTOR) for place in (0, VECTOR)]
            return halves, _larger(code, *(_magnitudes(code, half) for half in halves))
        both = b.bitcast(self._some(first, I16, GROUP), vector(I32, VECTOR))
        halves = [b.shl(both, integer(16, VECTOR)), b.and_(both, integer(0xFFFF0000, VECTOR))]
        return [b.bitcast(half, code.zero.type) for half in halves], b.and_(both, integer(0x7FFF7FFF, VECTOR))

    def _some(self, first, of, lanes):
        code, b = self.code, self.code.builder
        address = b.add(self.x, code.scaled(first, code.size_of(self.kind)))
        if not self.masked:
            return code.load(address, of, lanes)
        return code.load_some(address, of, code.first_lanes(b.sub(self.size, first), lanes))

    def _peaks(self, magnitudes):
        """The bits of each group's largest magnitude as float32."""
        code, b = self.code, self.code.builder
        if self.kind == types.float32:
            return code.totals(magnitudes, lambda u, v: _larger(code, u, v))
        two = code.totals(magnitudes, lambda u, v: _larger(code, u, v, I16))
        return _larger(code, b.shl(two, integer(16, BLOCK)), b.and_(two, integer(0xFFFF0000, BLOCK)))

    def _packed(self, halves):
        """The lowest bytes of a group's numbers, in their order: 32 bytes."""
        here, there = range(0, 4 * VECTOR, 4), range(4 * VECTOR, 8 * VECTOR, 4)
        if self.kind == types.float32:
            return self.code.pick(*halves, [*here, *there])
        return self.code.pick(*halves, [at for pair in zip(here, there, strict=True) for at in pair])


def _magnitudes(code, values):
    return code.builder.and_(code.builder.bitcast(values, vector(I32, VECTOR)), integer(0x7FFFFFFF, VECTOR))


def _larger(code, u, v, of=None):
    """Of integers; ``of`` names the type of those that lie in others."""
    b, kind = code.builder, u.type
    if of is not None:
        u, v = (b.bitcast(each, vector(of, 2 * kind.count)) for each in (u, v))
    found = b.select(b.icmp_signed(">", u, v), u, v)
    return found if of is None else b.bitcast(found, kind)


def _sum(code, numbers):
    """Of a group's numbers, in parts: eight int32."""
    kind = vector(I32, GROUP // 4)
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(kind, [kind] * 3), "llvm.x86.avx512.vpdpbusd.256")
    ones = ir.Constant(kind, [0x01010101] * kind.count)
    return code.builder.call(function, [ir.Constant(kind, None), ones, code.builder.bitcast(numbers, kind)])
