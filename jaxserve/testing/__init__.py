"""Fakes for tests, for ours and for those of users: engines, runners, checkpoints and clients.

May import any other package; no other package imports it.
"""
