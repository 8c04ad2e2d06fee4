"""Limits: where the commands and callers of one program ask for permits, wait for them, and give them back.

requests        what is asked of the limit client, and what it answers
client          the thread and the connection through which all of it goes
held_permits    takes permits, renews them, and knows which ones are held here
waker           sees whose turn it is, reserves a permit, and wakes that command or caller
releases        gives permits back, and tells limits how the calls went
admission       commands whose handler names limits: granted, or refused and parked
call_waiters    calls inside programs (`ctx.limit`, `bus.limit`) that wait for their turn
permit_clock    ends every permit at its lease, in memory, whatever the client waits for
stores/         where permits are kept: PostgreSQL or Redis
"""
