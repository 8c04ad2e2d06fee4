-- Commands that have joined the line of their key since the last look, of one domain.
-- Locks: none. Index: keyed_new.
SELECT command, key_limit, key FROM commandbus.keyed
 WHERE domain = %(domain)s AND state = 'NEW' ORDER BY command LIMIT %(bite)s
