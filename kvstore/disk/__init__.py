"""The tier below memory: a directory of segments, written behind and read on demand."""
