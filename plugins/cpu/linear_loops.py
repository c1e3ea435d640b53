"""The innermost loops of products with quantised weights; see :mod:`.vectors` for the conventions, and
:mod:`.linear_words` for how weights and rows lie."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotswap.plugins.cpu.linear_rows import bits_of
from hotswap.plugins.cpu.linear_words import GROUP, ROW_BYTES, SPAN, TILE, VECTOR, VECTORS, block_bytes
from hotswap.plugins.cpu.vectors import I16, I32, I64, LINE, Code, integer, vector

WORD = types.int64
FIRST_LINES = 32


def dots_are_added(context):
    """Whether four products of 8-bit numbers can be added up in one instruction, for as many as a tile has at once."""
    triple, _, features = context.codegen().magic_tuple()
    return triple.startswith("x86_64") and "+avx512vnni" in features and "+avx512bw" in features


@intrinsic
def bytes_of_block(typing, form):
    """Of a tile's group, in a form of weights."""

    def generate(context, builder, signature, arguments):
        return I64(block_bytes(bits_of(form), has_scales(form)))

    return types.int64(form), generate


@intrinsic
def bytes_of_bias(typing, groups, form):
    """Of a tile's biases and what stands behind them, in a form of weights."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder)
        return code.scaled(I64(1) if has_scales(form) else code.add(_spans(code, arguments[0]), 1), 4 * TILE)

    return types.int64(WORD, form), generate


def _spans(code, groups):
    return code.builder.udiv(code.add(groups, SPAN - 1), I64(SPAN))


@intrinsic
def bytes_of(typing, kind):
    """Of a number of ``kind``."""

    def generate(context, builder, signature, arguments):
        return I64(Code(context, builder).size_of(kind))

    return types.int64(kind), generate


def has_scales(form):
    """Whether a tile's groups have them."""
    return form != types.uint16


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
    typing, numbers, groups, weights, ahead, ahead_step, apart, bias, out, out_row, count, rows,
    form, kind,
):
    """A block of ``rows`` rows in 8 bits times a tile's weights, plus the bias: ``count`` output features of each row,
    at most those of the tile, to ``out``, rounded to ``kind``. ``form``: 8-bit numbers if uint8, 4-bit ones if int8,
    and 8-bit ones with scales for spans of groups if uint16.

    With each group, what lies ``apart`` bytes apart from ``ahead`` on is brought near, and ``ahead_step`` is added.

    Each row's sums are made in the same order, whatever ``rows`` is: equal input gives equal bits."""
    if not isinstance(rows, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        numbers, groups, weights, ahead, ahead_step, apart, bias, out, out_row, count, *_ = arguments
        code, b = Code(context, builder), builder
        if not dots_are_added(context):
            raise RuntimeError("products of 8-bit numbers need AVX-512 with VNNI: see no_kernels")
        block = _Block(code, rows.literal_value, bits_of(form), has_scales(form))
        near = ahead, ahead_step, apart
        found = (block.by_groups(numbers, groups, weights, near) if has_scales(form)
                 else block.by_spans(numbers, groups, weights, near, code.add(bias, 4 * TILE)))
        for j in range(VECTORS):
            offset, mask = code.load(code.add(bias, 4 * VECTOR * j)), code.first_lanes(code.add(count, -VECTOR * j))
            for row in range(block.rows):
                there = code.add(b.add(out, code.scaled(out_row, row)), VECTOR * j * code.size_of(kind))
                code.write(b.fadd(found[row][j], offset), there, kind, mask)
        return context.get_dummy_value()

    return types.void(*[WORD] * 10, rows, form, kind), generate


class _Block:
    """Writes code that multiplies a block of rows with a tile: for each row and vector a sum and a total."""

    def __init__(self, code, rows, bits, scales):
        """``scales``: whether a tile's groups have them."""
        self.code, self.rows, self.bits, self.size = code, rows, bits, block_bytes(bits, scales)

    def by_groups(self, numbers, groups, weights, near):
        """The totals of all groups' sums, each times its own scale."""
        code, b = self.code, self.code.builder
        entry = b.basic_block
        body, behind = (b.append_basic_block(f"{name}.{self.rows}") for name in ("groups", "finish"))
        b.branch(body)
        b.position_at_end(body)
        left, block, tile, soon = (b.phi(I64) for _ in range(4))
        totals = [[b.phi(code.zero.type) for _ in range(VECTORS)] for _ in range(self.rows)]
        ahead, ahead_step, apart = near
        self._bring(soon, apart)
        found = self._added(block, tile, totals, self._sums(block, tile))
        for value, start, by in (
                (left, groups, -1), (block, numbers, self.rows * ROW_BYTES), (tile, weights, self.size),
                (soon, ahead, ahead_step)):
            value.add_incoming(start, entry)
            value.add_incoming(code.add(value, by), body)
        for total, new in zip(sum(totals, []), sum(found, []), strict=True):
            total.add_incoming(code.zero, entry)
            total.add_incoming(new, body)
        b.cbranch(b.icmp_signed(">", left, I64(1)), body, behind)
        b.position_at_end(behind)
        return found

    def by_spans(self, numbers, groups, weights, near, scales):
        """The totals of all spans' sums of groups, each span times its scale."""
        code, b = self.code, self.code.builder
        ahead, ahead_step, apart = near
        totals, sums = ([[code.variable(code.zero) for _ in range(VECTORS)] for _ in range(self.rows)] for _ in "ts")
        with code.loop(_spans(code, groups)) as span:
            first = code.scaled(span, SPAN)
            left = b.sub(groups, first)
            for each in sum(sums, []):
                b.store(code.zero, each)
            with code.loop(b.select(b.icmp_signed("<", left, I64(SPAN)), left, I64(SPAN))) as place:
                group = b.add(first, place)
                block, tile = (b.add(start, code.scaled(group, size)) for start, size in (
                    (numbers, self.rows * ROW_BYTES), (weights, self.size)))
                self._bring(b.add(ahead, b.mul(group, ahead_step)), apart)
                for row, of_row in enumerate(self._sums(block, tile)):
                    own = code.spread(code.add(block, self.rows * GROUP + 4 * row))
                    for value, so_far in zip(of_row, sums[row], strict=True):
                        value = b.sitofp(value, code.zero.type)
                        b.store(code.multiply_add(value, own, b.load(so_far)), so_far)
            for j in range(VECTORS):
                scale = code.load(b.add(scales, code.add(code.scaled(span, 4 * TILE), 4 * VECTOR * j)))
                for row in range(self.rows):
                    total = code.multiply_add(b.load(sums[row][j]), scale, b.load(totals[row][j]))
                    b.store(total, totals[row][j])
        return [[b.load(total) for total in of_row] for of_row in totals]

    def _bring(self, line, apart):
        """Lines of a group's share of what is soon to be read."""
        for _ in range(-(-self.size // LINE)):
            self.code.prefetch(line, 2)
            line = self.code.builder.add(line, apart)

    def _sums(self, block, tile):
        """Of a group: for each row and vector the sum of the products of their numbers, int32."""
        code, b, n = self.code, self.code.builder, self.rows
        start = ir.Constant(vector(I32, VECTOR), None)
        sums = [[start if self.bits == 4 else code.everywhere(
            b.load(code.at(code.add(block, n * (GROUP + 4) + 4 * row), I32), align=4))] * VECTORS for row in range(n)]
        for i in range(GROUP // 4 * self.bits // 8):
            for j in range(VECTORS):
                for at, four in enumerate(_fours(code, code.add(tile, 4 * (TILE * i + VECTOR * j)), self.bits)):
                    for row in range(n):
                        word = code.at(code.add(block, GROUP * row + 4 * (i * 8 // self.bits + at)), I32)
                        sums[row][j] = _add_dots(code, sums[row][j], four, b.load(word, align=4))
        return sums

    def _added(self, block, tile, totals, sums):
        """``totals`` and what a group adds."""
        code, b, n = self.code, self.code.builder, self.rows
        found = [list(of_row) for of_row in totals]
        for j in range(VECTORS):
            scale, *least = (
                b.fpext(b.load(code.at(code.add(tile, TILE * (GROUP * self.bits // 8 + 2 * i) + 2 * VECTOR * j),
                                       vector(ir.HalfType(), VECTOR)), align=2), code.zero.type)
                for i in range(2 if self.bits == 4 else 1))
            for row in range(n):
                own = code.spread(code.add(block, n * GROUP + 4 * row))
                value = b.sitofp(sums[row][j], code.zero.type)
                found[row][j] = code.multiply_add(value, b.fmul(scale, own), found[row][j])
                for lowest in least:
                    own_sum = code.spread(code.add(block, n * (GROUP + 4) + 4 * row))
                    found[row][j] = code.multiply_add(lowest, own_sum, found[row][j])
        return found


def _fours(code, address, bits):
    """Weights, for every four input features a vector of four bytes for each output feature of the tile: of 8-bit
    numbers one such vector, of 4-bit ones two."""
    b = code.builder
    if bits == 8:
        return [b.load(code.at(address, vector(I32, VECTOR)), align=2)]
    words = vector(I16, 2 * VECTOR)  # bytes would be shifted by a multiplication
    raw, low = b.load(code.at(address, words), align=2), integer(0x0F0F, 2 * VECTOR, I16)
    halves = b.and_(raw, low), b.and_(b.lshr(raw, integer(4, 2 * VECTOR, I16)), low)
    return [b.bitcast(half, vector(I32, VECTOR)) for half in halves]


def _add_dots(code, total, four, word):
    """For each output feature, its four unsigned bytes times the four signed ones in ``word``, added to ``total``."""
    kind = vector(I32, VECTOR)
    function = cgutils.get_or_insert_function(
        code.builder.module, ir.FunctionType(kind, [kind] * 3), "llvm.x86.avx512.vpdpbusd.512")
    return code.builder.call(function, [total, four, code.everywhere(word)])
