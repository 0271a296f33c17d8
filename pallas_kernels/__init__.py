"""Attention and cache kernels in Pallas for NVIDIA GPUs, each with a reference in plain jnp.

`paged_decode`, `ragged_attention` and `kv_write` hold one kernel each, and `reference` holds the
same functions without kernels. `tuning` chooses tile sizes, `limits` checks shapes and dtypes, and
`testing` holds random problems and a compiler that needs no GPU. The package imports jax, but
nothing of jaxserve.
"""
