"""The accounting of tokens and blocks: founding bugs, exhaustive check, mutations, liveness."""
