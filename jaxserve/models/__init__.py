"""Model families in flax: layers, their composition, and the reading of config.json and weights.

Knows the shape of a model (`spec`) and the ops; a family is one file and one line in `registry`.
Knows nothing of requests, steps or sampling.
"""
