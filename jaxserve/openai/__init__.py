"""The OpenAI API without HTTP: one adapter for each endpoint, with its bodies and its errors.

An adapter turns a body into a `front.requests.GenerateRequest` and deltas into replies or chunks.
It knows the front, never the engine or its sockets. The server and the batch program share it.
"""
