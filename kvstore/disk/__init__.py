"""The disk tier below memory: segment files, written behind and read on demand."""
