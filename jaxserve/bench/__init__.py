"""Measures the real server on this machine: ``python -m jaxserve.bench`` or ``scripts/bench``."""
