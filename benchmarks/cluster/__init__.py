"""Benchmarks: the cluster beside plain ``transformers``, part by part, in one run."""
