"""Attention and cache kernels in Pallas for NVIDIA GPUs, each with a reference in plain jnp.

`paged_decode`, `ragged_attention`, `kv_write` and `add_rms_norm` hold one kernel each, `reference`
the same functions without kernels, `tuning` the tile sizes, `limits` what is supported.
"""
