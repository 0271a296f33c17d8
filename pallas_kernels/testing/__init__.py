"""Test support for the kernels: random problems, and a compiler that needs no GPU."""
