"""`commandbus handlers`: what a registry handles, and the JSON Schemas of the payloads."""

from __future__ import annotations

import pytest

from commandbus.cli.exit_codes import ExitCode
from support.schemas import validator_of

MODULE = """
from dataclasses import dataclass
from typing import TypedDict
import msgspec, pydantic
from commandbus import HandlerRegistry, RetryPolicy

@dataclass
class Ship:
    order_no: int
    note: str = ""

class Bill(pydantic.BaseModel):
    total: float

class Mail(msgspec.Struct):
    to: str

class Log(TypedDict):
    text: str

handlers = HandlerRegistry()

@handlers.handler("orders", "ship", transaction=True, timeout="90s", retry_policy=RetryPolicy(max_attempts=7))
def ship(order: Ship, ctx, tx): ...

@handlers.handler("orders", "bill", isolation="process", limits=["docai"])
async def bill(order: Bill, ctx): ...

@handlers.handler("mail", "send")
def send(mail: Mail): ...

@handlers.handler("mail", "log")
def log(entry: "Log", ctx): ...

@handlers.handler("mail", "old")
def old(command, ctx): ...

broken = HandlerRegistry()

@broken.handler("orders", "ship")
def lost(order: "Nowhere", ctx): ...
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    (tmp_path / "typed_shop.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "typed_shop"


def test_it_lists_handlers_with_payloads_and_options(cli, shop):
    answer = cli("handlers", f"{shop}:handlers")
    assert answer.code == ExitCode.OK
    for words in (
        "ship",
        "Ship",
        "transaction, timeout 1m30s, max_attempts 7",
        "async, in a child process, limits d",
    ):
        assert words in answer.out
    documents = cli("handlers", f"{shop}:handlers", "--json").document
    assert [(each["domain"], each["command_type"], each["payload"]) for each in documents] == [
        ("mail", "log", "Log"),
        ("mail", "old", None),
        ("mail", "send", "Mail"),
        ("orders", "bill", "Bill"),
        ("orders", "ship", "Ship"),
    ]
    assert documents[4]["transaction"] is True
    assert documents[4]["timeout"] == 90
    only = cli("handlers", f"{shop}:handlers", "--domain", "orders", "--json").document
    assert [each["command_type"] for each in only] == ["bill", "ship"]


def test_schemas(cli, shop):
    schemas = cli("handlers", f"{shop}:handlers", "--schema").document
    assert schemas["mail/old"] is True
    examples = {
        "orders/ship": ({"order_no": 1}, {"order_no": "1"}),
        "orders/bill": ({"total": 1.5}, {"total": "x"}),
        "mail/send": ({"to": "a"}, {}),
        "mail/log": ({"text": "a"}, {"text": "a", "more": 1}),
    }
    assert set(schemas) == {*examples, "mail/old"}
    for name, (good, bad) in examples.items():
        validator = validator_of(schemas[name])
        assert validator.is_valid(good), name
        assert not validator.is_valid(bad), name


def test_mistakes_are_named(cli, shop):
    lost = cli("handlers", f"{shop}:broken")
    assert lost.code == ExitCode.CONFIGURATION
    assert "the annotation 'Nowhere' of handler 'lost' cannot be resolved" in lost.err
    assert cli("handlers", f"{shop}:handlers", "--domain", "nowhere").code == ExitCode.USAGE
    assert "there is no module 'nobody'" in cli("handlers", "nobody:handlers").err
    assert cli("handlers").code == ExitCode.CONFIGURATION
