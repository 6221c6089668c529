"""The inner steps of the passes as vector code, for the compiler that numba brings (LLVM).

Invariants: integers only, no instruction of one kind of processor, so every machine computes the
same values; addresses are plain integers, and exactly the bytes that a docstring names are read and
written. The compiler's own vectoriser would keep the sums in memory and move pixels one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dataservice.pipeline.resampling.weights import PLACES

LANES = 64
"""Bytes that `weigh` makes at once."""
SIDE = 16
"""Pixels of a side of the squares that are turned."""

_BYTE, _INT = ir.IntType(8), ir.IntType(32)


def _step(emit: Callable[..., None]) -> Any:
    """A function for compiled code, of machine integers, from one that emits its instructions.

    `emit` takes the builder of instructions, then one value an argument.
    """

    @functools.wraps(emit)  # the number of arguments is read from it
    def definition(_typing: Any, *given: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            emit(builder, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.intp] * len(given)), code

    return intrinsic(definition)


@_step
def weigh(builder: Any, source: Any, stride: Any, factors: Any, count: Any, out: Any) -> None:
    """out[0:64] = the sum over k < count of source[k * stride + 0:64] * factors[k], rounded.

    Bytes, and int32 factors times 2**PLACES.
    """
    sums = _vector(_INT, LANES)
    total = cgutils.alloca_once_value(builder, _splat(sums, 1 << PLACES - 1))
    with cgutils.for_range(builder, count) as loop:
        row = builder.add(source, builder.mul(loop.index, stride))
        values = builder.zext(_load(builder, row, _vector(_BYTE, LANES)), sums)
        at = builder.add(factors, builder.mul(loop.index, loop.index.type(4)))
        factor = _load(builder, at, _INT, align=4)
        first = builder.insert_element(ir.Constant(sums, ir.Undefined), factor, _INT(0))
        product = builder.mul(values, _shuffle(builder, first, first, [0] * LANES))
        builder.store(builder.add(builder.load(total), product), total)
    value = builder.ashr(builder.load(total), _splat(sums, PLACES))
    for sign, bound in ((">", 0), ("<", 255)):
        limit = _splat(sums, bound)
        value = builder.select(builder.icmp_signed(sign, value, limit), value, limit)
    _store(builder, builder.trunc(value, _vector(_BYTE, LANES)), out)


@_step
def turn_in_3(builder: Any, source: Any, stride: Any, out: Any) -> None:
    """16 rows of 16 pixels of 3 bytes -> 16 columns of 16 pixels of 4 bytes, 64 bytes a column."""
    starts = [_moved(builder, source, stride, row) for row in range(SIDE)]
    _store_turned(builder, [_widened(builder, start) for start in starts], out)


@_step
def turn_in_4(builder: Any, source: Any, stride: Any, out: Any) -> None:
    """`turn_in_3` of pixels of 4 bytes."""
    starts = [_moved(builder, source, stride, row) for row in range(SIDE)]
    _store_turned(builder, [_load(builder, start, _vector(_INT, SIDE)) for start in starts], out)


@_step
def turn_out(builder: Any, source: Any, out: Any, stride: Any, plane: Any) -> None:
    """16 columns of 64 bytes -> 16 rows, each 16 bytes of red, of green and of blue.

    Colours stand `plane` bytes apart, rows `stride` bytes.
    """
    starts = [_after(builder, source, SIDE * 4 * column) for column in range(SIDE)]
    columns = [_load(builder, start, _vector(_INT, SIDE)) for start in starts]
    for number, row in enumerate(_turned(builder, columns)):
        pixels = builder.bitcast(row, _vector(_BYTE, SIDE * 4))
        _store_colours(builder, pixels, 4, _moved(builder, out, stride, number), plane)


@_step
def split_3(builder: Any, source: Any, out: Any, plane: Any) -> None:
    """16 pixels of 3 bytes -> 16 bytes of red, of green and of blue, `plane` bytes apart."""
    _store_colours(builder, _load(builder, source, _vector(_BYTE, SIDE * 3)), 3, out, plane)


@_step
def split_4(builder: Any, source: Any, out: Any, plane: Any) -> None:
    """`split_3` of pixels of 4 bytes."""
    _store_colours(builder, _load(builder, source, _vector(_BYTE, SIDE * 4)), 4, out, plane)


@_step
def copy_16(builder: Any, source: Any, out: Any) -> None:
    """16 bytes."""
    _store(builder, _load(builder, source, ir.IntType(128)), out)


@_step
def copy_8(builder: Any, source: Any, out: Any) -> None:
    """8 bytes."""
    _store(builder, _load(builder, source, ir.IntType(64)), out)


@_step
def copy_1(builder: Any, source: Any, out: Any) -> None:
    """One byte."""
    _store(builder, _load(builder, source, _BYTE), out)


def _widened(builder: Any, at: Any) -> Any:
    """16 pixels of 3 bytes as <16 x i32>; the highest byte is anything."""
    quarters = []
    for first in (0, 12, 24, 32):  # 16 bytes each, 4 pixels of it; the last ends with the pixels
        skipped = 4 if first == 32 else 0
        part = _load(builder, _after(builder, at, first), _vector(_BYTE, 16))
        mask = [skipped + 3 * pixel + min(byte, 2) for pixel in range(4) for byte in range(4)]
        quarters.append(_shuffle(builder, part, part, mask))
    halves = [_joined(builder, *quarters[:2]), _joined(builder, *quarters[2:])]
    return builder.bitcast(_joined(builder, *halves), _vector(_INT, SIDE))


def _store_turned(builder: Any, rows: list[Any], out: Any) -> None:
    for number, column in enumerate(_turned(builder, rows)):
        _store(builder, column, _after(builder, out, SIDE * 4 * number))


def _store_colours(builder: Any, pixels: Any, pixel_bytes: int, out: Any, plane: Any) -> None:
    for colour in range(3):
        mask = [pixel_bytes * i + colour for i in range(SIDE)]
        part = _shuffle(builder, pixels, pixels, mask)
        _store(builder, part, _moved(builder, out, plane, colour))


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors <16 x i32> as a square, its columns; a step is one instruction where vectors are
    that long, and a few where they are shorter."""
    fours: list[list[Any]] = []  # [group of 4 rows][j]: in quarter q their column 4 q + j
    for g in range(0, SIDE, 4):
        four = []
        for order in ([0, 4, 1, 5], [2, 6, 3, 7]):
            a = _lanes(builder, rows[g], rows[g + 1], order)
            b = _lanes(builder, rows[g + 2], rows[g + 3], order)
            four += [_lanes(builder, a, b, [0, 1, 4, 5]), _lanes(builder, a, b, [2, 3, 6, 7])]
        fours.append(four)
    columns: list[Any] = [None] * SIDE
    for j in range(4):
        for half, order in ((0, [0, 1, 4, 5]), (8, [2, 3, 6, 7])):
            a = _quarters(builder, fours[0][j], fours[1][j], order)
            b = _quarters(builder, fours[2][j], fours[3][j], order)
            columns[half + j] = _quarters(builder, a, b, [0, 2, 4, 6])
            columns[half + 4 + j] = _quarters(builder, a, b, [1, 3, 5, 7])
    return columns


def _lanes(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Within each quarter of both vectors: 0 to 3 from a's, 4 to 7 from b's."""
    mask = [4 * q + i % 4 + (SIDE if i >= 4 else 0) for q in range(4) for i in order]
    return _shuffle(builder, a, b, mask)


def _quarters(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Whole quarters: 0 to 3 of a, 4 to 7 of b."""
    return _shuffle(builder, a, b, [4 * q + i for q in order for i in range(4)])


def _vector(kind: Any, length: int) -> Any:
    return ir.VectorType(kind, length)


def _splat(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _shuffle(builder: Any, a: Any, b: Any, mask: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(_vector(_INT, len(mask)), mask))


def _joined(builder: Any, a: Any, b: Any) -> Any:
    return _shuffle(builder, a, b, list(range(2 * a.type.count)))


def _after(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, address.type(num_bytes))


def _moved(builder: Any, address: Any, stride: Any, times: int) -> Any:
    return builder.add(address, builder.mul(stride, stride.type(times)))


def _load(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
