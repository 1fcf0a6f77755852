"""Stores as their users see them: the service from outside, one in this process, a breaker."""
