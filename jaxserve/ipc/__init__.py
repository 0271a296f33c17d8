"""The messages between the front process and its engine processes, and their sockets.

`launch` has the settings of an engine process, `messages` the structs, `transport` the sockets,
`signals` the signals that child processes ignore. The package never imports jax, and does not know
what either side does with a message.
"""
