"""The routes of the application. Each module exports ``routes``, which `server.app` collects.

A route decodes the body, calls `jaxserve` and builds the response. Limits, errors and access checks
are in the modules of `server`.
"""
