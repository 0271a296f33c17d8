"""The type checker that tests put around every function with array annotations."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""`beartype`, with an int where a float is annotated, as type checkers have it (PEP 484)."""
