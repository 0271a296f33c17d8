"""From logits to tokens: logits processors, sampling filters, draws and log probabilities.

Pure functions on arrays of rows. Knows no model, no plan and no request.
"""
