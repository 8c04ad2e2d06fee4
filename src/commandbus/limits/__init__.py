"""Shared limits of external resources: Redis (Lua), PostgreSQL and in-process back ends. A leaf, like `db`."""
