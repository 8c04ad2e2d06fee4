"""Rehearsals: a handler runs on a chosen command in a child process without a network, and everything that it does
in the database is rolled back.

`rehearse.py` is the parent: it reads the command, relays the child's database connection (`relay.py`), and kills
the child after its time. `child_main.py` is the child: it leaves the network (`namespace.py`), loads the handlers,
and runs one with a context that records instead of doing (`context.py`).
"""
