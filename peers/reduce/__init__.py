"""The weighted all-reduce of pseudo-gradients, with the same bits on every member.

Start with all_reduce.py. shares.py says who adds up what, frames.py what goes over a stream, codecs.py what values look
like on the wire; the arithmetic is in arithmetic.py and kernels.py.
"""
