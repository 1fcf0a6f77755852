"""The command line: one file per command, one table of them in ``main``."""
