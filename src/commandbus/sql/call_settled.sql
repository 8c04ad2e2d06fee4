-- Tells those who wait in bus.call that these commands' rows are worth a look. Locks: NOTIFY's, at commit.
SELECT pg_notify('commandbus_call', t) FROM unnest(%(told)s::text[]) AS t
