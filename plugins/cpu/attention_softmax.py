"""The softmax of attention, over rows of scores in scratch memory: weights take their place.

Scores are float32, in whole vectors, and of base 2. Weights are float32 or, where they are to be multiplied in pairs,
bfloat16, side by side from the beginning of the row on. Totals are sums of weights before they are rounded.
See :mod:`.vectors` for the conventions, and :mod:`.attention_loops` for forms.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from functools import reduce

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.attention_loops import WORD, multiplies_pairs
from hotswap.plugins.cpu.attention_words import SLACK
from hotswap.plugins.cpu.vectors import BLOCK, F32, I64, Code, number

LEAST = np.finfo(np.float32).min
"""Less than any score of a key that a query sees."""


@intrinsic
def softmax(typing, row, columns, most, total, kind, form):
    """Of a row of ``columns`` scores, which are all that there are. A float32 at ``most`` becomes the greatest one,
    whose weight is 1, or ``LEAST`` where no key is seen; and one at ``total`` the sum of weights."""

    def generate(context, builder, signature, arguments):
        row, columns, most, total, *_ = arguments
        code = Code(context, builder)
        greatest = code.single(_greatest(code, row, columns, number(float(LEAST), code.lanes)), code.greater)
        summed = _weigh(code, row, columns, code.everywhere(greatest), code.zero, _kind_of(context, kind, form))
        for place, value in ((most, greatest), (total, code.single(summed, builder.fadd))):
            builder.store(value, code.at(place, F32), align=4)
        return context.get_dummy_value()

    return types.void(*[WORD] * 4, kind, form), generate


@intrinsic
def soften(
    typing, scores, scores_stride, lines, columns, most, totals, sums, sums_stride, padded, kind, form,
):
    """The online softmax of ``lines`` rows of scores, ``columns`` each, of which there are more before and behind. Of
    each line a float32 at ``most`` is the score whose weight is 1, and a vector at ``totals`` has the sums of weights,
    lane by lane. A score that exceeds ``most`` by more than ``SLACK`` takes its place; then all that has been summed is
    brought to it."""

    def generate(context, builder, signature, arguments):
        scores, scores_stride, lines, columns, most, totals, sums, sums_stride, padded, *_ = arguments
        code = Code(context, builder)
        with code.loop(lines) as line:
            row, summed = (
                builder.add(base, builder.mul(line, stride)) for base, stride in
                ((scores, scores_stride), (sums, sums_stride)))
            place, total_place = (
                builder.add(base, code.scaled(line, size)) for base, size in ((most, 4), (totals, code.step)))
            before = code.spread(place)
            shift = code.variable(before)
            found = _greatest(code, row, columns, number(float("-inf"), code.lanes))
            beyond = builder.fcmp_ordered(">", found, builder.fadd(before, number(float(SLACK), code.lanes)))
            bits = ir.IntType(code.lanes)
            with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(beyond, bits), bits(0)), likely=False):
                greatest = code.single(found, code.greater)
                builder.store(greatest, code.at(place, F32), align=4)
                builder.store(code.everywhere(greatest), shift)
                factor = code.power(builder.fsub(before, builder.load(shift)))
                _scale(code, total_place, I64(1), factor)
                _scale(code, summed, builder.udiv(padded, I64(code.lanes)), factor)
            total = _weigh(
                code, row, columns, builder.load(shift), code.load(total_place), _kind_of(context, kind, form))
            code.store(total, total_place)
        return context.get_dummy_value()

    return types.void(*[WORD] * 9, kind, form), generate


def _kind_of(context, kind, form):
    """Of weights."""
    return types.uint16 if multiplies_pairs(context, kind, form) else types.float32


def _vectors(code, row, element, width):
    at = code.builder.add(row, code.scaled(element, 4))
    return [code.load(code.add(at, i * code.step)) for i in range(width)]


def _greatest(code, row, columns, least):
    """Of a row, lane by lane, and of ``least``; NaN is passed over."""
    builder, found = code.builder, code.variable(least)

    def compare(element, width, mask):
        values = _vectors(code, row, element, width)
        builder.store(reduce(code.greater, [*values, builder.load(found)]), found)

    code.over_row(columns, BLOCK, compare, whole=True)
    return builder.load(found)


def _weigh(code, row, columns, shift, total, kind):
    """Weights in place of a row's scores, which are less ``shift``, as numbers of ``kind``; returns ``total`` with them
    added, lane by lane."""
    builder, total = code.builder, code.variable(total)

    def replace(element, width, mask):
        values = [code.power(builder.fsub(value, shift)) for value in _vectors(code, row, element, width)]
        for i, value in enumerate(values):
            builder.store(builder.fadd(builder.load(total), value), total)
            here = code.scaled(code.add(element, i * code.lanes), code.size_of(kind))
            code.write(value, builder.add(row, here), kind)

    code.over_row(columns, BLOCK, replace, whole=True)
    return builder.load(total)


def _scale(code, row, vectors, factor):
    with code.loop(vectors) as i:
        at = code.builder.add(row, code.scaled(i, code.step))
        code.store(code.builder.fmul(code.load(at), factor), at)
