"""The filters of a PNG's rows as vector code, four channels at once, for the compiler that numba
brings (LLVM).

Invariants: integers only, no instruction of one kind of processor; addresses are plain integers.
Each takes a filtered row of `count` pixels at `source`, `step` bytes apart, the row above as it was
written, and writes `out`, both with 4 bytes a pixel; 4 bytes of each pixel are read, whatever the
step. The pixel to the left stays in registers, which is what makes them fast: each needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES = ir.VectorType(ir.IntType(8), 4)
_WORDS = ir.VectorType(ir.IntType(16), 4)
_SIGNATURE = types.void(*[types.intp] * 5)
_NOTHING = ir.Constant(_WORDS, [0] * 4)

Predict = Callable[[Any, Any, Any, Any], Any]
"""(builder, left, above, above left) -> what the filter takes for the pixel, all <4 x i16>."""


def _paeth(builder: Any, left: Any, above: Any, corner: Any) -> Any:
    across, down = builder.sub(above, corner), builder.sub(left, corner)
    far = [_absolute(builder, part) for part in (across, down, builder.add(across, down))]
    least = _smaller(builder, far[2], _smaller(builder, far[0], far[1]))
    other = builder.select(builder.icmp_unsigned("==", far[1], least), above, corner)
    return builder.select(builder.icmp_unsigned("==", far[0], least), left, other)


def _absolute(builder: Any, value: Any) -> Any:
    negative = builder.icmp_signed("<", value, _NOTHING)
    return builder.select(negative, builder.sub(_NOTHING, value), value)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _row_filter(predict: Predict) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, step, above, out, count = args
        left = cgutils.alloca_once_value(builder, _NOTHING)
        corner = cgutils.alloca_once_value(builder, _NOTHING)
        builder.store(_NOTHING, left)
        builder.store(_NOTHING, corner)
        with cgutils.for_range(builder, count) as loop:
            far = builder.mul(loop.index, loop.index.type(4))
            high = builder.zext(_load(builder, builder.add(above, far)), _WORDS)
            pixel = _load(builder, builder.add(source, builder.mul(loop.index, step)))
            taken = predict(builder, builder.load(left), high, builder.load(corner))
            pixel = builder.add(pixel, builder.trunc(taken, _BYTES))
            at = builder.inttoptr(builder.add(out, far), _BYTES.as_pointer())
            builder.store(pixel, at, align=1)
            builder.store(builder.zext(pixel, _WORDS), left)
            builder.store(high, corner)
        return context.get_dummy_value()

    def typed(typing, source, step, above, out, count):  # type: ignore[no-untyped-def] # noqa: ARG001
        return _SIGNATURE, codegen

    return intrinsic(typed)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _BYTES.as_pointer()), align=1)


plain = _row_filter(lambda _builder, _left, _above, _corner: _NOTHING)
"""Filter 0: the bytes as they are."""
sub = _row_filter(lambda _builder, left, _above, _corner: left)
"""Filter 1: the difference to the left."""
up = _row_filter(lambda _builder, _left, above, _corner: above)
"""Filter 2: the difference to above."""
average = _row_filter(
    lambda builder, left, above, _: builder.lshr(
        builder.add(left, above), ir.Constant(_WORDS, [1] * 4)
    )
)
"""Filter 3: the difference to the mean of both."""
paeth = _row_filter(_paeth)
"""Filter 4: the difference to whichever of three is nearest to left + above - above left."""
