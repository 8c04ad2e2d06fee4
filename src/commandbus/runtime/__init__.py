"""Inside one worker process: what happens to a command between its claim and its settlement.

    Claimer ──► Lanes (slots: threads; loop: async tasks) ──► Settler
                        Monitor: leases, heartbeat, limits of the process

Each has one thread and, where it talks to the database, one connection of its own: claimer, settler and monitor
make three, and handlers use no more than there are slots.
"""
