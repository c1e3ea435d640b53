"""Loops over one row of numbers: conversion, sums, softcap; see :mod:`.vectors` for the conventions."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.vectors import F32, I32, I64, Code

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
def power(typing, exponent):
    """2 to ``exponent``, as in rows of weights."""

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
