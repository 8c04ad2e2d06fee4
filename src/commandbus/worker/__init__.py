"""Inside one worker process: what happens to a command between its claim and its settlement.

    claimer ──► lanes (slots: threads; loop: async tasks; isolation: processes) ──► settler
                  ladder: deadlines, grace, stuck        keeper: leases, cancels, fences

Claimer, settler and keeper have a thread and a connection each; the ladder has a thread and touches no database.
Handlers use no more connections than there are slots. `parts.py` puts it all together.

    attempt, context, execute, handlers      one attempt and what its handler is given
    slots, fresh_thread, loop, places        where it runs, and how many at once
    ladder, keeper, autopsy, connections     how it ends in time
    isolation, children, process, child, warming, deaths, channel, remote, address, isolated
                                             a process of its own for it (isolated: inside that process)
    board, showing, offspring                what a supervisor sees of this process
    health, watchdog, process_state, memory, pause
                                             the state of the process
"""
