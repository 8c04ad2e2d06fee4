"""Payloads that are read as types in child processes."""

from __future__ import annotations

from typing import Any

import psycopg

from support import typed_orders
from support.isolating import MakeLab

NUT = {"name": "nut", "price": "0.10"}


def test_payloads_are_read_in_the_child_process(make_lab: MakeLab, db: psycopg.Connection[Any]) -> None:
    lab = make_lab(typed_orders.handlers)
    found = lab.result("isolated", {"order_no": 3, "items": [NUT], "color": "blue"})
    assert (found["kind"], found["again"]["order_no"], found["again"]["color"]) == ("DataclassOrder", 3, "blue")
    attempt = lab.claim("isolated_async", {"orderNo": 7, "items": []})
    assert lab.run(attempt) is None
    assert db.execute("SELECT what FROM effects").fetchall() == [("7",)]
    attempt = lab.claim("isolated", {"order_no": "x", "items": []})
    lab.settle(attempt, lab.run(attempt))
    said = lab.last(attempt)
    assert (said.verdict, said.error_type, said.error_code) == (
        "PERMANENT",
        "InvalidPayloadError",
        "INVALID_PAYLOAD",
    )
    assert "data.order_no: must be a whole number, not 'x'" in said.error
    assert said.details[0]["path"] == "data.order_no"
