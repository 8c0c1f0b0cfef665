"""Peak FLOP/s of GPUs in bf16, dense (without sparsity).

From the makers' data sheets: NVIDIA's for H100, H200, B200, A100, L40S, L4, A10, RTX A6000 and V100 (fp16 there), the
whitepapers of the Ada, Ampere and Blackwell RTX architectures for the GeForce cards (fp32 accumulation), AMD's for
MI300X.
"""

from __future__ import annotations

import re

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "A6000": 155e12,
    "V100": 125e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of one GPU with this name, in any spelling: NVIDIA-H100-SXM5-80GB is an H100. None if unknown."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    for known in sorted(PEAK_FLOPS, key=len, reverse=True):
        words = known.lower().removeprefix("rtx ").split()
        if all(re.search(rf"(?<![{_before(word)}]){word}(?![0-9])", text) for word in words):
            return PEAK_FLOPS[known]
    return None


def _before(word: str) -> str:
    """Characters that must not precede a word: letters may precede a number, since RTX4090 is a 4090."""
    return "0-9" if word[0].isdigit() else "a-z0-9"
