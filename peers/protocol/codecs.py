"""The codecs of pseudo-gradients, by name: the one list that flags, defaults and the simulator share. Imports nothing.

A new codec needs

    its name and its bits here
    its class in the `peers/reduce/codecs_*.py` of its kind, or, like `codecs_few_bits.py`, in a file of its own
        (`Int4Codec` is the pattern for integers; its packing is in kernels.py)
    its line in `peers/reduce/codecs.py`
    its time for a gigabyte in `diloco/sim/cost/machine.py` (`python -m benchmarks.reduce`; until then, the figure
        of the most similar codec)
    its row in docs/how-it-works.md, a run of `python -m diloco.cli.reference`, a line in the changelog

From then on `diloco status` recommends it, by its bits, where rounds take long (`lighter_compression` in
peers/core/defaults.py). `tests/unit/peers/reduce/test_codecs.py` tries every codec, and fails while a table lacks one.
"""

from __future__ import annotations

from typing import Literal, get_args

FLOAT_BYTES = 4
"""Bytes of one fp32 value, the type of weights, anchor and momentum."""
CodecName = Literal["fp32", "fp16", "bf16", "int8", "int4", "2bit", "1bit", "topk"]
CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)
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
"""Bits on the wire per value, scales and positions included. Descending; of equals, the recommended one first."""
