"""Processes (sagas): what a process manager is, and how a process moves. No I/O: `worker/process_messages.py` does
that.

`manager.py` is what people write; `saga.py` its short form; `engine.py` decides what a message does to a process.
"""
