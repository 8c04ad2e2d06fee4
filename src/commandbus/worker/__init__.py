"""Inside one worker: what happens to a command between its claim and its settlement.

    claimer ──► slots (threads), async slots (tasks), child processes ──► settler
                  ladder: deadlines, grace, stuck        lease keeper: leases, cancels, fences

Claimer, settler, lease keeper and maintenance have a thread and a connection each. The ladder has a thread and
touches no database. Handlers use no more connections than there are slots. `runtime.py` puts it all together.

    execution/     one attempt: its context, its connections, its slot, and how many run at once
    deadlines/     the ladder, which ends an attempt in time, and the autopsy
    isolation/     child processes for attempts that run apart: warm ones, messages, crashes, quarantine
    limits         what the worker does with limits; process_messages: with messages of processes
    board, board_writer                what a supervisor sees of this worker
    health, watchdog, os_state, memory, claim_pause    the state of the process
"""
