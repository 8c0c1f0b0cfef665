"""The parts of a trainer, which train_fsdp.py assembles.

Start with inner.py, the training step. model.py and sharding.py build the model, metrics.py records, memory.py checks
that the model fits the machine.
"""
