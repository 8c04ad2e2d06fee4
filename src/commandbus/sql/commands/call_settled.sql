-- Notifies the callers that wait in bus.call that these commands have news. Locks: NOTIFY's, at commit.
SELECT pg_catalog.pg_notify('commandbus_call', t) FROM pg_catalog.unnest(%(told)s::text[]) AS t
