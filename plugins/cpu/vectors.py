"""Innermost loops, written in LLVM's vectors: numba's loops over arrays are not certain to become such ones.

A vector has ``lanes`` float32: 16 where registers have 512 bits, else 8, which LLVM divides where they are smaller.
Rows in memory are of one *kind*, told by the type of a number that stands for it: float32; uint16, the bits of
bfloat16; int16, the bits of float16. They may end within a vector: the rest is neither read nor written. Rows of
scratch memory are float32, and whole vectors. All addresses are int64; strides count bytes, and sizes numbers.

Sums run in vectors, lane by lane, and then over the lanes, always in the same order: equal input gives equal bits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math
from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)

BLOCK = 4
"""Vectors, or keys, that are worked on side by side."""

LINE = 64
"""Bytes of a cache line."""


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat16)

    def __hash__(self):
        return hash(_BFloat16)


def lanes_of(context):
    """By the processor that is compiled for."""
    _, _, features = context.codegen().magic_tuple()
    return 16 if "+avx512f" in features else 8


def vector(element, lanes):
    return ir.VectorType(element, lanes)


def number(value, lanes):
    return ir.Constant(vector(F32, lanes), [value] * lanes)


def integer(value, lanes, of=I32):
    return ir.Constant(vector(of, lanes), [value] * lanes)


def pairs_are_multiplied(context, kind):
    """Whether pairs of numbers of ``kind`` can be multiplied and added to a float32 in one instruction."""
    _, _, features = context.codegen().magic_tuple()
    return kind == types.uint16 and "+avx512bf16" in features


class Code:
    """Writes one intrinsic's instructions."""

    def __init__(self, context, builder):
        self.builder, self.lanes = builder, lanes_of(context)
        self.rounds = pairs_are_multiplied(context, types.uint16)
        self.step = self.lanes * 4
        self.zero = number(0.0, self.lanes)

    # addresses

    def add(self, address, offset):
        return self.builder.add(address, _int(offset))

    def scaled(self, value, factor):
        return self.builder.mul(value, _int(factor))

    def at(self, address, of):
        return self.builder.inttoptr(address, of.as_pointer())

    def index(self, address):
        """The int64 at ``address``."""
        return self.builder.load(self.at(address, I64))

    # vectors

    def load(self, address, of=F32, lanes=None):
        return self.builder.load(self.at(address, vector(of, lanes or self.lanes)), align=2 if of is I16 else 4)

    def prefetch(self, address, locality=3):
        """Have the cache line at ``address`` brought near: to the nearest cache, or the second one if 2."""
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, I32, I32, I32]), "llvm.prefetch.p0")
        self.builder.call(function, [self.builder.inttoptr(address, cgutils.voidptr_t), I32(0), I32(locality), I32(1)])

    def store(self, value, address):
        self.builder.store(value, self.at(address, value.type), align=2 if value.type.element is I16 else 4)

    def everywhere(self, value, lanes=None):
        """A number in all lanes."""
        lanes = lanes or self.lanes
        one = self.builder.insert_element(ir.Constant(vector(value.type, lanes), ir.Undefined), value, I32(0))
        return self.pick(one, one, [0] * lanes)

    def spread(self, address):
        """The float32 at ``address``, in all lanes."""
        return self.everywhere(self.builder.load(self.at(address, F32), align=4))

    def pick(self, first, second, lanes):
        return self.builder.shuffle_vector(first, second, ir.Constant(vector(I32, len(lanes)), lanes))

    def multiply_add(self, a, b, c):
        kind = a.type
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.v{kind.count}f32")
        return self.builder.call(function, [a, b, c])

    def multiply_add_pairs(self, a, b, c):
        """Each lane of ``a`` and ``b`` holds two bfloat16: both products, exact, are added to ``c``."""
        a, b = (self.builder.bitcast(value, vector(I32, self.lanes)) for value in (a, b))
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(c.type, [c.type, a.type, b.type]),
            "llvm.x86.avx512bf16.dpbf16ps.512")
        return self.builder.call(function, [c, a, b])

    def greater(self, a, b):
        """NaN in ``a`` is passed over."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def first_lanes(self, count, lanes=None):
        """The mask of so many lanes."""
        lanes = lanes or self.lanes
        return self.builder.icmp_signed(
            "<", ir.Constant(vector(I64, lanes), list(range(lanes))), self.everywhere(count, lanes))

    # rows of a kind

    def element(self, kind):
        return F32 if kind == types.float32 else I16

    def size_of(self, kind):
        return 4 if kind == types.float32 else 2

    def vectors_of_line(self, kind):
        """How many vectors a cache line holds."""
        return max(1, LINE // (self.lanes * self.size_of(kind)))

    def read(self, address, kind, mask=None):
        """A vector of float32 from numbers of ``kind``; zero where ``mask`` hides."""
        of = self.element(kind)
        return self.wide(self.load(address, of) if mask is None else self.load_some(address, of, mask), kind)

    def load_some(self, address, of, mask):
        """A vector with as many lanes as ``mask`` has; zero where it hides."""
        lanes, size = mask.type.count, 4 if of is F32 else 2
        return self._masked(
            "load", f"v{lanes}{'f32' if of is F32 else 'i16'}.p0", vector(of, lanes),
            [self.at(address, vector(of, lanes)), I32(size), mask, ir.Constant(vector(of, lanes), None)])

    def wide(self, raw, kind):
        """float32 from what numbers of ``kind`` are in memory."""
        if kind == types.float32:
            return raw
        if kind == types.int16:
            return self.builder.fpext(self.builder.bitcast(raw, vector(ir.HalfType(), self.lanes)), self.zero.type)
        wide = self.builder.zext(raw, vector(I32, self.lanes))
        return self.builder.bitcast(self.builder.shl(wide, integer(16, self.lanes)), self.zero.type)

    def halves(self, raw):
        """float32 from a vector that holds two bfloat16 in each lane: the first ones, and the second ones."""
        b, bits = self.builder, self.builder.bitcast(raw, vector(I32, self.lanes))
        return [
            b.bitcast(half, raw.type)
            for half in (b.shl(bits, integer(16, self.lanes)), b.and_(bits, integer(0xFFFF0000, self.lanes)))]

    def zipped(self, first, second):
        """Two vectors with the lanes of both in turns."""
        n = self.lanes
        return [self.pick(first, second, [x for i in range(at, at + n // 2) for x in (i, n + i)]) for at in (0, n // 2)]

    def paired(self, first, second):
        """Two vectors with a bfloat16 of each in every lane, from two that hold two of their own there: those of the
        first two of each four lanes, and those of the last two, since processors interleave within four lanes."""
        n = 2 * self.lanes
        halves = vector(I16, n)
        first, second = (self.builder.bitcast(raw, halves) for raw in (first, second))
        found = (
            self.pick(first, second, [x for f in range(at, n, 8) for i in range(f, f + 4) for x in (i, n + i)])
            for at in (0, 4))
        return [self.builder.bitcast(each, self.zero.type) for each in found]

    def unpaired(self, low, high):
        """float32 of the lanes that :meth:`paired` gives, as their numbers follow each other in a row."""
        n = self.lanes
        fours = [range(f, f + 4) for f in range(0, 2 * n, 4)]
        in_turns = [four for both in zip(fours[: n // 4], fours[n // 4 :], strict=True) for four in both]
        order = [lane for four in in_turns for lane in four]
        return [self.pick(low, high, order[at : at + n]) for at in (0, n)]

    def write(self, value, address, kind, mask=None):
        self.put(self.narrow(value, kind), address, kind, mask)

    def put(self, raw, address, kind, mask=None):
        if mask is None:
            self.store(raw, address)
        else:
            self._masked(
                "store", f"v{self.lanes}{'f32' if raw.type.element is F32 else 'i16'}.p0", ir.VoidType(),
                [raw, self.at(address, raw.type), I32(self.size_of(kind)), mask])

    def convert(self, source, row, size, kind, factor=None):
        """``size`` numbers of ``kind``, times ``factor``, to a row of float32: whole vectors, zero behind the last."""
        def part(element, width, mask):
            value = self.read(self.builder.add(source, self.scaled(element, self.size_of(kind))), kind, mask)
            self.store(
                value if factor is None else self.builder.fmul(value, factor),
                self.builder.add(row, self.scaled(element, 4)))

        self.over_row(size, 1, part)

    def rounded(self, value, kind):
        """float32 that numbers of ``kind`` hold."""
        return self.wide(self.narrow(value, kind), kind)

    def narrow(self, value, kind):
        """What it is in memory, rounded to the nearest, and to the even one of two; NaN stays NaN. Where the processor
        makes bfloat16 itself, numbers below 10^-38 become zero."""
        b, lanes = self.builder, self.lanes
        if kind == types.float32:
            return value
        if kind == types.int16:
            return b.bitcast(b.fptrunc(value, vector(ir.HalfType(), lanes)), vector(I16, lanes))
        if self.rounds:
            function = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(vector(_BFloat16(), lanes), [value.type]),
                "llvm.x86.avx512bf16.cvtneps2bf16.512")
            return b.bitcast(b.call(function, [value]), vector(I16, lanes))
        bits = b.bitcast(value, vector(I32, lanes))
        odd = b.and_(b.lshr(bits, integer(16, lanes)), integer(1, lanes))
        near = b.add(bits, b.add(odd, integer(0x7FFF, lanes)))
        near = b.select(b.fcmp_unordered("uno", value, value), b.or_(bits, integer(0x400000, lanes)), near)
        return b.trunc(b.lshr(near, integer(16, lanes)), vector(I16, lanes))

    def _masked(self, what, suffix, result, arguments):
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(result, [a.type for a in arguments]), f"llvm.masked.{what}.{suffix}")
        return self.builder.call(function, arguments)

    # loops

    @contextmanager
    def loop(self, count):
        with cgutils.for_range(self.builder, count) as found:
            yield found.index

    def cases(self, value, most):
        """Code for each number that ``value`` may be, from 1 to ``most``, which stands for more, too."""
        for case in range(1, most + 1):
            with self.builder.if_then(self.builder.icmp_signed("==" if case < most else ">=", value, I64(case))):
                yield case

    def variable(self, value):
        """Its address: something that changes in a loop, from ``value`` on. LLVM keeps it in a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def over_row(self, size, block, body, whole=False):
        """``body(first, width, mask)`` for ``width`` vectors after ``width`` vectors of a row of ``size`` numbers:
        ``block`` at a time, then one at a time, then the part of one that is left, masked, unless rows are ``whole``
        vectors. ``first`` counts numbers. A ``size`` that is an int makes no loop."""
        b, lanes = self.builder, self.lanes
        if isinstance(size, int):
            vectors, rest = divmod(size, lanes)
            for first in range(0, vectors, block):
                body(I64(first * lanes), min(block, vectors - first), None)
            if rest:
                body(I64(vectors * lanes), 1, self.first_lanes(I64(rest)))
            return
        blocks = b.udiv(size, I64(block * lanes)) if block > 1 else I64(0)
        if block > 1:
            with self.loop(blocks) as i:
                body(self.scaled(i, block * lanes), block, None)
        done = self.scaled(blocks, block * lanes)
        singles = b.udiv(b.sub(size, done), I64(lanes))
        with self.loop(singles) as i:
            body(b.add(done, self.scaled(i, lanes)), 1, None)
        if whole:
            return
        done = b.add(done, self.scaled(singles, lanes))
        rest = b.sub(size, done)
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            body(done, 1, self.first_lanes(rest))

    # over the lanes

    def totals(self, four, combine=None):
        """The sums of four vectors' lanes, in a vector of four; or what ``combine`` makes of them, two by two."""
        return self.fours([self.quarters(four, combine)], combine)

    def quarters(self, four, combine=None):
        """Each four lanes of it hold a part of the four vectors' sums over their lanes, as in :meth:`totals`."""
        combine = combine or self.builder.fadd

        def interleave(a, b, pair):
            """Add neighbours, within each four lanes: those ``pair`` apart."""
            n, fours = a.type.count, range(0, a.type.count, 4)
            if pair == 2:
                low = [x for f in fours for x in (f, n + f, f + 1, n + f + 1)]
                high = [x for f in fours for x in (f + 2, n + f + 2, f + 3, n + f + 3)]
            else:
                low = [x for f in fours for x in (f, f + 1, n + f, n + f + 1)]
                high = [x for f in fours for x in (f + 2, f + 3, n + f + 2, n + f + 3)]
            return combine(self.pick(a, b, low), self.pick(a, b, high))

        return interleave(interleave(four[0], four[1], 2), interleave(four[2], four[3], 2), 1)

    def fours(self, quarters, combine=None):
        """The sums, in their order, whose :meth:`quarters` are given: of one, or of as many as fill a vector."""
        combine, rounds = combine or self.builder.fadd, len(quarters) > 1
        while len(quarters) > 1:
            even, odd = ([i for f in range(at, 2 * self.lanes, 8) for i in range(f, f + 4)] for at in (0, 4))
            quarters = [
                combine(self.pick(a, b, even), self.pick(a, b, odd))
                for a, b in zip(quarters[::2], quarters[1::2], strict=True)]
        [found] = quarters
        while not rounds and found.type.count > 4:
            found = self.folded(found, combine)
        return found

    def folded(self, value, combine):
        half = value.type.count // 2
        return combine(
            self.pick(value, value, list(range(half))), self.pick(value, value, list(range(half, 2 * half))))

    def single(self, value, combine):
        while value.type.count > 1:
            value = self.folded(value, combine)
        return self.builder.extract_element(value, I32(0))

    # functions

    def exp(self, x):
        """e^x to about one part in 10^7, from -87 to 88; 0 below. As in Cephes: x = n ln 2 + r, and a polynomial of r.

        n is rounded by adding a number at which float32 counts whole ones; its bits then are the exponent."""
        b, n = self.builder, x.type.count
        shifted = self.multiply_add(x, number(1 / math.log(2), n), number(12582912.0, n))
        whole = b.fsub(shifted, number(12582912.0, n))
        r = self.multiply_add(whole, number(-0.693359375, n), x)
        r = self.multiply_add(whole, number(2.12194440e-4, n), r)
        series = number(1.9875691500e-4, n)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            series = self.multiply_add(series, r, number(factor, n))
        series = self.multiply_add(series, b.fmul(r, r), b.fadd(r, number(1.0, n)))
        power = b.add(b.shl(b.bitcast(shifted, vector(I32, n)), integer(23, n)), integer(127 << 23, n))
        found = b.fmul(series, b.bitcast(power, x.type))
        return b.select(b.fcmp_ordered("<", x, number(-87.0, n)), number(0.0, n), found)

    def power(self, x):
        """2^x to about two parts in 10^7, from -126 to 126; 0 below. x = n + r, and a polynomial of r, exact at 0.

        As in :meth:`exp` n is rounded by adding a number at which float32 counts whole ones; this one's last bits are
        those of the exponent 0."""
        b, n = self.builder, x.type.count
        whole = number(12582912.0 + 127, n)
        shifted = b.fadd(x, whole)
        r = b.fsub(x, b.fsub(shifted, whole))
        series = number(1.326472731307149e-3, n)
        for factor in (9.671512991189957e-3, 5.550733581185341e-2, 2.4022242426872253e-1, 6.931470036506653e-1, 1.0):
            series = self.multiply_add(series, r, number(factor, n))
        power = b.bitcast(b.shl(b.bitcast(shifted, vector(I32, n)), integer(23, n)), x.type)
        return b.select(b.fcmp_ordered("<", x, number(-126.0, n)), number(0.0, n), b.fmul(series, power))

    def tanh(self, x):
        """To about one part in 10^7 of 1. Beyond 10 float32 knows no other than 1."""
        b, n = self.builder, x.type.count
        for bound, beyond in ((10.0, ">"), (-10.0, "<")):
            x = b.select(b.fcmp_ordered(beyond, x, number(bound, n)), number(bound, n), x)
        power, one = self.exp(b.fadd(x, x)), number(1.0, n)
        return b.fdiv(b.fsub(power, one), b.fadd(power, one))


def _int(value):
    return I64(value) if isinstance(value, int) else value
