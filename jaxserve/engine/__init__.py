"""One engine: builds it, runs its loop, and serves it from a process of its own.

Everything but `factory` is host-only: `core`, `process`, `sizing` and `startup` never reach jax, so
the front process may import them. The package does not know HTTP, text or where the front runs.
"""
