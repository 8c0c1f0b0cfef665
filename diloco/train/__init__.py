"""What a trainer is made of (train_fsdp.py puts it together): the model, the inner step, its figures, its machine.

Start with inner.py. model.py builds and shards a model, metrics.py tells what it does, preflight.py whether it fits.
"""
