"""The HTTP application: routes, middleware, streaming, metrics and the server process.

The package turns HTTP requests into calls of `jaxserve.openai`, and results into responses. It
knows Starlette and uvicorn. It runs in the front process, so it must never import JAX.
`jaxserve.openai` decides what the fields of the API mean, and must not know HTTP.
"""
