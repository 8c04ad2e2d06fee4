"""No thread, process or file is left for what an attempt needs.

One handler can use up all of them. Its neighbors must not be charged for that: their attempts are given back, or
stopped without a charge, and the worker claims nothing for a moment.
"""

from __future__ import annotations

import errno
from typing import Final

from commandbus.errors import TransientCommandError

_ERRNOS: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class ExhaustedError(TransientCommandError):
    """The worker could not start a thread that the handler's context needs. The attempt is not charged."""

    default_code = "EXHAUSTED"


def is_exhaustion(error: BaseException) -> bool:
    """Does this error of our own code mean that the process or its machine has nothing left?"""
    if isinstance(error, RuntimeError):
        return "can't start new thread" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _ERRNOS)
