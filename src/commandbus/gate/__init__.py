"""The gate: where the commands and callers of one program wait for places of limits, and where places are kept.

`postgres_backend` and `redis_backend` keep them; nothing else here knows which of the two does.
"""
