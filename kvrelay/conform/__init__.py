"""Exactness of a server: what disturbs a request must not change its answer or its counts."""
