"""The program ``python -m jaxserve.offline`` and its files.

Requests run through the same adapters as in the server, so the replies are equal. Knows no HTTP.
The program never imports jax in its own process: its engines run in child processes.
"""
