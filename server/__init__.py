"""The HTTP server: a Starlette application, and the process that runs it with uvicorn.

Knows HTTP, the settings and the life of the process. What the API means is in `jaxserve.openai`.
Never imports jax.
"""
