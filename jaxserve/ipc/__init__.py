"""The messages between the front process and its engine processes, and their sockets.

`launch` starts an engine, `messages` are the structs, `transport` the sockets. Host-only. The
package does not know what a message causes on either side.
"""
