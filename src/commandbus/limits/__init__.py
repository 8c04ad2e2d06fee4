"""Shared limits of external resources in Redis: scripts that take, renew and give back places. A leaf, like `db`.

What happens when Redis is gone, or has lost its data, is decided above, in `gate/redis_fleet.py`.
"""
