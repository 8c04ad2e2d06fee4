"""A command's life in the database, one folder per capability and one verb per file; each is written once and serves sync and async.

An operation is a generator that yields statements and returns a typed result (`operation.py`); `db/drivers.py`
runs it on a connection of either kind. Operations hold no clock, no logging and no retry loop.
"""
