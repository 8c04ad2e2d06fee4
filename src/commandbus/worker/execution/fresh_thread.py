"""Runs a handler's code in a new thread that is not used again.

For handlers with `fresh_thread=True`: what they leave in thread-locals ends with their thread. Starting and ending
a thread costs about 50 µs. The caller waits, so an attempt still has one slot, and the slot one attempt.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from commandbus.worker.exhaustion import ExhaustedError

T = TypeVar("T")


def in_fresh_thread(body: Callable[[], T], *, on_start: Callable[[], None] = lambda: None) -> T:
    """Run it in a new thread, with the caller's context variables; returns when that thread has ended.

    `on_start` is called first, in that thread.
    """
    context = contextvars.copy_context()
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            on_start()
            answers.append(context.run(body))
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
            errors.append(error)

    thread = threading.Thread(target=work, name=f"{threading.current_thread().name}-fresh", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ExhaustedError(
            f"the fresh thread that the handler asks for could not be started: {error}"
        ) from error
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]
