"""Attention and cache kernels in Pallas for NVIDIA GPUs, each with a reference in plain jnp.

`paged_decode`, `ragged_attention` and `kv_write` hold one kernel each, `reference` the same
functions without kernels, `tuning` the tile sizes, `limits` what is supported. `testing` holds
random problems and the compiler without a GPU. The package imports jax and nothing of jaxserve.
"""
