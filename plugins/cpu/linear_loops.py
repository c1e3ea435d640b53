"""The innermost loops of products with quantised weights; see :mod:`.vectors` for the conventions, and
:mod:`.linear_words` for how weights and rows lie."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.plugins.cpu.linear_words import GROUP, SUMMED, TILE, VECTOR, VECTORS, block_bytes
from hotswap.plugins.cpu.vectors import I16, I32, I64, LINE, Code, integer, vector

WORD = types.int64
FIRST_LINES = 32


def dots_are_added(context):
    """Whether four products of 8-bit numbers can be added up in one instruction, for as many as a tile has at once."""
    triple, _, features = context.codegen().magic_tuple()
    return triple.startswith("x86_64") and "+avx512vnni" in features and "+avx512bw" in features


@intrinsic
def bytes_of(typing, kind):
    """Of a number of ``kind``."""

    def generate(context, builder, signature, arguments):
        return I64(Code(context, builder).size_of(kind))

    return types.int64(kind), generate


@intrinsic
def approach(typing, address):
    """Have the first lines at ``address`` brought near. What reads on from there, the processor follows by itself."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder)
        for line in range(FIRST_LINES):
            code.prefetch(code.add(arguments[0], LINE * line))
        return context.get_dummy_value()

    return types.void(WORD), generate


@intrinsic(prefer_literal=True)
def multiply(
    typing, numbers, groups, weights, ahead, ahead_step, apart, bias, out, out_row, count, rows, form, kind,
):
    """A block of ``rows`` rows in 8 bits times a tile's weights, plus the bias: ``count`` output features of each row,
    at most those of the tile, to ``out``, rounded to ``kind``. ``form``: 8-bit numbers if uint8, 4-bit ones if int8.

    With each group, what lies ``apart`` bytes apart from ``ahead`` on is brought near, and ``ahead_step`` is added.

    Each row's sums are made in the same order, whatever ``rows`` is: equal input gives equal bits."""
    if not isinstance(rows, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        numbers, groups, weights, ahead, ahead_step, apart, bias, out, out_row, count, *_ = arguments
        if not dots_are_added(context):
            raise RuntimeError("products of 8-bit numbers need AVX-512 with VNNI: see no_kernels")
        code, b = Code(context, builder), builder
        block = _Block(code, rows.literal_value, 8 if form == types.uint8 else 4)
        start = [code.load(code.add(bias, 4 * VECTOR * j)) for j in range(VECTORS)]
        totals = [start] * block.rows
        if block.bits == 4:
            numbers, weights, totals = block.least(numbers, weights, groups, totals)
        totals = block.products(numbers, weights, groups, totals, (ahead, ahead_step, apart))
        for j in range(VECTORS):
            mask = code.first_lanes(code.add(count, -VECTOR * j))
            for row in range(block.rows):
                there = code.add(b.add(out, code.scaled(out_row, row)), VECTOR * j * code.size_of(kind))
                code.write(totals[row][j], there, kind, mask)
        return context.get_dummy_value()

    return types.void(*[WORD] * 10, rows, form, kind), generate


class _Loop:
    """Code that runs ``count`` times, at least once. ``values`` begin as ``start``, and go on as ``end`` is told."""

    def __init__(self, code, count, start):
        self._code, b = code, code.builder
        before, self._body = b.basic_block, b.append_basic_block("again")
        b.branch(self._body)
        b.position_at_end(self._body)
        self._phis = [b.phi(value.type) for value in (count, *start)]
        for phi, value in zip(self._phis, (count, *start), strict=True):
            phi.add_incoming(value, before)
        self.values = self._phis[1:]

    def end(self, values):
        b = self._code.builder
        left = self._code.add(self._phis[0], -1)
        for phi, value in zip(self._phis, (left, *values), strict=True):
            phi.add_incoming(value, b.basic_block)
        behind = b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", left, I64(0)), self._body, behind)
        b.position_at_end(behind)


class _Block:
    """Writes code that multiplies a block of rows with a tile: for each row and vector a sum and a total."""

    def __init__(self, code, rows, bits):
        self.code, self.rows, self.bits = code, rows, bits

    def least(self, numbers, weights, groups, totals):
        """``totals`` and all groups' least values times the sums of their numbers: whole numbers, two groups at once,
        ``SUMMED`` pairs before they become float32. Returns where blocks and totals begin, too."""
        code, b = self.code, self.code.builder
        units = [code.spread(code.add(numbers, 4 * row)) for row in range(self.rows)]
        of_tile = [code.load(code.add(weights, 4 * VECTOR * j)) for j in range(VECTORS)]
        scales = [[b.fmul(unit, scale) for scale in of_tile] for unit in units]
        pairs = b.lshr(code.add(groups, 1), I64(1))
        outer = _Loop(
            code, b.udiv(code.add(pairs, SUMMED - 1), I64(SUMMED)),
            [pairs, code.add(numbers, 4 * self.rows), code.add(weights, 4 * TILE), *sum(totals, [])])
        left, row_pair, pair, *flat = outer.values
        some = b.select(b.icmp_signed("<", left, I64(SUMMED)), left, I64(SUMMED))
        zero = ir.Constant(vector(I32, VECTOR), None)
        inner = _Loop(code, some, [row_pair, pair, *[zero] * len(flat)])
        row_pair, pair, *sums = inner.values
        least = [code.load(code.add(pair, 4 * VECTOR * j), I32) for j in range(VECTORS)]
        sums = [
            _add_products(code, "vpdpwssd", sums[VECTORS * row + j], least[j],
                          b.load(code.at(code.add(row_pair, 4 * row), I32), align=4))
            for row in range(self.rows) for j in range(VECTORS)]
        row_pair, pair = code.add(row_pair, 4 * self.rows), code.add(pair, 4 * TILE)
        inner.end([row_pair, pair, *sums])
        flat = [code.multiply_add(b.sitofp(whole, code.zero.type), scale, total)
                for whole, scale, total in zip(sums, sum(scales, []), flat, strict=True)]
        outer.end([code.add(left, -SUMMED), row_pair, pair, *flat])
        return row_pair, pair, self._by_row(flat)

    def products(self, numbers, weights, groups, totals, near):
        """``totals`` and all groups' products."""
        code, b = self.code, self.code.builder
        ahead, ahead_step, apart = near
        loop = _Loop(code, groups, [numbers, weights, ahead, *sum(totals, [])])
        numbers, weights, ahead, *flat = loop.values
        line = ahead
        for _ in range(-(-block_bytes(self.bits) // LINE) + (2 if self.bits == 4 else 0)):  # least values, too
            code.prefetch(line, 2)
            line = b.add(line, apart)
        found = self._scaled(numbers, weights, self._by_row(flat), self._sums(numbers, weights))
        loop.end([
            code.add(numbers, self.rows * (GROUP + (4 if self.bits == 4 else 8))),
            code.add(weights, block_bytes(self.bits)), b.add(ahead, ahead_step), *sum(found, [])])
        return found

    def _sums(self, numbers, weights):
        """Of a group: for each row and vector the sum of the products of their numbers, int32."""
        code, b = self.code, self.code.builder
        start = ir.Constant(vector(I32, VECTOR), None)
        sums = [[start if self.bits == 4 else code.everywhere(
            b.load(code.at(code.add(numbers, self.rows * (GROUP + 4) + 4 * row), I32), align=4))] * VECTORS
            for row in range(self.rows)]
        for i in range(GROUP // 4 * self.bits // 8):
            for j in range(VECTORS):
                fours = _fours(code, code.add(weights, 4 * (TILE * i + VECTOR * j)), self.bits)
                for at, four in enumerate(fours, i * len(fours)):
                    for row in range(self.rows):
                        word = b.load(code.at(code.add(numbers, GROUP * row + 4 * at), I32), align=4)
                        sums[row][j] = _add_products(code, "vpdpbusd", sums[row][j], four, word)
        return sums

    def _scaled(self, numbers, weights, totals, sums):
        """``totals`` and a group's sums times the scales of weights and rows."""
        code, b = self.code, self.code.builder
        found = [list(of_row) for of_row in totals]
        for j in range(VECTORS):
            address = code.add(weights, TILE * GROUP * self.bits // 8 + 2 * VECTOR * j)
            scale = b.fpext(b.load(code.at(address, vector(ir.HalfType(), VECTOR)), align=2), code.zero.type)
            for row in range(self.rows):
                own = code.spread(code.add(numbers, self.rows * GROUP + 4 * row))
                value = b.sitofp(sums[row][j], code.zero.type)
                found[row][j] = code.multiply_add(value, b.fmul(scale, own), totals[row][j])
        return found

    def _by_row(self, flat):
        return [flat[VECTORS * row : VECTORS * (row + 1)] for row in range(self.rows)]


def _fours(code, address, bits):
    """Weights, for every four input features a vector of four bytes for each of its output features: of 8-bit numbers
    one such vector, of 4-bit ones two."""
    b = code.builder
    if bits == 8:
        return [b.load(code.at(address, vector(I32, VECTOR)), align=2)]
    words = vector(I16, 2 * VECTOR)  # bytes would be shifted by a multiplication
    raw, low = b.load(code.at(address, words), align=2), integer(0x0F0F, 2 * VECTOR, I16)
    halves = b.and_(raw, low), b.and_(b.lshr(raw, integer(4, 2 * VECTOR, I16)), low)
    return [b.bitcast(half, vector(I32, VECTOR)) for half in halves]


def _add_products(code, how, total, of_weights, word):
    """For each output feature what its word of weights has, times what ``word`` has, added to ``total``: four bytes, of
    weights without a sign; or two int16."""
    kind = vector(I32, VECTOR)
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(kind, [kind] * 3), f"llvm.x86.avx512.{how}.512")
    return code.builder.call(function, [total, of_weights, code.everywhere(word)])
