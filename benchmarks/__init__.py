"""Benchmarks of parts; ``kvrelay bench`` measures the whole."""
