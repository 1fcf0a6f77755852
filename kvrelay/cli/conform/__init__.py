"""``kvrelay conform``: its options, its progress and its table."""
