"""An engine: the factory that builds it, its loop, and the process that it runs in.

Only `factory` needs jax. `core`, `process`, `sizing` and `startup` never import it, so the front
process may import them. The package does not know HTTP, text or where the front runs.
"""
