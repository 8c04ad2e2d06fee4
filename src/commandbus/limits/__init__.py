"""The gate: where the commands and callers of one program wait for places of limits, and where places are kept.

`postgres_backend` and `redis_backend` keep them; `backends` tells which of them does. `gate` is the thread; what
its rounds do is in `desk`, `waker`, `exits`, `visits` and `line`, each using only those before it.
"""
