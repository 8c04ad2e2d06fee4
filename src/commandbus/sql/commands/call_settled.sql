-- Tells those who wait in bus.call that these commands' rows are worth a look. Locks: NOTIFY's, at commit.
SELECT pg_catalog.pg_notify('commandbus_call', t) FROM pg_catalog.unnest(%(told)s::text[]) AS t
