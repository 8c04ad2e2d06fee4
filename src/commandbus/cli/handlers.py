"""`handlers`: what a registry handles, and the JSON Schema of each payload. It needs no database."""

from __future__ import annotations

from typing import Any

import click

from commandbus.cli.render import print_json, print_table
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.model.durations import format_seconds
from commandbus.model.payload_types import name_of
from commandbus.worker.execution.handlers import Handler, HandlerRegistry
from commandbus.worker.load_handlers import load_registry


@click.command(cls=CliCommand)
@click.argument("handlers", metavar="[MODULE:REGISTRY]", required=False)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of each payload, by domain/command_type.")
@click.option("--domain", metavar="NAME", help="Only the handlers of this domain.")
@click.pass_obj
def handlers(session: CliSession, handlers: str | None, *, schema: bool, domain: str | None) -> None:
    """List the handlers of a registry, with their payloads and options.

    MODULE is imported, with the working directory on the path. REGISTRY is a commandbus.HandlerRegistry in it
    (default: WORKER_HANDLERS). No database is needed. --schema prints one JSON document: the JSON Schema (draft
    2020-12) of the payload of each command type. A handler that takes the command accepts any payload: `true`.
    """
    registry = load_registry(session.settings(handlers=handlers).handlers)
    registry.resolve()
    found = _sorted(registry, domain)
    if schema:
        print_json({f"{each.domain}/{each.command_type}": schema_for(each) for each in found})
        return
    documents = [_document(each) for each in found]
    session.answer(documents, lambda: _print(documents))


def _sorted(registry: HandlerRegistry, domain: str | None) -> list[Handler]:
    found = [each for each in registry if domain in (None, each.domain)]
    if domain is not None and not found:
        known = ", ".join(registry.domains) or "none"
        raise click.BadParameter(f"the registry has no handler for domain {domain!r}; it has {known}")
    return sorted(found, key=lambda each: (each.domain, each.command_type))


def schema_for(handler: Handler) -> Any:
    """The JSON Schema of a handler's payload; True if it accepts any."""
    from commandbus.model.payload_schema import schema_of

    kind = None if handler.payload is None else handler.payload.resolve()
    return True if kind is None else schema_of(kind)


def _document(handler: Handler) -> dict[str, Any]:
    kind, options = None if handler.payload is None else handler.payload.resolve(), handler.options
    return {
        "domain": handler.domain,
        "command_type": handler.command_type,
        "handler": handler.name,
        "is_async": handler.is_async,
        "is_process": handler.is_router,
        "payload": None if kind is None else name_of(kind),
        "transaction": options.transaction,
        "timeout": options.timeout,
        "on_timeout": options.on_timeout,
        "on_exhausted": options.on_exhausted,
        "max_attempts": None if options.retry_policy is None else options.retry_policy.max_attempts,
        "isolation": options.isolation,
        "fresh_thread": options.fresh_thread,
        "limits": list(options.limits),
    }


def _print(documents: list[dict[str, Any]]) -> None:
    rows = [
        (each["domain"], each["command_type"], each["payload"] or "", each["handler"], ", ".join(_options(each)))
        for each in documents
    ]
    print_table(
        columns("domain =command_type payload handler? ~options?"), rows, empty="the registry has no handlers"
    )


def _options(each: dict[str, Any]) -> list[str]:
    """What is not as usual, in words."""
    unusual = ["async"] if each["is_async"] else []
    unusual += ["a process"] if each["is_process"] else []
    if each["transaction"]:
        unusual.append("transaction" if each["transaction"] is True else f"transaction ({each['transaction']})")
    if each["timeout"] is not None:
        unusual.append(f"timeout {format_seconds(each['timeout'])}" if each["timeout"] else "no deadline")
    unusual += ["fails on timeout"] if each["on_timeout"] == "fail" else []
    unusual += ["in a child process"] if each["isolation"] == "process" else []
    unusual += ["in a fresh thread"] if each["fresh_thread"] else []
    unusual += [f"max_attempts {each['max_attempts']}"] if each["max_attempts"] is not None else []
    unusual += [f"on_exhausted {each['on_exhausted']}"] if each["on_exhausted"] else []
    return unusual + ([f"limits {', '.join(each['limits'])}"] if each["limits"] else [])


COMMANDS = [handlers]
