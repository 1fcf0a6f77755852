"""Text in and out: the tokenizer, incremental detokenisation, stop strings. No torch, no gRPC."""
