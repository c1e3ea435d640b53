"""Loops over one row of numbers: conversion, sums, softmax; see :mod:`.vectors` for the conventions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.vectors import F32, I32, I64, Code, number

WORD = types.int64


@intrinsic
def lanes(typing):
    """How many float32 a vector has."""

    def generate(context, builder, signature, arguments):
        return I64(Code(context, builder).lanes)

    return types.int64(), generate


@intrinsic
def take(typing, source, size, factor, row, kind):
    """A row of float32, whole vectors, from ``size`` numbers at ``source``, times ``factor``."""

    def generate(context, builder, signature, arguments):
        source, size, factor, row, _ = arguments
        code = Code(context, builder)
        code.convert(source, row, size, kind, code.everywhere(factor))
        return context.get_dummy_value()

    return types.void(WORD, WORD, types.float32, WORD, kind), generate


@intrinsic
def give(typing, row, factor, target, size, kind):
    """``size`` numbers at ``target`` from a row of float32, times ``factor``."""

    def generate(context, builder, signature, arguments):
        row, factor, target, size, _ = arguments
        code = Code(context, builder)
        factor = code.everywhere(factor)

        def part(element, width, mask):
            value = builder.fmul(code.load(builder.add(row, code.scaled(element, 4))), factor)
            code.write(value, builder.add(target, code.scaled(element, code.size_of(kind))), kind, mask)

        code.over_row(size, 1, part)
        return context.get_dummy_value()

    return types.void(WORD, types.float32, WORD, WORD, kind), generate


@intrinsic
def fill(typing, row, value, begin, end):
    """The float32 of a row from ``begin`` to before ``end``."""

    def generate(context, builder, signature, arguments):
        row, value, begin, end = arguments
        code = Code(context, builder)
        with code.loop(builder.sub(end, begin)) as i:
            builder.store(value, code.at(builder.add(row, code.scaled(builder.add(begin, i), 4)), F32), align=4)
        return context.get_dummy_value()

    return types.void(WORD, types.float32, WORD, WORD), generate


@intrinsic
def add(typing, row, other, factor, count):
    """To a row of so many whole vectors another one, times ``factor``."""

    def generate(context, builder, signature, arguments):
        row, other, factor, count = arguments
        code = Code(context, builder)
        factor = code.everywhere(factor)
        with code.loop(count) as i:
            at, there = (builder.add(address, code.scaled(i, code.step)) for address in (row, other))
            code.store(code.multiply_add(code.load(there), factor, code.load(at)), at)
        return context.get_dummy_value()

    return types.void(WORD, WORD, types.float32, WORD), generate


@intrinsic
def greatest(typing, row, count):
    """Of a row of whole vectors; NaN is passed over."""

    def generate(context, builder, signature, arguments):
        row, count = arguments
        code = Code(context, builder)
        found = code.variable(number(float("-inf"), code.lanes))
        with code.loop(count) as i:
            value = code.load(builder.add(row, code.scaled(i, code.step)))
            builder.store(code.greater(value, builder.load(found)), found)
        return code.single(builder.load(found), code.greater)

    return types.float32(WORD, WORD), generate


@intrinsic
def powers(typing, row, count, greatest):
    """2 to each number of a row, less ``greatest``, in place; returns their sum."""

    def generate(context, builder, signature, arguments):
        row, count, most = arguments
        code = Code(context, builder)
        most = code.everywhere(most)
        total = code.variable(code.zero)

        def weight(score):
            value = code.power(builder.fsub(score, most))
            builder.store(builder.fadd(builder.load(total), value), total)
            return value

        _replace(code, row, count, weight)
        return code.single(builder.load(total), builder.fadd)

    return types.float32(WORD, WORD, types.float32), generate


@intrinsic
def power(typing, exponent):
    """2 to ``exponent``, as :func:`powers` has it."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder)
        return builder.extract_element(code.power(code.everywhere(arguments[0])), I32(0))

    return types.float32(types.float32), generate


@intrinsic
def total(typing, row):
    """Of a vector's lanes."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder)
        return code.single(code.load(arguments[0]), builder.fadd)

    return types.float32(WORD), generate


@intrinsic
def squash(typing, row, count, cap, most):
    """``most`` tanh(x / cap) of each number of a row, in place: softcap, as in Gemma 2."""

    def generate(context, builder, signature, arguments):
        row, count, cap, most = arguments
        code = Code(context, builder)
        cap, most = code.everywhere(cap), code.everywhere(most)
        _replace(code, row, count, lambda value: builder.fmul(code.tanh(builder.fdiv(value, cap)), most))
        return context.get_dummy_value()

    return types.void(WORD, WORD, types.float32, types.float32), generate


def _replace(code, row, count, function):
    """Each of the ``count`` vectors of a row by what ``function`` makes of it."""
    with code.loop(count) as i:
        at = code.builder.add(row, code.scaled(i, code.step))
        code.store(function(code.load(at)), at)
