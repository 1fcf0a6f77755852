"""Modules generated from protos/kvrelay/v1 by ``make protos``: the messages and services."""
