"""Measures the real server on this machine: ``python -m jaxserve.bench`` or ``scripts/bench``.

Starts the server as a user does and calls it over HTTP. Imports no engine code.
"""
