"""The weighted all-reduce of pseudo-gradients, with the same bits on every member.

Start with all_reduce.py. grid.py says which members exchange values, shares.py which member adds up what, frames.py how
a stream is framed, codecs.py how values are encoded; the arithmetic is in arithmetic.py and kernels.py.
"""
