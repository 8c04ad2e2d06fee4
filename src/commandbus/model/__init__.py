"""Pure decisions: no I/O and no threads. What a command is, may become, and when it is tried again.

The time is an argument. Three things read the clock all the same: the id of a new command, a `Retry-After` header
with a date, and `CommandRecord.waiting_text`.
"""
