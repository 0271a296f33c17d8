"""The HTTP application: routes, middleware, streaming, metrics and the server process.

It turns HTTP requests into calls of `jaxserve.openai` and their results into responses. It knows
Starlette and uvicorn, and runs in the front process, so it must never import JAX. `jaxserve.openai`
decides what the fields of the API mean, and must not know HTTP.
"""
