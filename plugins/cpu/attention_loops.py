"""The innermost loops of attention: scores of keys, sums of values; see :mod:`.vectors` for the conventions.

Keys and values lie in pages. Where a row's vectors are is said by ``places``: for each key how many bytes from the
beginning of the cache on its vector is, int64. ``size`` is the numbers of a vector.

*Pairs*: two bfloat16 that follow each other, in the place of a float32. Processors with AVX512_BF16 multiply both, and
add both products to a float32, with one instruction: nothing needs to be converted. A pair's products are exact: scores
differ from those of single numbers by the order of sums alone, and in that numbers below 10^-38 count as zero. Where
values are multiplied in pairs their weights are rounded to bfloat16, as FlashAttention rounds them: each by one part in
2^8 at most, so that a result is off by no more than 2^-8 of its values' mean magnitude under the weights, and its own
rounding to bfloat16 costs up to as much once more. Sums and totals stay float32.

What is to be multiplied in pairs is said by ``form``, by its type: a tuple of uint8, or of int8 for single numbers. Its
length says how large heads are: 1 + n for n times 16 numbers, which makes loops that need no counting, or 1 for any.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from contextlib import nullcontext
from functools import partial

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotswap.plugins.cpu.attention_words import AHEAD, SPARED
from hotswap.plugins.cpu.vectors import BLOCK, I64, LINE, Code, pairs_are_multiplied, vector

WORD = types.int64

NEAR = 2
"""The cache that memory is asked into: a core waits for several times as many lines there as for the nearest one."""


def multiplies_pairs(context, kind, form):
    return form.dtype == types.uint8 and pairs_are_multiplied(context, kind)


def known_size(form, size, of=1):
    """In units of ``of`` numbers: as an int where ``form`` has it, or else ``size``."""
    return (len(form) - 1) * 16 // of if len(form) > 1 else size


@intrinsic
def in_pairs(typing, kind, form):
    """Whether numbers of ``kind`` are multiplied in pairs: where ``form`` says so and the processor does it."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.boolean, multiplies_pairs(context, kind, form))

    return types.boolean(kind, form), generate


@intrinsic
def score(
    typing, queries, stride, base, places, count, size, scores, scores_stride, factor, lines, values, kind, form,
):
    """The products of ``lines`` queries, four at most, with ``count`` keys, times ``factor``. Each key is read once.

    Rows of ``scores``, and ``places``, must reach to whole vectors. Memory is asked for ``AHEAD`` keys ahead, and
    behind the last for the first of ``values``. Queries are rows of float32, or of pairs."""

    def generate(context, builder, signature, arguments):
        queries, stride, base, places, count, size, scores, scores_stride, factor, lines, values, *_ = arguments
        code = Code(context, builder)
        pairs = multiplies_pairs(context, kind, form)
        read_as, add = (types.float32, code.multiply_add_pairs) if pairs else (kind, code.multiply_add)
        numbers = 2 if pairs else 1  # in a place
        known = known_size(form, None, numbers)
        size = builder.udiv(size, I64(numbers)) if known is None else known
        at_once = BLOCK if known is None else code.lanes
        groups = builder.udiv(builder.add(count, I64(at_once - 1)), I64(at_once))
        later = _Later(code, code.scaled(groups, at_once), (base, places), (values, places))
        factor = code.everywhere(factor, at_once)

        def with_lines(lines):
            rows = [builder.add(queries, code.scaled(stride, line)) for line in range(lines)]
            vectors = [_vectors(code, row, known) for row in rows]
            with code.loop(groups) as group:
                first = code.scaled(group, at_once)
                at = builder.add(places, code.scaled(first, 8))
                found = []
                for block in range(0, at_once, BLOCK):
                    keys = [builder.add(base, code.index(code.add(at, 8 * (block + i)))) for i in range(BLOCK)]
                    found.append(
                        _products(code, vectors, keys, later.rows(code.add(first, block)), size, read_as, add))
                for line, quarters in enumerate(zip(*found, strict=True)):
                    target = builder.add(builder.add(scores, code.scaled(scores_stride, line)), code.scaled(first, 4))
                    code.store(builder.fmul(code.fours(quarters), factor), target)

        for line_count in code.cases(lines, BLOCK):
            with_lines(line_count)
        return context.get_dummy_value()

    return types.void(*[WORD] * 8, types.float32, WORD, WORD, kind, form), generate


def _vectors(code, row, size):
    """What gives the vector of a row that is so many behind the one of ``element``. Where the size is known they stay
    in registers."""
    if size is None:
        return lambda element, i: code.load(
            code.builder.add(row, code.scaled(code.add(element, i * code.lanes), 4)))
    held = [code.load(code.add(row, 4 * at)) for at in range(0, size, code.lanes)]
    return lambda element, i: held[element.constant // code.lanes + i]


def _products(code, queries, keys, wanted, size, read_as, add):
    """For each query, of which ``_vectors`` are given, the products with four keys, in :meth:`Code.quarters`. Memory is
    asked for the keys ``wanted``."""
    builder, sums = code.builder, [[code.variable(code.zero) for _ in keys] for _ in queries]

    def multiply(element, width, mask):
        for i in range(width):
            there = code.scaled(code.add(element, i * code.lanes), code.size_of(read_as))
            read = []
            for key, row in zip(keys, wanted, strict=True):
                if i % code.vectors_of_line(read_as) == 0:
                    code.prefetch(builder.add(row, there), NEAR)
                read.append(code.read(builder.add(key, there), read_as, mask))
            for query, totals in zip(queries, sums, strict=True):
                left = query(element, i)
                for total, key in zip(totals, read, strict=True):
                    builder.store(add(left, key, builder.load(total)), total)

    code.over_row(size, 2, multiply)
    return [code.quarters([builder.load(total) for total in totals]) for totals in sums]


class _Later:
    """What is read later, of which memory is asked for four vectors for each four that are read: of ``here``, (base,
    places), and behind its ``count`` of ``following``. It begins ``AHEAD`` vectors ahead, and one in ``SPARED`` is left
    to be asked for between two loops.

    Where there are fewer than ``AHEAD`` of ``here``, as many of the others are asked for as there are."""

    def __init__(self, code, count, here, following):
        self._code, self._count, self._here, self._following = code, count, here, following
        self._near = code.builder.select(code.builder.icmp_signed("<", count, I64(AHEAD)), count, I64(AHEAD))

    def rows(self, first):
        """Where the four are that are asked for with those from the number ``first`` on."""
        code, b = self._code, self._code.builder
        less = b.sub(first, b.udiv(first, I64(SPARED)))
        at = b.add(self._near, b.and_(less, I64(-BLOCK)))
        here = b.icmp_signed("<", at, self._count)
        at = b.select(here, at, b.sub(at, self._count))
        base, places = (b.select(here, *both) for both in zip(self._here, self._following, strict=True))
        places = b.add(places, code.scaled(at, 8))
        return [b.add(base, code.index(code.add(places, 8 * i))) for i in range(BLOCK)]


def _ask(code, address, size):
    with code.loop(code.builder.udiv(code.add(size, LINE - 1), I64(LINE))) as line:
        code.prefetch(code.builder.add(address, code.scaled(line, LINE)), NEAR)


@intrinsic
def ask_for(typing, address, size):
    """Ask memory for so many bytes."""

    def generate(context, builder, signature, arguments):
        _ask(Code(context, builder), *arguments)
        return context.get_dummy_value()

    return types.void(WORD, WORD), generate


@intrinsic
def approach(typing, base, places, count, row_bytes):
    """Ask memory for ``count`` vectors of so many bytes."""

    def generate(context, builder, signature, arguments):
        base, places, count, row_bytes = arguments
        code = Code(context, builder)
        with code.loop(count) as i:
            _ask(code, builder.add(base, code.index(builder.add(places, code.scaled(i, 8)))), row_bytes)
        return context.get_dummy_value()

    return types.void(*[WORD] * 4), generate


@intrinsic
def weigh(
    typing, weights, weights_stride, base, places, count, size, sums, sums_stride, lines, keys, later, kind, form,
):
    """The sums of ``count`` values, whole vectors of weights, under ``lines`` rows of these, four at most, into rows of
    float32. Weights are float32, or bfloat16 where they are multiplied in pairs. Each value is read once. Memory is
    asked for ``AHEAD`` values ahead, and behind the last for ``keys`` at the places ``later``."""

    def generate(context, builder, signature, arguments):
        weights, weights_stride, base, places, count, size, sums, sums_stride, lines, keys, later_places, *_ = arguments
        code, in_all = Code(context, builder), size
        values = _Values(code, kind, form, multiplies_pairs(context, kind, form))
        later = _Later(code, count, (base, places), (keys, later_places))
        size = known_size(form, builder.udiv(size, I64(values.numbers)), values.numbers)

        def columns(line_count, element, width, mask):
            totals = [[code.variable(code.zero) for _ in range(values.numbers * width)] for _ in range(line_count)]
            there = code.scaled(element, values.step)
            with code.loop(builder.udiv(count, I64(BLOCK))) as group:
                first = code.scaled(group, BLOCK)
                wanted, at = later.rows(first), builder.add(places, code.scaled(first, 8))
                rows = [builder.add(builder.add(base, code.index(code.add(at, 8 * i))), there) for i in range(BLOCK)]
                for row in wanted:
                    for i in range(0, width * code.lanes * values.step, LINE):
                        code.prefetch(code.add(builder.add(row, there), i), NEAR)
                for key, vectors in values.read(rows, width, mask):
                    for line, line_totals in enumerate(totals):
                        weight = code.spread(builder.add(
                            builder.add(weights, code.scaled(weights_stride, line)),
                            code.scaled(code.add(first, key), values.weight_size)))
                        for total, vector in zip(line_totals, vectors, strict=True):
                            builder.store(values.add(weight, vector, builder.load(total)), total)
            for line, line_totals in enumerate(totals):
                target = builder.add(
                    builder.add(sums, code.scaled(sums_stride, line)), code.scaled(element, 4 * values.numbers))
                for i, total in enumerate(values.ordered([builder.load(total) for total in line_totals])):
                    exists = builder.icmp_signed("<", code.add(code.scaled(element, 2), i * code.lanes), in_all)
                    with builder.if_then(exists) if mask is not None and i else nullcontext():
                        code.store(total, code.add(target, i * code.step))

        for line_count in code.cases(lines, BLOCK):
            code.over_row(size, BLOCK // values.numbers, partial(columns, line_count))
        return context.get_dummy_value()

    return types.void(*[WORD] * 11, kind, form), generate


class _Values:
    """How values are read, multiplied with weights, and put in order again: one number in each lane; or two that follow
    each other, of which each half of a lane is made a float32; or those of two keys in pairs, number beside number."""

    def __init__(self, code, kind, form, pairs):
        self._code, self._pairs = code, pairs
        self._twos = kind == types.uint16 and form.dtype == types.uint8
        self._kind = types.float32 if self._twos else kind
        self.step = 4 if self._twos else code.size_of(kind)  # bytes of a lane
        self.numbers = 2 if self._twos else 1
        self.weight_size = 2 if pairs else 4
        self.add = code.multiply_add_pairs if pairs else code.multiply_add

    def read(self, rows, width, mask):
        """(which key, vectors) for each of ``rows``, or each two of them: what is to be multiplied with a weight, or
        with two."""
        code = self._code
        found = [
            [code.read(code.add(row, i * code.lanes * self.step), self._kind, mask) for i in range(width)]
            for row in rows]
        if self._pairs:
            for key in range(0, len(rows), 2):
                both = zip(found[key], found[key + 1], strict=True)
                yield key, [half for first, second in both for half in code.paired(first, second)]
        else:
            for key, vectors in enumerate(found):
                yield key, [half for raw in vectors for half in (code.halves(raw) if self._twos else [raw])]

    def ordered(self, sums):
        """As the numbers of a row follow each other, from the sums of what :meth:`read` gives."""
        if not self._twos:
            return sums
        in_order = self._code.unpaired if self._pairs else self._code.zipped
        return [one for i in range(0, len(sums), 2) for one in in_order(sums[i], sums[i + 1])]


@intrinsic
def count_on(typing, at, count, first, step):
    """``first``, ``first + step``, ...: ``count`` int64 at ``at``, and up to seven more."""

    def generate(context, builder, signature, arguments):
        at, count, first, step = arguments
        code = Code(context, builder)
        lanes = ir.Constant(vector(I64, 8), list(range(8)))
        numbers = builder.add(code.everywhere(first, 8), builder.mul(lanes, code.everywhere(step, 8)))
        with code.loop(builder.udiv(code.add(count, 7), I64(8))) as i:
            more = code.everywhere(builder.mul(code.scaled(i, 8), step), 8)
            code.store(builder.add(numbers, more), builder.add(at, code.scaled(i, 64)))
        return context.get_dummy_value()

    return types.void(*[WORD] * 4), generate
