"""Limits: where the commands and callers of one program ask for permits, wait for them, and release them.

requests        requests to the limit client, and its replies
client          the thread and the connection that do all of this
held_permits    takes permits, renews them, and knows which ones are held here
waker           finds who is next in line, reserves a permit, and wakes that command or caller
releases        releases permits, and tells limits how the calls ended
admission       commands whose handler names limits: granted, or refused and parked
call_waiters    calls inside programs (`ctx.limit`, `bus.limit`) that wait in line
permit_clock    ends every permit before its lease ends, in memory, whatever the client waits for
stores/         where permits are kept: PostgreSQL or Redis
"""
