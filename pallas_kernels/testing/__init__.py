"""Test support for kernels: random problems, and compilation without a GPU."""
