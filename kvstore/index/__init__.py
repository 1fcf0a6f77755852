"""What the store knows of its blocks: who holds them, which go and when. Pure."""
