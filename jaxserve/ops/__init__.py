"""Operations of a model as pure functions on arrays: attention and its backends, rope, norms.

The package knows jax and the kernels of `pallas_kernels`, but no models, requests or schedulers.
"""
