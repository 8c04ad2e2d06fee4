-- Makes the one row of limit_mode if somebody has emptied the table. Locks: that row. Index: limit_mode_pkey.
INSERT INTO commandbus.limit_mode (id) VALUES (1) ON CONFLICT (id) DO NOTHING
