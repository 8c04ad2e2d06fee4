-- Which commands in the troubleshooting queue a plan chooses: a part of other statements. Locks: none.
-- Index: tsq_domain_type, or tsq's key if ids are given.
t.domain = %(domain)s
       AND (%(command_type)s::text IS NULL OR t.command_type = %(command_type)s)
       AND (%(error_code)s::text IS NULL OR t.error_code = %(error_code)s)
       AND (%(fingerprint)s::text IS NULL OR t.fingerprint = %(fingerprint)s)
       AND (%(ids)s::bigint[] IS NULL OR t.command = ANY (%(ids)s::bigint[]))
