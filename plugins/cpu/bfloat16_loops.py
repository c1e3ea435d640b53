"""The innermost loop of products with bfloat16 weights; see :mod:`.vectors` for the conventions, and
:mod:`.bfloat16_words` for how weights lie."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.bfloat16_words import VECTORS
from hotswap.plugins.cpu.vectors import I64, Code, pairs_are_multiplied

WORD = types.int64
AHEAD = 6144
"""Bytes: with eight rows, what lies so far behind is brought near, in large pages the best of distances up to 48 KiB.
With fewer, reading is all there is to wait for: the processor looks ahead better by itself."""


@intrinsic(prefer_literal=True)
def multiply(typing, x, x_row, left, weights, vectors, pairs, bias, out, out_row, count, rows):
    """``rows`` rows of bfloat16 times a tile's weights, plus the bias: ``count`` output features of each row, at most
    those of a tile, to ``out``. Where only ``left`` rows are there, or ``vectors`` of weights in the last tile, the
    last one stands for the others.

    Sums are float32, and of each row made in the same order, whatever ``rows`` is: equal input gives equal bits."""
    if not isinstance(rows, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        x, x_row, left, weights, vectors, pairs, bias, out, out_row, count, _ = arguments
        code, b = Code(context, builder), builder
        if not pairs_are_multiplied(context, types.uint16):
            raise RuntimeError("products of bfloat16 need AVX-512 with BF16: see no_tiles")

        def places_of(most, there):
            last = b.sub(there, I64(1))
            return [b.select(b.icmp_signed("<", last, I64(i)), last, I64(i)) for i in range(most)]

        places, parts = places_of(rows.literal_value, left), places_of(VECTORS, vectors)
        lines, targets = ([b.add(start, b.mul(place, size)) for place in places] for start, size in (
            (x, x_row), (out, out_row)))
        totals = [[code.variable(code.load(code.add(bias, i * code.step))) for i in range(VECTORS)] for _ in places]
        with code.loop(pairs) as pair:
            at, there = b.add(weights, code.scaled(b.mul(pair, vectors), code.step)), code.scaled(pair, 4)
            sources = [b.add(at, code.scaled(part, code.step)) for part in parts]
            for source in sources if rows.literal_value == 8 else ():
                code.prefetch(code.add(source, AHEAD), 2)
            read = [code.load(source) for source in sources]
            for line, row in zip(lines, totals, strict=True):
                both = code.spread(b.add(line, there))
                for total, weight in zip(row, read, strict=True):
                    b.store(code.multiply_add_pairs(both, weight, b.load(total)), total)
        for target, row in zip(targets, totals, strict=True):
            for i, total in enumerate(row):
                mask = code.first_lanes(b.sub(count, I64(i * code.lanes)))
                code.write(b.load(total), code.add(target, 2 * i * code.lanes), types.uint16, mask)
        return context.get_dummy_value()

    return types.void(*[WORD] * 10, rows), generate
