"""The scheduler: which requests run in the next step, and which blocks of the KV cache they hold.

Pure Python over integers. Nothing here knows jax, numpy, sockets, threads, text or the time of day:
the clock is an argument, the model is behind `plan.Runner`, a grammar is behind `plan.Constraint`.
"""
