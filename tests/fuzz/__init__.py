"""Mutated messages and raw bytes against every port of a cluster, beside requests that go on."""
