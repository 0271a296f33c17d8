"""Takes one token from each row of logits, and reports log probabilities.

The package works on rows of logits and on the parameters of each row (`SamplingInputs`). All
functions on the device are pure and can be jitted. It must not know requests, plans, models or the
KV cache: `jaxserve.runner` builds the inputs and decides which functions run.
"""
