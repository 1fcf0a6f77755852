"""What both sides of a connection to the store say and hear."""
