"""The innermost loops of a decoder's elementwise operators; see :mod:`.vectors` for the conventions. ``size`` counts
numbers of ``kind``, of which rows are made."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.vectors import BLOCK, Code, number

WORD = types.int64


class Row:
    """Numbers in a row at an address: vector ``i`` behind number ``first``."""

    def __init__(self, code, address, kind):
        self.code, self.address, self.kind = code, address, kind

    def at(self, first, i):
        code = self.code
        return code.builder.add(self.address, code.scaled(code.add(first, i * code.lanes), code.size_of(self.kind)))

    def read(self, first, i, mask):
        return self.code.read(self.at(first, i), self.kind, mask)

    def write(self, value, first, i, mask):
        self.code.write(value, self.at(first, i), self.kind, mask)

    def behind(self, size):
        """The row that begins ``size`` numbers further on."""
        code = self.code
        return Row(code, code.builder.add(self.address, code.scaled(size, code.size_of(self.kind))), self.kind)


def _over(code, size, part):
    """``part(first, i, mask)`` for each vector of a row."""
    def several(first, width, mask):
        for i in range(width):
            part(first, i, mask)

    code.over_row(size, BLOCK, several)


def _sum_of_squares(code, size, values):
    """Of ``values(first, i, mask)``, in as many sums as vectors are worked on side by side."""
    b = code.builder
    totals = [code.variable(code.zero) for _ in range(BLOCK)]

    def part(first, i, mask):
        value = values(first, i, mask)
        b.store(code.multiply_add(value, value, b.load(totals[i])), totals[i])

    _over(code, size, part)
    one, two, three, four = map(b.load, totals)
    return code.single(b.fadd(b.fadd(one, two), b.fadd(three, four)), b.fadd)


@intrinsic
def squares(typing, x, size, kind):
    """The sum of a row's squares."""

    def generate(context, builder, signature, arguments):
        x, size, _ = arguments
        code = Code(context, builder)
        return _sum_of_squares(code, size, Row(code, x, kind).read)

    return types.float32(WORD, WORD, kind), generate


@intrinsic
def add_squares(typing, x, other, size, kind):
    """Add another row to a row, in place; returns the sum of the squares of what is there then."""

    def generate(context, builder, signature, arguments):
        x, other, size, _ = arguments
        code = Code(context, builder)
        row, added = Row(code, x, kind), Row(code, other, kind)

        def summed(first, i, mask):
            raw = code.narrow(builder.fadd(row.read(first, i, mask), added.read(first, i, mask)), kind)
            code.put(raw, row.at(first, i), kind, mask)
            return code.wide(raw, kind)

        return _sum_of_squares(code, size, summed)

    return types.float32(WORD, WORD, WORD, kind), generate


@intrinsic
def scaled_by(typing, x, factor, weight, out, size, kind):
    """A row times ``factor``, rounded, times ``weight``."""

    def generate(context, builder, signature, arguments):
        x, factor, weight, out, size, _ = arguments
        code = Code(context, builder)
        row, weights, target = (Row(code, address, kind) for address in (x, weight, out))
        factor = code.everywhere(factor)

        def part(first, i, mask):
            value = code.rounded(builder.fmul(row.read(first, i, mask), factor), kind)
            target.write(builder.fmul(value, weights.read(first, i, mask)), first, i, mask)

        _over(code, size, part)
        return context.get_dummy_value()

    return types.void(WORD, types.float32, WORD, WORD, WORD, kind), generate


@intrinsic
def rotate(typing, x, cos, sin, size, kind):
    """Pairs (i, i + size / 2) of a row by their angles, in place."""

    def generate(context, builder, signature, arguments):
        x, cos, sin, size, _ = arguments
        code = Code(context, builder)
        half = builder.udiv(size, size.type(2))
        first_half, cosines, sines = (Row(code, address, kind) for address in (x, cos, sin))
        second_half = first_half.behind(half)

        def part(first, i, mask):
            a, b, c, s = (row.read(first, i, mask) for row in (first_half, second_half, cosines, sines))
            minus = builder.fmul(b, builder.fneg(s))
            first_half.write(code.multiply_add(a, c, minus), first, i, mask)
            second_half.write(code.multiply_add(b, c, builder.fmul(a, s)), first, i, mask)

        _over(code, half, part)
        return context.get_dummy_value()

    return types.void(WORD, WORD, WORD, WORD, kind), generate


@intrinsic
def gate(typing, x, out, size, kind):
    """silu of a row, rounded, times the row behind it."""

    def generate(context, builder, signature, arguments):
        x, out, size, _ = arguments
        code = Code(context, builder)
        gates, target = Row(code, x, kind), Row(code, out, kind)
        ups = gates.behind(size)
        one, most = number(1.0, code.lanes), number(88.0, code.lanes)  # e^88 is about the largest float32

        def part(first, i, mask):
            value = gates.read(first, i, mask)
            power = builder.fneg(value)
            power = code.exp(builder.select(builder.fcmp_ordered(">", power, most), most, power))
            silu = code.rounded(builder.fdiv(value, builder.fadd(one, power)), kind)
            target.write(builder.fmul(silu, ups.read(first, i, mask)), first, i, mask)

        _over(code, size, part)
        return context.get_dummy_value()

    return types.void(WORD, WORD, WORD, kind), generate
