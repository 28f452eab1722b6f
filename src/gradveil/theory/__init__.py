"""Bounds: what is known without running an attack.

`gradveil.theory.input_jacobian` tells how strongly each coordinate of a gradient depends on the inputs,
`gradveil.theory.reconstruction_bound` how large the error of every reconstruction must be,
`gradveil.theory.first_order_utility` what noise costs, `gradveil.theory.accounting` which epsilon it gives.
"""
