"""The parts of the weighted all-reduce (peers/reduce.py): shares, frames, codecs, sums, and what codecs keep back."""
