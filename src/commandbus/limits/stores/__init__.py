"""Permit stores: where the permits of limits are kept. PostgreSQL is the default, Redis the other."""
