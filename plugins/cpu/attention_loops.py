"""The innermost loops of attention: scores of keys, sums of values; see :mod:`.vectors` for the conventions.

Keys and values lie in pages. Where a row's vectors are is said by ``places``: for each key the number of its vector in
the cache, int64. ``row_bytes`` is the size of a vector there, and ``size`` its numbers.

*Pairs*: two bfloat16 that follow each other, in the place of a float32. Processors with AVX512_BF16 multiply both, and
add both products to a float32, with one instruction: nothing needs to be converted. A pair's products are exact: scores
differ from those of single numbers by the order of sums alone, and in that numbers below 10^-38 count as zero. Where
values are multiplied in pairs, which is in long rows, their weights are rounded to bfloat16, as FlashAttention rounds
them: each by one part in 2^8 at most, so that a result is off by no more than 2^-8 of its values' mean magnitude under
the weights, and its own rounding to bfloat16 costs up to as much once more. Sums and totals stay float32.

What is to be multiplied in pairs is said by ``form``, by its type: uint8, or int8 for single numbers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from functools import partial

from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.attention_words import AHEAD, ROWS_AT_ONCE
from hotswap.plugins.cpu.vectors import BLOCK, I32, I64, LINE, Code, integer, pairs_are_multiplied, vector

WORD = types.int64


def _in_pairs(context, kind, form):
    return form == types.uint8 and pairs_are_multiplied(context, kind)


@intrinsic
def in_pairs(typing, kind, form):
    """Whether numbers of ``kind`` are multiplied in pairs: where ``form`` says so and the processor does it."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.boolean, _in_pairs(context, kind, form))

    return types.boolean(kind, form), generate


@intrinsic
def score(
    typing, queries, stride, base, places, count, row_bytes, size, scores, scores_stride, factor, lines, kind, form,
):
    """The products of ``lines`` queries, four at most, with ``count`` keys, times ``factor``. Each key is read once.

    Four keys at a time: rows of ``scores`` must reach to a multiple of four, and ``places`` beyond that by ``AHEAD``.
    Queries are rows of float32, or of pairs."""

    def generate(context, builder, signature, arguments):
        queries, stride, base, places, count, row_bytes, size, scores, scores_stride, *rest = arguments
        factor, lines, *_ = rest
        code = Code(context, builder)
        factor = code.everywhere(factor, BLOCK)
        groups = builder.udiv(builder.add(count, I64(BLOCK - 1)), I64(BLOCK))

        def with_lines(lines, kind, size, add):
            with code.loop(groups) as group:
                first = code.scaled(group, BLOCK)
                at = builder.add(places, code.scaled(first, 8))
                keys, later = (
                    [builder.add(base, builder.mul(code.index(code.add(at, 8 * (i + ahead))), row_bytes))
                     for i in range(BLOCK)] for ahead in (0, AHEAD))
                sums = [[code.variable(code.zero) for _ in keys] for _ in range(lines)]

                def multiply(element, width, mask):
                    for i in range(width):
                        here = code.add(element, i * code.lanes)
                        there = code.scaled(here, code.size_of(kind))
                        for key in later if i % code.vectors_of_line(kind) == 0 else ():
                            code.prefetch(builder.add(key, there))
                        read = [code.read(builder.add(key, there), kind, mask) for key in keys]
                        for line, row in enumerate(sums):
                            query = code.load(
                                builder.add(builder.add(queries, code.scaled(stride, line)), code.scaled(here, 4)))
                            for total, key in zip(row, read, strict=True):
                                builder.store(add(query, key, builder.load(total)), total)

                code.over_row(size, 2, multiply)
                for line, row in enumerate(sums):
                    target = builder.add(builder.add(scores, code.scaled(scores_stride, line)), code.scaled(first, 4))
                    code.store(builder.fmul(code.totals([builder.load(total) for total in row]), factor), target)

        for line_count in code.cases(lines, BLOCK):
            if _in_pairs(context, kind, form):
                with_lines(line_count, types.float32, builder.udiv(size, I64(2)), code.multiply_add_pairs)
            else:
                with_lines(line_count, kind, size, code.multiply_add)
        return context.get_dummy_value()

    return types.void(*[WORD] * 9, types.float32, WORD, kind, form), generate


@intrinsic
def approach(typing, base, places, count, row_bytes):
    """Have the first ``count`` vectors brought near."""

    def generate(context, builder, signature, arguments):
        base, places, count, row_bytes = arguments
        code = Code(context, builder)
        with code.loop(count) as i:
            row = builder.add(base, builder.mul(code.index(builder.add(places, code.scaled(i, 8))), row_bytes))
            with code.loop(builder.udiv(code.add(row_bytes, LINE - 1), I64(LINE))) as line:
                code.prefetch(builder.add(row, code.scaled(line, LINE)))
        return context.get_dummy_value()

    return types.void(*[WORD] * 4), generate


@intrinsic
def weigh(typing, weights, weights_stride, base, places, count, row_bytes, size, sums, sums_stride, lines, kind):
    """The sums of ``count`` values under ``lines`` rows of weights, four at most, into rows of float32. Each value is
    read once; ``places`` must reach beyond them by ``AHEAD``."""

    def generate(context, builder, signature, arguments):
        weights, weights_stride, base, places, count, row_bytes, size, sums, sums_stride, lines, _ = arguments
        code = Code(context, builder)

        def columns(line_count, element, width, mask):
            totals = [[code.variable(code.zero) for _ in range(width)] for _ in range(line_count)]
            origin = builder.add(base, code.scaled(element, code.size_of(kind)))
            with code.loop(count) as key:
                at = builder.add(places, code.scaled(key, 8))
                row, later = (
                    builder.add(origin, builder.mul(code.index(code.add(at, 8 * ahead)), row_bytes))
                    for ahead in (0, AHEAD))
                for i in range(0, width, code.vectors_of_line(kind)):
                    code.prefetch(code.add(later, i * code.lanes * code.size_of(kind)))
                values = [
                    code.read(code.add(row, i * code.lanes * code.size_of(kind)), kind, mask) for i in range(width)]
                for line, line_totals in enumerate(totals):
                    weight = code.spread(builder.add(
                        builder.add(weights, code.scaled(weights_stride, line)), code.scaled(key, 4)))
                    for total, value in zip(line_totals, values, strict=True):
                        builder.store(code.multiply_add(weight, value, builder.load(total)), total)
            for line, line_totals in enumerate(totals):
                target = builder.add(builder.add(sums, code.scaled(sums_stride, line)), code.scaled(element, 4))
                for i, total in enumerate(line_totals):
                    code.store(builder.load(total), code.add(target, i * code.step))

        for line_count in code.cases(lines, BLOCK):
            code.over_row(size, BLOCK, partial(columns, line_count))
        return context.get_dummy_value()

    return types.void(*[WORD] * 10, kind), generate


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
        *matrices, factor, _, _ = arguments
        code = Code(context, builder)
        _multiply(code, matrices, _in_pairs(context, kind, form), code.everywhere(factor))
        return context.get_dummy_value()

    return types.void(*[WORD] * 8, types.float32, kind, form), generate


@intrinsic
def multiply_add(typing, a, a_stride, b, b_stride, c, c_stride, depth, columns, kind, form):
    """As :func:`multiply`, added to what is in c."""

    def generate(context, builder, signature, arguments):
        *matrices, _, _ = arguments
        _multiply(Code(context, builder), matrices, _in_pairs(context, kind, form))
        return context.get_dummy_value()

    return types.void(*[WORD] * 8, kind, form), generate


@intrinsic
def transpose(typing, base, places, count, row_bytes, size, columns, columns_stride, kind):
    """``count`` keys (whole vectors of them, as far as ``places`` must reach) as columns: [size, count] float32."""

    def generate(context, builder, signature, arguments):
        base, places, count, row_bytes, size, columns, columns_stride, _ = arguments
        code = Code(context, builder)
        lanes = code.lanes
        low = [x for i in range(lanes // 2) for x in (i, lanes + i)]
        high = [x + lanes // 2 for x in low]
        with code.loop(builder.udiv(count, I64(lanes))) as group:
            first = code.scaled(group, lanes)
            at = builder.add(places, code.scaled(first, 8))
            keys = [
                builder.add(base, builder.mul(code.index(code.add(at, 8 * i)), row_bytes)) for i in range(lanes)]

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

            code.over_row(size, 1, square)
        return context.get_dummy_value()

    return types.void(*[WORD] * 7, kind), generate


@intrinsic
def gather(typing, base, places, count, row_bytes, size, rows, rows_stride, kind):
    """``count`` vectors of the cache as rows of float32, whole vectors, zero behind the last number."""

    def generate(context, builder, signature, arguments):
        base, places, count, row_bytes, size, rows, rows_stride, _ = arguments
        code = Code(context, builder)
        with code.loop(count) as i:
            place = code.index(builder.add(places, code.scaled(i, 8)))
            source, row = builder.add(base, builder.mul(place, row_bytes)), builder.mul(i, rows_stride)
            code.convert(source, builder.add(rows, row), size, kind)
        return context.get_dummy_value()

    return types.void(*[WORD] * 7, kind), generate


@intrinsic
def pair_up(typing, base, places, count, row_bytes, size, rows, rows_stride):
    """``count`` vectors of bfloat16 in pairs, number beside number, as rows of whole vectors."""

    def generate(context, builder, signature, arguments):
        base, places, count, row_bytes, size, rows, rows_stride = arguments
        code = Code(context, builder)
        bits = vector(I32, code.lanes)
        with code.loop(builder.udiv(count, I64(2))) as i:
            at, target = builder.add(places, code.scaled(i, 16)), builder.add(rows, builder.mul(i, rows_stride))
            two = [builder.add(base, builder.mul(code.index(code.add(at, 8 * n)), row_bytes)) for n in range(2)]

            def part(element, width, mask):
                first, second = (
                    builder.bitcast(
                        code.read(builder.add(row, code.scaled(element, 2)), types.uint16, mask), bits) for row in two)
                pair = builder.or_(second, builder.lshr(first, integer(16, code.lanes)))
                code.store(builder.bitcast(pair, code.zero.type), builder.add(target, code.scaled(element, 4)))

            code.over_row(size, 1, part)
        return context.get_dummy_value()

    return types.void(*[WORD] * 7), generate
