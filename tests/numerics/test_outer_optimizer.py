"""The outer step compared with torch, with IEEE arithmetic written out, and with recorded bits."""

import struct

import numpy as np
import pytest
import torch

from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState

# Denormals, extremes, cancellation, and values that a fused multiply-add rounds differently.
HARD = [1.0, -1e-40, 3.4028235e38, 1.17549435e-38, 1e-45, 0.1, -0.3333333432674408, 16777217.0, -0.0, 7e-39]
AVERAGES = [
    [0.7, 1e-41, 1e30, -1.1e-38, 1e-45, 0.1000001, 1e-8, 0.33333334, 0.0, 3e-45],
    [-0.3, -3e-42, -1e29, 1.1e-38, 1e-45, -0.0999999, 3e-8, 1.0, -0.0, 1.4e-45],
    [1e-7, 1e-39, 3e30, 1e-38, -1e-45, 1.0, -0.1, 1e-3, 1e-44, -6e-45],
]
HARD_TENSOR, AVERAGE_TENSORS = torch.tensor(HARD), [torch.tensor(average) for average in AVERAGES]
# Big-endian fp32 in hex; computed once with NumPy, one operation after another.
GOLDEN_ANCHOR = "bded96ab800fc57e7f7fffff002c4c9d80000002bfa3f8cdbe4d24354b7ffffd80000009004c3924"
GOLDEN_MOMENTUM = "3e981065000af2a5723bcfdf0077aba5000000013f7db230bdccccc83f95e3540000000780000001"


def hexadecimal(values):
    return struct.pack(f">{len(values)}f", *values.tolist()).hex()


def after_all_steps():
    state = OuterState.initial([HARD_TENSOR.clone()])
    optimizer = OuterOptimizer(lr=0.7, momentum=0.9)
    for average in AVERAGE_TENSORS:
        optimizer.commit(state, 0, average)
    return state


def test_every_machine_gets_the_same_bits():
    state = after_all_steps()
    assert hexadecimal(state.anchor[0]) == GOLDEN_ANCHOR
    assert hexadecimal(state.momentum[0]) == GOLDEN_MOMENTUM


def test_the_step_is_one_ieee_operation_after_another():
    lr, momentum = np.float32(0.7), np.float32(0.9)
    anchor, buffer = np.array(HARD, np.float32), np.zeros(len(HARD), np.float32)
    for average in AVERAGES:
        gradient = np.array(average, np.float32)
        buffer = momentum * buffer + gradient
        anchor = anchor - lr * (momentum * buffer + gradient)
    state = after_all_steps()
    assert hexadecimal(state.anchor[0]) == hexadecimal(torch.from_numpy(anchor))
    assert hexadecimal(state.momentum[0]) == hexadecimal(torch.from_numpy(buffer))


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_it_is_torchs_nesterov_sgd_to_rounding(lr, momentum):
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(300_000, generator=generator)
    reference = torch.nn.Parameter(weights.clone())
    torchs = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=momentum > 0)
    state, ours = OuterState.initial([weights]), OuterOptimizer(lr=lr, momentum=momentum)
    for _ in range(5):
        average = torch.randn(weights.numel(), generator=generator)
        reference.grad = average.clone()
        torchs.step()
        ours.commit(state, 0, average)
    assert torch.allclose(state.anchor[0], reference.detach(), rtol=1e-6, atol=2e-6)


def test_without_momentum_and_at_rate_one_the_anchor_becomes_the_mean_of_the_weights():
    anchor, local = torch.randn(1000), torch.randn(1000)
    state = OuterState.initial([anchor.clone()])
    OuterOptimizer(lr=1.0, momentum=0.0).commit(state, 0, anchor - local)
    assert torch.allclose(state.anchor[0], local, atol=1e-6)


def test_denormals_survive_even_where_the_thread_would_flush_them():
    torch.set_flush_denormal(True)
    try:
        state = after_all_steps()
    finally:
        torch.set_flush_denormal(False)
    assert hexadecimal(state.anchor[0]) == GOLDEN_ANCHOR
