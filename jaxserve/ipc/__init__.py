"""What the front process and its engine processes exchange, and how.

`launch` starts an engine, `messages` are the structs, `transport` the sockets. Host-only. The
package does not know what a message causes on either side.
"""
