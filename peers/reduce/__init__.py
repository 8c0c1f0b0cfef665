"""The weighted all-reduce of pseudo-gradients, with the same bits on every member.

Start with all_reduce.py. shares.py says which member adds up what, frames.py how a stream is framed, codecs.py how
values are encoded; the arithmetic is in arithmetic.py and kernels.py.
"""
