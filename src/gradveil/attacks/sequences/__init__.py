"""Attacks on token numbers: bags of words, span membership, ranking under noise, and decoding."""
