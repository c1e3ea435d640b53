"""The loops of long rows of attention: products of many queries with keys that are turned first.

See :mod:`.vectors` for the conventions, and :mod:`.attention_loops` for places and forms.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.attention_loops import WORD, known_size, multiplies_pairs
from hotswap.plugins.cpu.attention_words import ROWS_AT_ONCE
from hotswap.plugins.cpu.vectors import I32, I64, Code, integer, vector


def _multiply(code, arguments, pairs, factor=None):
    """c = a b factor, or where that is None c = c + a b: of ``ROWS_AT_ONCE`` rows, as many columns at a time as
    registers hold."""
    a, a_stride, b, b_stride, c, c_stride, depth, columns = arguments
    builder, add = code.builder, code.multiply_add_pairs if pairs else code.multiply_add
    lines = [builder.add(a, code.scaled(a_stride, row)) for row in range(ROWS_AT_ONCE)]

    def block(element, width, mask):
        there = code.scaled(element, 4)
        targets = [
            [code.add(builder.add(builder.add(c, there), code.scaled(c_stride, row)), i * code.step)
             for i in range(width)] for row in range(ROWS_AT_ONCE)]
        totals = [
            [code.variable(code.load(target) if factor is None else code.zero) for target in line]
            for line in targets]
        with code.loop(depth) as k:
            row = builder.add(builder.add(b, there), builder.mul(k, b_stride))
            read = [code.load(code.add(row, i * code.step)) for i in range(width)]
            for line, line_totals in zip(lines, totals, strict=True):
                left = code.spread(builder.add(line, code.scaled(k, 4)))
                for total, right in zip(line_totals, read, strict=True):
                    builder.store(add(left, right, builder.load(total)), total)
        for line, line_totals in zip(targets, totals, strict=True):
            for target, total in zip(line, line_totals, strict=True):
                found = builder.load(total)
                code.store(found if factor is None else builder.fmul(found, factor), target)

    code.over_row(columns, 4 if code.lanes == 16 else 2, block, whole=True)


@intrinsic
def multiply(typing, a, a_stride, b, b_stride, c, c_stride, depth, columns, factor, kind, form):
    """c [rows, columns] = a [rows, depth] b [depth, columns] times ``factor``, of ``ROWS_AT_ONCE`` rows; float32, in
    whole vectors. Where numbers are multiplied in pairs each place of a and b holds two of them along the depth."""

    def generate(context, builder, signature, arguments):
        *matrices, depth, columns, factor, _, _ = arguments
        code, pairs = Code(context, builder), multiplies_pairs(context, kind, form)
        known = known_size(form, None, 2 if pairs else 1)
        depth = depth if known is None else I64(known)
        _multiply(code, [*matrices, depth, columns], pairs, code.everywhere(factor))
        return context.get_dummy_value()

    return types.void(*[WORD] * 8, types.float32, kind, form), generate


@intrinsic
def multiply_add(typing, a, a_stride, b, b_stride, c, c_stride, depth, columns, kind, form):
    """As :func:`multiply`, added to what is in c."""

    def generate(context, builder, signature, arguments):
        *matrices, _, _ = arguments
        _multiply(Code(context, builder), matrices, multiplies_pairs(context, kind, form))
        return context.get_dummy_value()

    return types.void(*[WORD] * 8, kind, form), generate


@intrinsic
def transpose(typing, base, places, count, size, columns, columns_stride, kind, form):
    """``count`` keys (whole vectors of them, as far as ``places`` must reach) as columns: [size, count] float32."""

    def generate(context, builder, signature, arguments):
        base, places, count, size, columns, columns_stride, *_ = arguments
        code = Code(context, builder)
        lanes = code.lanes
        low = [x for i in range(lanes // 2) for x in (i, lanes + i)]
        high = [x + lanes // 2 for x in low]
        with code.loop(builder.udiv(count, I64(lanes))) as group:
            first = code.scaled(group, lanes)
            at = builder.add(places, code.scaled(first, 8))
            keys = [
                builder.add(base, code.index(code.add(at, 8 * i))) for i in range(lanes)]

            def square(element, width, mask):
                there = code.scaled(element, code.size_of(kind))
                rows = [code.read(builder.add(key, there), kind, mask) for key in keys]
                for _ in range(lanes.bit_length() - 1):  # each round interleaves row i with row i + lanes / 2
                    pairs = list(zip(rows[: lanes // 2], rows[lanes // 2 :], strict=True))
                    rows = [code.pick(a, b, half) for a, b in pairs for half in (low, high)]
                target = builder.add(
                    builder.add(columns, builder.mul(element, columns_stride)), code.scaled(first, 4))
                for i, row in enumerate(rows):
                    code.store(row, builder.add(target, code.scaled(columns_stride, i)))

            code.over_row(size, 1, square, whole=len(form) > 1)  # known sizes are whole vectors, in pairs, too
        return context.get_dummy_value()

    return types.void(*[WORD] * 6, kind, form), generate


@intrinsic
def gather(typing, base, places, count, size, rows, rows_stride, kind):
    """``count`` vectors of the cache as rows of float32, whole vectors, zero behind the last number."""

    def generate(context, builder, signature, arguments):
        base, places, count, size, rows, rows_stride, _ = arguments
        code = Code(context, builder)
        with code.loop(count) as i:
            source = builder.add(base, code.index(builder.add(places, code.scaled(i, 8))))
            row = builder.mul(i, rows_stride)
            code.convert(source, builder.add(rows, row), size, kind)
        return context.get_dummy_value()

    return types.void(*[WORD] * 6, kind), generate


@intrinsic
def pair_up(typing, base, places, count, size, rows, rows_stride, form):
    """``count`` vectors of bfloat16 in pairs, number beside number, as rows of whole vectors."""

    def generate(context, builder, signature, arguments):
        base, places, count, size, rows, rows_stride, _ = arguments
        code = Code(context, builder)
        bits = vector(I32, code.lanes)
        with code.loop(builder.udiv(count, I64(2))) as i:
            at, target = builder.add(places, code.scaled(i, 16)), builder.add(rows, builder.mul(i, rows_stride))
            two = [builder.add(base, code.index(code.add(at, 8 * n))) for n in range(2)]

            def part(element, width, mask):
                first, second = (
                    builder.bitcast(
                        code.read(builder.add(row, code.scaled(element, 2)), types.uint16, mask), bits) for row in two)
                pair = builder.or_(second, builder.lshr(first, integer(16, code.lanes)))
                code.store(builder.bitcast(pair, code.zero.type), builder.add(target, code.scaled(element, 4)))

            code.over_row(known_size(form, size), 1, part)
        return context.get_dummy_value()

    return types.void(*[WORD] * 6, form), generate
