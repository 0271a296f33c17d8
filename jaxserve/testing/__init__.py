"""Fake engines, runners, checkpoints and clients, for our own tests and for those of users.

May import any other package. No other package imports this one.
"""
