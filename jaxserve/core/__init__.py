"""The scheduler: which requests run in the next step, and which blocks of the KV cache they hold.

In the engine and all packages below it, "request" means one completion of a client's request.

The package is pure Python over integers, without jax, numpy, sockets, threads or text. The time is
an argument. The protocols `plan.Runner` and `plan.Constraint` stand for the model and for grammars.
"""
