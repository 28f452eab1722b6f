"""Bounds: what is known without running an attack.

`gradveil.theory.sensitivity` tells how strongly each coordinate of a gradient depends on the inputs,
`gradveil.theory.bound` how large the error of every reconstruction must be, `gradveil.theory.utility` what noise
costs, `gradveil.theory.accounting` which epsilon it gives.
"""
