"""The front's side of the engines: starts them, spreads requests over them, receives their outputs.

`protocol.Engine` is what the rest of the front sees. Behind it is an `EngineClient`, whose engines
run in processes, or an `InProcessEngine`. Requests and outputs are token IDs: the package knows
neither text nor HTTP, and nothing here imports jax.
"""
