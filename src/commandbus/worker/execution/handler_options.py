"""The options of a handler: what may be written, and the checked form. A new option is one line in each of them.

`AllHandlerOptions` is the keyword arguments of `@handlers.handler(…)`, of `register` and of `@handler(…)`;
`HandlerOptions` are those of `@handlers.schedule(…)`, whose other arguments are about its commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, cast

from commandbus.model.chunk import ChunkOptions, check_chunk
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.key_limit import KeyRule
from commandbus.model.limit import Limit, check_limit_name
from commandbus.model.priority import Priority, to_number
from commandbus.model.retry import OnExhausted, RetryPolicy, check_on_exhausted
from commandbus.quick_dataclass import dataclass
from commandbus.worker.execution.key_rules import key_rule, with_keys

OnTimeout = Literal["retry", "fail"]
Isolation = Literal["thread", "process"]
TransactionOption = bool | Literal["read committed", "repeatable read", "serializable"]
_LEVELS = ("read committed", "repeatable read", "serializable")


class HandlerOptions(TypedDict, total=False):
    """The options of a handler that are not options of its commands."""

    retry_policy: RetryPolicy | None
    on_timeout: OnTimeout
    isolation: Isolation
    limits: Sequence[str | Limit]
    fresh_thread: bool
    transaction: TransactionOption
    rehearsable: bool


class AllHandlerOptions(HandlerOptions, total=False):
    """The options of a handler; see `Handler.options`."""

    timeout: Duration | None
    on_exhausted: OnExhausted | None
    priority: Priority | None
    chunk: int | None
    chunk_wait: Duration | None


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of a handler.

    `timeout`: how long one attempt may take, in seconds; 0: no deadline; None: the worker's task_timeout.
    `on_timeout`: "retry" after a timeout, or "fail": the command is FAILED for good. `on_exhausted`: what happens
    when the attempts are used up, "troubleshoot" or "fail"; None: as the retry policy says. `isolation`:
    "process" runs it in a child process, which can be killed without harm to its neighbors. `limits`: it needs a
    permit of each of these; until it has them, its commands are parked. `fresh_thread`: each attempt runs in a new
    thread, which ends with it. `transaction`: True, or the isolation level: it takes a third parameter, `tx`,
    whose writes commit with the command's completion when it returns. `chunk`: it gets a list of so many commands
    at most, or of fewer after so many seconds. `key`: the limit with a key among its limits: so many of a key run
    at once. `priority`: that of commands that are sent without one: 1 is high, 0 normal, -1 low. `rehearsable`: it
    does nothing outside its context, so a rehearsal may run it where the network cannot be taken away.
    """

    retry_policy: RetryPolicy | None = None
    timeout: float | None = None
    on_timeout: OnTimeout = "retry"
    isolation: Isolation = "thread"
    limits: tuple[str, ...] = ()
    fresh_thread: bool = False
    on_exhausted: OnExhausted | None = None
    transaction: TransactionOption = False
    chunk: ChunkOptions | None = None
    key: KeyRule | None = None
    priority: int | None = None
    rehearsable: bool = False


def check_options(**given: Unpack[AllHandlerOptions]) -> Options:
    """The options as they are used. An error names the option and its value."""
    if unknown := sorted(set(given) - _KNOWN):
        raise TypeError(f"a handler has no option {unknown[0]!r}; it has {', '.join(sorted(_KNOWN))}")
    timeout, on_exhausted = given.get("timeout"), given.get("on_exhausted")
    return Options(
        retry_policy=_policy(given.get("retry_policy")),
        timeout=None if timeout is None else parse_seconds(timeout, name="timeout"),
        on_timeout=cast(OnTimeout, _one_of(("retry", "fail"), given.get("on_timeout", "retry"), "on_timeout")),
        isolation=cast(Isolation, _one_of(("thread", "process"), given.get("isolation", "thread"), "isolation")),
        limits=_limit_names(given.get("limits", ())),
        fresh_thread=_flag(given.get("fresh_thread", False), "fresh_thread"),
        on_exhausted=None if on_exhausted is None else check_on_exhausted(on_exhausted),
        transaction=_transaction(given.get("transaction", False)),
        chunk=check_chunk(given.get("chunk"), given.get("chunk_wait")),
        key=key_rule(given.get("limits", ())),
        priority=to_number(given.get("priority")),
        rehearsable=_flag(given.get("rehearsable", False), "rehearsable"),
    )


_KNOWN = AllHandlerOptions.__optional_keys__


def declared_limits(options: AllHandlerOptions | HandlerOptions) -> list[Limit]:
    """The limits that are declared where they are named."""
    return [item for item in options.get("limits", ()) if isinstance(item, Limit)]


def _policy(value: object) -> RetryPolicy | None:
    if value is not None and not isinstance(value, RetryPolicy):
        raise TypeError(f"retry_policy must be a RetryPolicy, not {type(value).__name__}")
    return value


def _one_of(known: tuple[str, str], value: object, name: str) -> object:
    if value not in known:
        raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}", not {value!r}')
    return value


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def _transaction(value: object) -> TransactionOption:
    if not isinstance(value, bool) and value not in _LEVELS:
        raise ValueError(
            f"transaction must be True, False, or an isolation level ({', '.join(map(repr, _LEVELS))}), "
            f"not {value!r:.80}"
        )
    return cast(TransactionOption, value)


def _limit_names(limits: object) -> tuple[str, ...]:
    if isinstance(limits, str | Limit) or not isinstance(limits, Sequence):
        raise TypeError(f'limits must be a list of names or Limits, such as ["docai"], not {limits!r:.80}')
    # In one order everywhere, so that two handlers never wait for each other's.
    names = {item.name if isinstance(item, Limit) else check_limit_name(item) for item in limits}
    return tuple(sorted(names - {item.name for item in with_keys(limits)}))
