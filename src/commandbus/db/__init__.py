"""Everything that touches a PostgreSQL server: drivers, pools, LISTEN, PGMQ's set-up, the embedded server."""
