"""Several stores as one."""
