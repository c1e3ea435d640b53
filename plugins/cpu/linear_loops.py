"""The innermost loops of products with quantised weights; see :mod:`.vectors` for the conventions, and
:mod:`.linear_words` for how weights lie."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.plugins.cpu.linear_words import GROUP, TILE, block_bytes
from hotswap.plugins.cpu.vectors import F32, I32, I64, Code, number, vector

WORD = types.int64
I8 = ir.IntType(8)
LARGEST = 127.0


def dots_are_added(context):
    """Whether four products of 8-bit numbers can be added up in one instruction, for as many as a tile has at once."""
    triple, _, features = context.codegen().magic_tuple()
    return triple.startswith("x86_64") and "+avx512vnni" in features and "+avx512bw" in features


@intrinsic
def bytes_of_block(typing, form):
    """Of a tile's group, in a form of weights."""

    def generate(context, builder, signature, arguments):
        return I64(block_bytes(8 if form == types.uint8 else 4))

    return types.int64(form), generate


@intrinsic
def bytes_of(typing, kind):
    """Of a number of ``kind``."""

    def generate(context, builder, signature, arguments):
        return I64(Code(context, builder).size_of(kind))

    return types.int64(kind), generate


def _unary(code, name, value):
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(value.type, [value.type]), f"llvm.{name}.v{value.type.count}f32")
    return code.builder.call(function, [value])


@intrinsic
def shrink(typing, x, size, numbers, scales, sums, kind):
    """A row in 8 bits: each group's numbers, its scale, and the sum of its numbers times that, float32. The largest
    magnitude becomes 127. Where a group has NaN or infinity, its scale is none either."""

    def generate(context, builder, signature, arguments):
        x, size, numbers, scales, sums, _ = arguments
        code, b = Code(context, builder), builder
        if code.lanes != TILE:
            raise RuntimeError(f"tiles are {TILE} lanes wide, and vectors {code.lanes}: see no_kernels")
        with code.loop(b.udiv(code.add(size, GROUP - 1), I64(GROUP))) as group:
            first = code.scaled(group, GROUP)
            halves = []
            for offset in (0, TILE):
                begin = code.add(first, offset)
                halves.append(code.read(
                    b.add(x, code.scaled(begin, code.size_of(kind))), kind, code.first_lanes(b.sub(size, begin))))
            low, high = (_unary(code, "fabs", half) for half in halves)
            peak = code.single(code.greater(low, high), code.greater)
            wrong = b.fcmp_unordered("uno", *halves)
            wrong = b.icmp_unsigned("!=", b.bitcast(wrong, ir.IntType(TILE)), ir.IntType(TILE)(0))
            scale = b.select(wrong, F32(float("nan")), b.fmul(peak, F32(1 / LARGEST)))
            factor = b.select(b.fcmp_ordered(">", peak, F32(0.0)), b.fdiv(F32(LARGEST), peak), F32(0.0))
            total = None
            for offset, half in zip((0, TILE), halves, strict=True):
                value = b.fmul(half, code.everywhere(factor))
                for bound, beyond in ((LARGEST, "<"), (-LARGEST, ">")):  # what is no number becomes one
                    limit = number(bound, TILE)
                    value = b.select(b.fcmp_ordered(beyond, value, limit), value, limit)
                whole = b.fptosi(_unary(code, "nearbyint", value), vector(I32, TILE))
                there = code.add(b.add(numbers, first), offset)
                b.store(b.trunc(whole, vector(I8, TILE)), code.at(there, vector(I8, TILE)), align=1)
                total = whole if total is None else b.add(total, whole)
            count = b.sitofp(code.single(total, b.add), F32)
            for target, value in ((scales, scale), (sums, b.fmul(scale, count))):
                b.store(value, code.at(b.add(target, code.scaled(group, 4)), F32), align=4)
        return context.get_dummy_value()

    return types.void(WORD, WORD, WORD, WORD, WORD, kind), generate


@intrinsic(prefer_literal=True)
def multiply(
    typing, numbers, scales, sums, groups, weights, bias, out, out_row, count, rows, form, kind,
):
    """``rows`` rows in 8 bits times a tile's weights, plus the bias: ``count`` output features of each row, at most
    those of a tile, to ``out``, rounded to ``kind``. ``form``: 8-bit numbers if uint8, 4-bit ones if int8.

    Each row's sums are made in the same order, whatever ``rows`` is: equal input gives equal bits."""
    if not isinstance(rows, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        numbers, scales, sums, groups, weights, bias, out, out_row, count, *_ = arguments
        code, b, bits = Code(context, builder), builder, 8 if form == types.uint8 else 4
        if not dots_are_added(context):
            raise RuntimeError("products of 8-bit numbers need AVX-512 with VNNI: see no_kernels")
        places = range(rows.literal_value)
        row_bytes = code.scaled(groups, GROUP), code.scaled(groups, 4)
        lines = [[b.add(start, code.scaled(size, row)) for start, size in (
            (numbers, row_bytes[0]), (scales, row_bytes[1]), (sums, row_bytes[1]))] for row in places]
        totals = [code.variable(code.zero) for _ in places]
        with code.loop(groups) as group:
            block = b.add(weights, code.scaled(group, block_bytes(bits)))
            fours = _fours(code, block, bits)
            scale, least = (
                b.fpext(b.load(code.at(code.add(block, TILE * (GROUP * bits // 8 + 2 * i)),
                                       vector(ir.HalfType(), TILE)), align=2), code.zero.type) for i in (0, 1))
            dots = [ir.Constant(vector(I32, TILE), None) for _ in places]
            for k, four in enumerate(fours):
                for row in places:
                    there = code.add(b.add(lines[row][0], code.scaled(group, GROUP)), 4 * k)
                    dots[row] = _add_dots(code, dots[row], four, b.load(code.at(there, I32), align=4))
            for row in places:
                own, total = (code.spread(b.add(line, code.scaled(group, 4))) for line in lines[row][1:])
                value = b.sitofp(dots[row], code.zero.type)
                found = code.multiply_add(value, b.fmul(scale, own), b.load(totals[row]))
                b.store(code.multiply_add(least, total, found), totals[row])
        offset, mask = code.load(bias), code.first_lanes(count)
        for row in places:
            code.write(b.fadd(b.load(totals[row]), offset), b.add(out, code.scaled(out_row, row)), kind, mask)
        return context.get_dummy_value()

    return types.void(*[WORD] * 9, rows, form, kind), generate


def _fours(code, block, bits):
    """A group's weights: for every four input features a vector of four bytes for each output feature of the tile."""
    b, of = code.builder, vector(I8, 4 * TILE)
    found = []
    for i in range(GROUP // 4 * bits // 8):
        raw = b.load(code.at(code.add(block, 4 * TILE * i), of), align=2)
        if bits == 8:
            found.append(raw)
        else:
            found += [b.and_(raw, ir.Constant(of, [15] * (4 * TILE))), b.lshr(raw, ir.Constant(of, [4] * (4 * TILE)))]
    return [b.bitcast(each, vector(I32, TILE)) for each in found]


def _add_dots(code, total, four, word):
    """For each output feature, its four unsigned bytes times the four signed ones in ``word``, added to ``total``."""
    kind = vector(I32, TILE)
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(kind, [kind] * 3), "llvm.x86.avx512.vpdpbusd.512")
    return code.builder.call(function, [total, four, code.everywhere(word)])
