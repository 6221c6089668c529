"""dataservice.wire.checksum: zlib's values, whoever computes them."""

from __future__ import annotations

import subprocess
import sys
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.wire.checksum import crc32


@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=300), before=st.integers(0, 2**32 - 1))
def test_it_is_zlibs(data: bytes, before: int) -> None:
    assert crc32(data, before) == zlib.crc32(data, before)
    pixels = np.frombuffer(data, np.uint8).data
    assert crc32(pixels, before) == zlib.crc32(pixels, before)


def test_without_the_faster_one_it_is_zlib() -> None:
    program = (
        "import sys, zlib; sys.modules['zlib_ng'] = None\n"
        "from dataservice.wire import checksum; assert checksum.crc32 is zlib.crc32"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
