"""Runs the plans of the scheduler on the device.

`ModelRunner` holds weights, KV cache and last tokens. For each `StepPlan` it builds padded numpy
arrays, starts the jitted step, then the sampler, and returns a `PendingStep` without waiting. Only
code that every model and every request kind needs belongs here.

The package knows plans, buckets, jitted programs and the interface `LanguageModel`. It must not
know how requests are scheduled, how a model computes, text, or processes.
"""
