"""Pure decisions: no I/O and no threads. What a command is, may become, and when it is tried again.

The time is an argument. Four things read the clock all the same: the id of a new command, a `Retry-After` header
with a date, `CommandRecord.waiting_text`, and `Schedule.next_firings`.
"""
