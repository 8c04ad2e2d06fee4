"""Which connection of its pool a bus uses."""

from __future__ import annotations

import asyncio

from commandbus.db.bus_pool import make_async_bus_pool, make_bus_pool
from commandbus.settings import Settings


def test_a_lone_caller_gets_the_same_connection_again(database: str) -> None:
    """What the server process behind it has in its caches is used again."""
    pool = make_bus_pool(Settings(database_url=database), max_size=3, is_patient=False)
    pool.open()
    try:
        taken = [pool.take() for _ in range(3)]
        for conn in taken:
            pool.putconn(conn)
        for _ in range(3):
            conn = pool.take()
            assert conn is taken[-1]
            pool.putconn(conn)
    finally:
        pool.close()


def test_the_same_in_async_code(database: str) -> None:
    async def use() -> None:
        pool = make_async_bus_pool(Settings(database_url=database), max_size=3, is_patient=False)
        await pool.open()
        try:
            taken = [await pool.take() for _ in range(3)]
            for conn in taken:
                await pool.putconn(conn)
            for _ in range(3):
                conn = await pool.take()
                assert conn is taken[-1]
                await pool.putconn(conn)
        finally:
            await pool.close()

    asyncio.run(use())
