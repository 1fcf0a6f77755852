"""``kvrelay load``: its options, its progress and its tables."""
