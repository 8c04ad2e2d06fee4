"""The data-access layer by its parts: commands, their audit trails, batches and processes, sync and async.

Each is reached from a bus (`bus.commands`, `bus.audit`, `bus.batches`, `bus.processes`), or made with a psycopg
pool (`CommandRepository(pool)`). A method runs one operation of `flow/`. The bus has short names for these
methods. With `conn=` the operation is part of the caller's transaction.
"""
