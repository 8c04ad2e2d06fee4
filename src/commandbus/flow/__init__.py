"""A command's life in the database: one folder per capability, one verb per file, for sync and async alike.

An operation is a generator that yields statements and returns a typed result (`operation.py`); `db/drivers.py`
runs it on a connection of either kind. Operations have no clock, no logging and no retry loop.
"""
