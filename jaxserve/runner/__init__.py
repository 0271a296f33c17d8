"""Runs a `StepPlan` on a device: packs it into arrays, runs the compiled step, returns its tokens.

Owns the device arrays and the buckets. Knows plans, models through their call, and sampling. Knows
no scheduler, no socket and no text.
"""
