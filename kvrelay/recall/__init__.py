"""A small language model made here, whose one skill is recall over a long context.

It owns the text of the task, the tokenizer, the weights and the scripts that make and measure them.
"""
