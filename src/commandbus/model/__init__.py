"""Pure decisions: no I/O, no clock, no threads. What a command is, may become, and when it is tried again."""
