"""Rows are brought to 8 bits; see :mod:`.vectors` for the conventions, and :mod:`.linear_words` for how rows lie."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.plugins.cpu.linear_words import GROUP, LARGEST_SUM, MIDDLE, VECTOR
from hotswap.plugins.cpu.vectors import BLOCK, F32, I16, I32, I64, Code, integer, number, vector

WORD = types.int64
I8 = ir.IntType(8)
LARGEST = 127.0
"""Of a row's numbers."""

SMALLEST = 2.0**-112
"""``LARGEST`` and ``LARGEST_SUM`` divided by more than this are float32."""

ROUNDS = 1.5 * 2.0**23
"""Where this is added, float32 counts whole numbers: the lowest bits of the sum are the number, rounded."""


@intrinsic
def shrink(typing, x, size, numbers, place, rows, memory, form, kind):
    """A row in 8 bits, the one at ``place`` in a block of ``rows`` that begins at ``numbers``. The largest magnitude of
    a group becomes 127. Where a group has NaN or infinity, its scale is none either; where it has nothing above
    ``SMALLEST``, its numbers are zero. ``memory``: ``shrink_bytes`` for what is known in between."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder)
        if code.lanes != VECTOR:
            raise RuntimeError(f"weights lie in vectors of {VECTOR}, and here are such of {code.lanes}: see no_kernels")
        x, size, numbers, place, rows, memory, *_ = arguments
        row = _Row(code, x, size, numbers, place, rows, memory, kind, form == types.int8)
        row.fill()
        with code.loop(row.blocks) as i:
            row.measure(i)
        with code.loop(row.blocks) as i:
            row.shrink(i)
        if form == types.int8:
            row.finish()
        return context.get_dummy_value()

    return types.void(WORD, WORD, WORD, WORD, WORD, WORD, form, kind), generate


class _Row:
    """Writes code that brings a row to 8 bits, ``BLOCK`` groups at a time: first all scales are found and then all
    numbers, since a processor looks further ahead where less waits for one another."""

    def __init__(self, code, x, size, numbers, place, rows, memory, kind, least):
        """``least``: whether weights have such values."""
        b = code.builder
        self.code, self.x, self.size, self.kind, self.least = code, x, size, kind, least
        self.groups = b.udiv(code.add(size, GROUP - 1), I64(GROUP))
        self.whole = b.udiv(size, I64(BLOCK * GROUP))
        self.blocks = b.udiv(code.add(size, BLOCK * GROUP - 1), I64(BLOCK * GROUP))
        self.pairs, self.line = b.lshr(code.add(self.groups, 1), I64(1)), code.scaled(rows, 4)
        self.unit = b.add(numbers, code.scaled(place, 4))
        if least:
            numbers = b.add(numbers, b.mul(self.line, code.add(self.pairs, 1)))
        self.own = b.add(numbers, code.scaled(place, GROUP))
        self.scales = b.add(numbers, b.add(code.scaled(rows, GROUP), code.scaled(place, 4)))
        self.stride = code.scaled(rows, GROUP + (4 if least else 8))
        self.rest, self.sums = memory, code.add(memory, 4 * BLOCK * GROUP)
        self.factors = b.add(self.sums, b.and_(code.add(code.scaled(self.groups, 4), 63), I64(-64)))

    def fill(self):
        """What is left of the row behind the last whole block, with zeros behind it."""
        code, b = self.code, self.code.builder
        with b.if_then(b.icmp_signed("<", self.whole, self.blocks)):
            first, step = code.scaled(self.whole, BLOCK * GROUP), code.size_of(self.kind)
            for place in range(0, BLOCK * GROUP, VECTOR):
                begin = code.add(first, place)
                mask = code.first_lanes(b.sub(self.size, begin))
                value = code.read(b.add(self.x, code.scaled(begin, step)), self.kind, mask)
                code.write(value, code.add(self.rest, step * place), self.kind)

    def measure(self, i):
        """The scales of a block's groups, and what their numbers are to be multiplied with."""
        code, b = self.code, self.code.builder
        peaks = self._peaks([magnitudes for _, magnitudes in self._read(i)])
        wrong = b.icmp_signed(">=", peaks, integer(0x7F800000, BLOCK))
        peaks = b.bitcast(peaks, vector(F32, BLOCK))
        scales = b.select(wrong, number(float("nan"), BLOCK), b.fmul(peaks, number(1 / LARGEST, BLOCK)))
        code.store(_ratio(code, LARGEST, peaks), b.add(self.factors, code.scaled(i, 4 * BLOCK)))
        code.store(scales, b.add(self.sums, code.scaled(i, 4 * BLOCK)))
        for j, place in self._places(i):
            b.store(b.extract_element(scales, I32(j)), code.at(b.add(self.scales, place), F32), align=4)

    def shrink(self, i):
        """A block's numbers, and the sums of each group."""
        code, b, counts = self.code, self.code.builder, []
        factors, sums = (b.add(start, code.scaled(i, 4 * BLOCK)) for start in (self.factors, self.sums))
        packed = []
        for j, (halves, _) in enumerate(self._read(i)):
            factor = code.spread(code.add(factors, 4 * j))
            packed.append(self._packed([
                code.multiply_add(half, factor, number(ROUNDS, VECTOR)) for half in halves]))
            counts.append(_sum(code, packed[-1]))
        counts = code.totals(counts, b.add)
        if self.least:
            scales = code.load(sums, F32, BLOCK)
            code.store(b.fmul(scales, b.sitofp(counts, scales.type)), sums)
        for j, place in self._places(i):
            b.store(packed[j], code.at(b.add(self.own, place), packed[j].type), align=4)
            if not self.least:
                count = b.mul(b.extract_element(counts, I32(j)), I32(-MIDDLE))
                b.store(count, code.at(b.add(b.add(self.scales, self.line), place), I32), align=4)

    def finish(self):
        """Of all groups' sums whole numbers, two in a word, and what one of them stands for."""
        code, b = self.code, self.code.builder
        peak = code.variable(ir.Constant(vector(I32, VECTOR), None))
        parts = b.lshr(code.add(self.groups, VECTOR - 1), I64(4))
        with code.loop(parts) as i:
            b.store(_larger(code, _magnitudes(code, self._some_sums(i)), b.load(peak)), peak)
        peak = b.bitcast(code.single(b.load(peak), lambda u, v: _larger(code, u, v)), F32)
        b.store(b.fmul(peak, F32(1 / LARGEST_SUM)), code.at(self.unit, F32), align=4)
        factor = code.everywhere(_ratio(code, LARGEST_SUM, peak))
        with code.loop(parts) as i:
            whole = code.multiply_add(self._some_sums(i), factor, number(ROUNDS, VECTOR))
            whole = b.trunc(b.bitcast(whole, vector(I32, VECTOR)), vector(I16, VECTOR))
            b.store(whole, code.at(b.add(self.sums, code.scaled(i, 2 * VECTOR)), whole.type), align=2)
        with code.loop(self.pairs) as i:
            pair = b.load(code.at(b.add(self.sums, code.scaled(i, 4)), I32), align=4)
            b.store(pair, code.at(b.add(self.unit, b.mul(code.add(i, 1), self.line)), I32), align=4)

    def _some_sums(self, i):
        code, b = self.code, self.code.builder
        mask = code.first_lanes(b.sub(self.groups, code.scaled(i, VECTOR)))
        return code.read(b.add(self.sums, code.scaled(i, 4 * VECTOR)), types.float32, mask)

    def _read(self, i):
        """Each group's numbers in two vectors; and their magnitudes in one of integers: greater ones have greater bits,
        and NaN and infinity the greatest. Of bfloat16 a vector has every other number, and an integer two of them."""
        code, b, step = self.code, self.code.builder, self.code.size_of(self.kind)
        block = b.select(
            b.icmp_signed("<", i, self.whole), b.add(self.x, code.scaled(i, BLOCK * GROUP * step)), self.rest)
        for address in (code.add(block, GROUP * step * j) for j in range(BLOCK)):
            if self.kind == types.float32:
                halves = [code.load(code.add(address, place)) for place in (0, 4 * VECTOR)]
                yield halves, _larger(code, *(_magnitudes(code, half) for half in halves))
            else:
                raw = b.load(code.at(address, vector(I32, VECTOR)), align=2)
                halves = [b.shl(raw, integer(16, VECTOR)), b.and_(raw, integer(0xFFFF0000, VECTOR))]
                yield [b.bitcast(half, code.zero.type) for half in halves], b.and_(raw, integer(0x7FFF7FFF, VECTOR))

    def _peaks(self, magnitudes):
        """The bits of each group's largest magnitude as float32."""
        code, b = self.code, self.code.builder
        if self.kind == types.float32:
            return code.totals(magnitudes, lambda u, v: _larger(code, u, v))
        two = code.totals(magnitudes, lambda u, v: _larger(code, u, v, I16))
        low, high = b.shl(two, integer(16, BLOCK)), b.and_(two, integer(0xFFFF0000, BLOCK))
        return _larger(code, low, high)

    def _packed(self, halves):
        """The lowest bytes of a group's numbers, in their order: 32 bytes."""
        code, b = self.code, self.code.builder
        first, second = (b.bitcast(half, vector(I8, 4 * VECTOR)) for half in halves)
        here, there = range(0, 4 * VECTOR, 4), range(4 * VECTOR, 8 * VECTOR, 4)
        if self.kind == types.float32:
            return code.pick(first, second, [*here, *there])
        return code.pick(first, second, [at for pair in zip(here, there, strict=True) for at in pair])

    def _places(self, i):
        """How far behind the first group's place those of a block are, backwards: that of the last group for those that
        do not exist, and then for itself."""
        code, b = self.code, self.code.builder
        last = code.add(self.groups, -1)
        for j in reversed(range(BLOCK)):
            group = code.add(code.scaled(i, BLOCK), j)
            yield j, b.mul(b.select(b.icmp_signed("<", group, last), group, last), self.stride)


def _ratio(code, of, by):
    """Zero where there is next to nothing to divide by."""
    b = code.builder
    value, least, zero = (
        F32(each) if by.type == F32 else number(each, by.type.count) for each in (of, SMALLEST, 0.0))
    return b.select(b.fcmp_ordered(">", by, least), b.fdiv(value, by), zero)


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
