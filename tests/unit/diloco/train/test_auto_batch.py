from __future__ import annotations

import pytest
import torch

from diloco.train import auto_batch
from diloco.train.auto_batch import find_micro_batch_size
from diloco.train.inner import InnerLoop
from diloco.train.optim import adamw
from diloco.train.sharding import Precision
from tests.support.tiny_model import VOCAB_SIZE, tiny_llama

CPU = torch.device("cpu")


def an_inner_loop() -> InnerLoop:
    model = tiny_llama()
    return InnerLoop(
        model,
        adamw(model, weight_decay=0.1),
        precision=Precision.of("32-true", CPU),
        device=CPU,
        micro_batch_size=1,
        max_grad_norm=1.0,
    )


def found(inner: InnerLoop, **limits: int) -> int:
    return find_micro_batch_size(inner, num_samples=24, seq_length=12, vocab_size=VOCAB_SIZE, **limits)


@pytest.mark.parametrize(
    ("seconds", "bytes_per_sample", "size"),
    [
        (lambda samples: 1 + 0.1 * samples, 0, 24),
        # Full from four samples on: more is no faster.
        (lambda samples: max(1.0, samples / 4), 0, 4),
        (lambda samples: float(samples), 0, 1),
        # Eight would need 8 GB.
        (lambda samples: 1 + 0.1 * samples, 10**9, 6),
    ],
)
def test_it_takes_the_divisor_that_is_fastest_and_fits(monkeypatch, seconds, bytes_per_sample, size):
    inner, base = an_inner_loop(), 5 * 10**9

    def tried(inner, samples):
        assert bytes_per_sample * len(samples) < 7 * 10**9, "memory has run out"
        return seconds(len(samples)), base + bytes_per_sample * len(samples)

    monkeypatch.setattr(auto_batch, "_timed_and_peak", tried)
    monkeypatch.setattr(auto_batch, "_peak_bytes", lambda device: base)
    assert found(inner, room_bytes=7 * 10**9) == size


def test_trying_leaves_weights_gradients_and_random_state_as_they_were():
    inner = an_inner_loop()
    before = [p.detach().clone() for p in inner.model.parameters()]
    state = torch.random.get_rng_state()
    found(inner)
    assert all(torch.equal(p, old) for p, old in zip(inner.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in inner.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not inner.optimizer.state


def test_where_nothing_more_fits_it_stays_with_what_does():
    assert found(an_inner_loop(), room_bytes=0) == 1
