"""What the server enforces for a session of a thread of ours."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors as pg

from commandbus.db.pool import connect_own
from commandbus.db.transient_errors import is_passing
from commandbus.settings import Settings
from support.waiting import until

BACKENDS = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"


def test_a_session_whose_client_is_cut_off_in_a_transaction_ends_and_frees_its_locks(database: str) -> None:
    """The client says nothing more, as if its network were silent: the server must not wait for its keepalives."""
    settings = Settings(database_url=database)
    with connect_own(settings, name="cut off", statement_seconds=0.5, lock_seconds=0.4) as conn:
        conn.execute("BEGIN")
        conn.execute("LOCK TABLE commandbus.limits IN EXCLUSIVE MODE")
        with psycopg.connect(database, autocommit=True) as other:
            found = other.execute(BACKENDS, [conn.info.backend_pid]).fetchone()
            assert found == (1,)
            until(lambda: other.execute(BACKENDS, [conn.info.backend_pid]).fetchone() == (0,))
            other.execute("SET lock_timeout = '1s'")
            with other.transaction():
                other.execute("LOCK TABLE commandbus.limits IN EXCLUSIVE MODE")
        with pytest.raises(pg.IdleInTransactionSessionTimeout) as ended:
            conn.execute("COMMIT")
        assert is_passing(ended.value), "the thread connects anew, and does its round again"


def test_a_session_that_holds_no_transaction_may_be_idle(database: str) -> None:
    settings = Settings(database_url=database)
    with connect_own(settings, name="idle", statement_seconds=0.2, lock_seconds=0.1) as conn:
        limits = conn.execute(
            "SELECT name, setting FROM pg_settings WHERE name IN "
            "('idle_in_transaction_session_timeout', 'idle_session_timeout', 'statement_timeout', 'lock_timeout')"
        ).fetchall()
        assert dict(limits) == {
            "statement_timeout": "200",
            "lock_timeout": "100",
            "idle_in_transaction_session_timeout": "200",
            "idle_session_timeout": "0",
        }
