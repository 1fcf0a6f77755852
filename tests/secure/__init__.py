"""A cluster with mutual TLS and credentials: who gets in, what tenants see, what is told."""
