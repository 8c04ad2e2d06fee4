"""The shape of the public API, by inspection: pages, `get_…`, operators, exported types, where `Any` is left."""

from __future__ import annotations

import builtins
import inspect
import re
from typing import Any

import pytest

import commandbus
from commandbus import (
    AsyncCommandBus,
    AsyncTroubleshootingQueue,
    AuditLogger,
    BatchRepository,
    CommandBus,
    CommandRepository,
    CommandStatus,
    InvalidCommandError,
    Page,
    PgmqClient,
    ProcessRepository,
    TroubleshootingQueue,
)
from commandbus.bus.sending import CallOptions, SendOptions
from support.public_api import all_parameters, parameters_of, public_methods, results, text_of

BUSES = [(CommandBus, AsyncCommandBus), (TroubleshootingQueue, AsyncTroubleshootingQueue)]
METHODS = [
    (f"{sync.__name__}.{label.rpartition('.')[2]}", method, getattr(asynchronous, label.rpartition(".")[2]))
    for sync, asynchronous in BUSES
    for label, method in public_methods(sync.__name__, sync)
]
OF_OTHERS = {
    *("AbstractAsyncContextManager", "AbstractContextManager", "Any", "AsyncIterator", "Callable", "Event"),
    *("Iterable", "Iterator", "Literal", "Logger", "LoggerAdapter", "Mapping", "NoReturn", "Path", "Self"),
    "Sequence",
    *("AsyncConnection", "AsyncCursor", "Connection", "ConnectionPool", "Cursor"),  # psycopg's
    "APIRouter",  # of FastAPI
    *("C", "F", "R", "S", "T"),  # type variables
}
FIELDS = {
    "Data of Step.data": "a function of the state",
    "ExceptionTypes of RetryPolicy.give_up_on": "an exception type, or several",
    "ExceptionTypes of RetryPolicy.retry_on": "an exception type, or several",
    "Data of Step.undo_data": "a function of the state",
    "OnOpen of Breaker.on_open": "two words",
    "Middleware of Handler.middleware": "checked functions of the registries that it came with",
    "Options of Handler.options": "what the handler asked for, checked",
    "JsonDefault of Handler.json_default": "a function that makes JSON of objects",
    "PayloadParameter of Handler.payload": "how its payload is read",
    "Timeouts of Settings.timeouts": "the same values, in their order",
}
"""Types of fields, not of what methods return; nobody needs to name them."""


def names_in(annotation: str) -> set[str]:
    without_text = re.sub(r"'[^']*'|\"[^\"]*\"", "", annotation)
    return {name for name in re.findall(r"(?<![\w.])[A-Z]\w*", without_text) if not hasattr(builtins, name)}


def test_every_type_that_comes_out_is_exported() -> None:
    found = {(name, where) for where, annotation in results() for name in names_in(annotation)}
    missing = {f"{name} of {where}" for name, where in found if name not in {*commandbus.__all__, *OF_OTHERS}}
    assert missing == set(FIELDS)


ANY_IS_LEFT = {
    r"(Async)?CommandBus\(pool\)|(Worker|ProcessReplyRouter)\(pool\)": "psycopg's type of rows; we set our own",
    r"(Async)?CommandBus\.connect": "psycopg's own type of a plain connection's rows",
    r"(Async)?(Handler|Chunk)Context\.(connection|transaction)": "the handler chooses its rows",
    r"(Handler|Chunk)Transaction\.(cursor|execute)": "those of the connection, which is sync or async",
    r"(Async)?Transaction\.(connection|open|savepoint)": "the handler chooses its rows",
    r"(Async)?Transaction\.(cursor|execute)(\(\w+\))?": "those of psycopg's connection",
    r"(Async)?Transaction\((ctx|stack)\)": "made by us: a context and a stack of either kind",
    r"(BaseProcessManager|Saga)\.on_\w+\(tx\)": "a HandlerTransaction, of a layer above; sync or async",
    r"HandlerRegistry\.register_process\(manager\)|ProcessReplyRouter\(managers\)": "managers of any state",
    r"StepProcess[.(]process\)?|nested\(process\)": "managers of any state",
    r"(Async)?(PgmqClient|\w+Repository|AuditLogger)\(source\)": "psycopg's rows",
    r"AsyncWorker\(options\)": "those of Worker, which checks them",
    r"HandlerRegistry\.dispatch(\(context\))?": "any context; the result is the handler's own",
    r"CreatedBatch\.wait": "a BatchRecord, or what is awaited for it",
    r"Handler[.(](function|written|many)\)?": "what people wrote: its result is JSON, or awaited first",
}


def test_any_is_left_only_where_there_is_a_reason() -> None:
    found = {where for where, annotation in results() if re.search(r"\bAny\b", annotation)}
    found |= {each.label for each in all_parameters() if re.search(r"\bAny\b", each.annotation)}
    unexplained = {label for label in found if not any(re.fullmatch(known, label) for known in ANY_IS_LEFT)}
    assert not unexplained
    assert len(found) <= 75, sorted(found)


NOT_LISTS = {"CommandBus.send_many", "CommandBus.start_processes", "CommandBus.wait_all"}
"""Receipts and outcomes, in the order of what was given."""


@pytest.mark.parametrize(("label", "sync", "asynchronous"), METHODS)
def test_both_buses_have_one_signature(label: str, sync: Any, asynchronous: Any) -> None:
    def shape(method: Any) -> list[tuple[str, object, object, str]]:
        return [
            (
                each.name,
                each.kind,
                each.default,
                each.annotation.replace("| Awaitable[object]", "").replace(" ]", "]"),
            )
            for each in parameters_of(label, method)
        ]

    assert [each[:3] for each in shape(sync)] == [each[:3] for each in shape(asynchronous)]
    if label not in ("CommandBus.wait_for_batch",):  # its on_progress may be async there
        assert shape(sync) == shape(asynchronous)
        ours, theirs = (text_of(inspect.signature(each).return_annotation) for each in (sync, asynchronous))
        assert theirs.replace("Async", "") == ours


@pytest.mark.parametrize(("label", "sync", "asynchronous"), METHODS)
def test_lists_are_pages(label: str, sync: Any, asynchronous: Any) -> None:
    result = text_of(inspect.signature(sync).return_annotation)
    if label not in NOT_LISTS:
        assert not result.startswith(("list[", "Sequence[", "Iterable["))
    parameters = {each.name: each for each in parameters_of(label, sync)}
    if "cursor" in parameters:
        assert result.startswith("Page[")
        assert parameters["cursor"][2:] == ("str | None", inspect.Parameter.KEYWORD_ONLY, None)
        assert parameters["limit"][2:] == ("int", inspect.Parameter.KEYWORD_ONLY, 50)


@pytest.mark.parametrize(("label", "sync", "asynchronous"), METHODS)
def test_get_returns_one_thing_or_none(label: str, sync: Any, asynchronous: Any) -> None:
    if not label.rpartition(".")[2].startswith("get_"):
        return
    result = text_of(inspect.signature(sync).return_annotation)
    assert result.endswith(" | None") or result.startswith("Page["), "one thing or None; a list may be empty"


@pytest.mark.parametrize(("label", "sync", "asynchronous"), METHODS)
def test_operators_have_one_shape(label: str, sync: Any, asynchronous: Any) -> None:
    parameters = list(parameters_of(label, sync))
    names = [each.name for each in parameters]
    if "operator" not in names and "reason" not in names:
        return
    operator = names.index("operator")
    assert names[operator : operator + 2] == ["operator", "reason"]
    for each in parameters[operator : operator + 2]:
        assert each[2:] == ("str | None", inspect.Parameter.KEYWORD_ONLY, None)
    rest = [each for each in names[operator + 2 :] if each != "conn"]
    assert label == "CommandBus.set_limit" or not rest, "its own options come first"


def test_short_methods_are_calls_of_the_parts() -> None:
    """`bus.get_command` is `bus.commands.get`: no second body, signature or docstring."""
    owners = {
        CommandBus: (PgmqClient, CommandRepository, AuditLogger, BatchRepository, ProcessRepository),
        TroubleshootingQueue: (CommandRepository,),
    }
    found: dict[str, str] = {}
    for owner, parts in owners.items():
        bodies = {method: f"{part.__name__}.{name}" for part in parts for name, method in vars(part).items()}
        for label, method in public_methods(owner.__name__, owner):
            if (body := bodies.get(inspect.unwrap(method))) is not None:
                found[label] = body
    assert found["CommandBus.get_command"] == "CommandRepository.get"
    assert found["CommandBus.create_batch"] == "BatchRepository.save"
    assert found["TroubleshootingQueue.operator_retry"] == "CommandRepository.operator_retry"
    assert len(found) >= 30
    assert CommandBus.get_command.__doc__ == CommandRepository.get.__doc__
    own = {name for part in owners[CommandBus] for name in vars(part) if not name.startswith("_")}
    twice = {label for label, _ in public_methods("", CommandBus) if label[1:] in own} - {
        f".{label.rpartition('.')[2]}" for label in found
    }
    assert twice == {".close", ".send"}, "the bus's own: it is closed; send makes a NewCommand for commands.save"


def test_there_is_something_to_inspect() -> None:
    assert len(METHODS) > 50
    assert sum("operator" in {each.name for each in parameters_of(*m[:2])} for m in METHODS) >= 18


def test_a_page() -> None:
    page = Page(["a", "b"], "7")
    assert (list(page), len(page), page[1], page.has_more) == (["a", "b"], 2, "b", True)
    assert not Page([])
    assert not Page([]).has_more


def test_all_pages_of_a_list(database: str) -> None:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        bus.send_many("orders", [{"command_type": "ship"} for _ in range(7)])
        ids, cursor = [], None
        while True:
            page = bus.query_commands(domain="orders", status=CommandStatus.PENDING, limit=3, cursor=cursor)
            ids += [record.id for record in page]
            cursor = page.next_cursor
            if not page.has_more:
                break
        assert ids == sorted(ids, reverse=True)
        assert len(ids) == 7
        for wrong in ("x", "0", "-1", str(2**64), "٣", 5, ""):
            with pytest.raises(InvalidCommandError, match="is not one of this list"):
                bus.query_commands(cursor=wrong)  # type: ignore[arg-type]


def test_what_is_not_there_is_none(database: str) -> None:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        assert bus.get_command("orders", "x") is None
        assert bus.get_outcome("orders", "x") is None
        assert bus.get_batch("orders", "x") is None
        assert bus.get_process("orders", "x") is None
        assert bus.get_limit("x") is None
        assert bus.get_attempts("orders", "x") == bus.get_audit_trail("orders", "x") == Page([])


def test_type_checkers_see_the_options_of_send_and_call() -> None:
    """The overloads name them in a TypedDict, beside the signature that runs."""
    for method, options in ((CommandBus.send, SendOptions), (CommandBus.call, CallOptions)):
        own = inspect.signature(method).parameters.values()
        assert options.__optional_keys__ == {each.name for each in own if each.kind is each.KEYWORD_ONLY}
