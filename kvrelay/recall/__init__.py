"""A small language model made here, whose one skill is recall over a long context.

The text of its task and its weights. `benchmarks/recall` makes and measures it.
"""
