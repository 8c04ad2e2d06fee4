"""Processes (sagas): what a process manager is, and how a process moves. The I/O is in
`worker/process_messages.py`.

`manager.py` has the class that users write, and `saga.py` its short form. `waiting_steps.py` and `saga_waits.py`
are about steps that wait. `advance_and_compensate.py` decides what a message (`messages.py`) does to a process.
`moves.py` does it.
"""
