-- Sessions of this role over TCP that have the name of a worker, or whose client has one of these ports. A killed
-- worker's handlers may have opened them themselves. The last two columns are this server's own address, NULL if we did
-- not connect by TCP. The sessions of isolated attempts belong to other processes. Locks: none.
SELECT pid, (extract(epoch FROM backend_start) * 1000000::numeric)::bigint, pg_catalog.host(client_addr), client_port,
       extract(epoch FROM pg_catalog.clock_timestamp() - backend_start)::float8,
       pg_catalog.starts_with(application_name, %(prefix)s), pg_catalog.host(pg_catalog.inet_server_addr()),
       pg_catalog.inet_server_port()
  FROM pg_catalog.pg_stat_activity
 WHERE usename = current_user AND backend_type = 'client backend' AND pid <> pg_catalog.pg_backend_pid()
   AND client_addr IS NOT NULL AND client_port > 0 AND backend_start IS NOT NULL
   AND NOT pg_catalog.starts_with(application_name, %(isolated)s)
   AND (pg_catalog.starts_with(application_name, %(prefix)s) OR client_port = ANY (%(ports)s::integer[]))
