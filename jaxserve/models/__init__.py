"""Model families in flax: their layers, and how config.json and weights are read.

Knows the shape of a model (`spec`) and the ops. A family is one file and one line in `registry`.
Knows nothing of requests, steps or sampling.
"""
