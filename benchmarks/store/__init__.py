"""How fast the bytes go."""
