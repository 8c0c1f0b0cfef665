"""The codecs of pseudo-gradients, by name: the one list that flags, defaults and the simulator share. Imports nothing.

To add a codec: a name and its bits here; a class in `peers/reduce/codecs_<name>.py`, for which `codecs_few_bits.py` is
the pattern, and its line in `peers/reduce/codecs.py`; what a gigabyte takes (`python -m benchmarks.reduce`) in
`diloco/sim/cost/machine.py`; its row in docs/how-it-works.md; `make docs`. `tests/unit/peers/reduce/test_codecs.py`
tries every codec and fails while one of these is missing.
"""

from __future__ import annotations

from typing import Literal, get_args

CodecName = Literal["fp32", "fp16", "bf16", "int8", "int4", "2bit", "1bit", "topk"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
"""Of codecs with as many bits the first is the one that is recommended."""
BITS_BY_CODEC: dict[str, float] = {
    "fp32": 32.0,
    "fp16": 16.0,
    "bf16": 16.0,
    "int8": 8.1,
    "int4": 4.2,
    "2bit": 2.2,
    "1bit": 1.1,
    "topk": 0.44,
}
"""Bits on the wire per value, scales and positions included."""
