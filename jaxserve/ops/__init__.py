"""Operations of a model as pure functions on arrays: attention and its backends, rope, norms.

Knows jax and the kernels of `pallas_kernels`. Knows no model, request or cache manager.
"""
