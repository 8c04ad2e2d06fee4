"""The demo's handlers: code as you would write it, with one handler for each kind of outcome.

commandbus worker commandbus.cli.demo.handlers:registry
"""

from __future__ import annotations

import random
import time

from commandbus import (
    BusinessRuleException,
    Command,
    HandlerContext,
    HandlerRegistry,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
)

DOMAIN = "demo"

registry = HandlerRegistry()
soon = RetryPolicy(max_attempts=3, backoff_schedule=[1.0, 2.0], jitter=0.2)


@registry.handler(DOMAIN, "greet")
def greet(command: Command, ctx: HandlerContext) -> dict[str, object]:
    """Succeeds. The return value is the command's result."""
    _work()
    return {"greeting": f"hello, {command.data['name']}", "worker": ctx.worker}


@registry.handler(DOMAIN, "call_flaky_service", retry_policy=soon)
def call_flaky_service(command: Command, ctx: HandlerContext) -> dict[str, object]:
    """Fails as often as its data says, then succeeds: the retry policy tries it again."""
    _work()
    if ctx.attempt <= command.data["failures"]:
        raise TransientCommandError("the service answered 503", code="UNAVAILABLE")
    return {"attempts": ctx.attempt}


@registry.handler(DOMAIN, "import_file")
def import_file(command: Command, ctx: HandlerContext) -> None:
    """Never succeeds: a person must look at it."""
    _work()
    ctx.log.info("looking into %s", command.data["file"])
    raise PermanentCommandError(f"{command.data['file']} is not a CSV file", code="BAD_FILE")


@registry.handler(DOMAIN, "withdraw")
def withdraw(ctx: HandlerContext) -> None:
    """A business rule refuses the command. That is a valid outcome, and no person has to look at it. A handler may
    have the context as its only parameter."""
    _work()
    raise BusinessRuleException(f"the account lacks {ctx.command.data['amount']} EUR", code="NO_FUNDS")


@registry.handler(DOMAIN, "hang", timeout=1, retry_policy=RetryPolicy(max_attempts=1))
def hang(ctx: HandlerContext) -> None:
    """Never returns, and does not react to anything. It is given up, and its worker is replaced. Other commands
    are not affected."""
    ctx.log.info("hanging for an hour")
    time.sleep(3600)


def _work() -> None:
    time.sleep(random.uniform(0.01, 0.08))  # noqa: S311 - a pretence of work
