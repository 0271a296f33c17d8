"""The process of a program: its signals, its standard error output, its threads."""
