"""A shared limit of API calls for programs that are no commandbus workers: all they need is Redis.

`RedisSemaphore` holds permits under the same keys and by the same scripts as a `Limit` whose permits are in Redis
(`{name}_semaphore:{environment}`): a program that uses the class and a worker that uses the limit count together.
The names and their parameters are those of the specification that they come from, `acquire(timeout=)` included.
"""

from commandbus.errors import RateLimitError
from commandbus.rate_limiter.calls import (
    BACKOFF_BASE,
    BACKOFF_MAX,
    CHUNK_TIMEOUT_SECONDS,
    RateLimitContext,
    calculate_backoff,
    process_chunk_with_timeout,
    process_with_retry,
    process_with_retry_sync,
    rate_limited_api_call,
)
from commandbus.rate_limiter.semaphore import (
    MAX_CONCURRENT_CALLS,
    AsyncRedisSemaphore,
    RedisSemaphore,
    SlotTimeoutError,
)

__all__ = [
    "BACKOFF_BASE",
    "BACKOFF_MAX",
    "CHUNK_TIMEOUT_SECONDS",
    "MAX_CONCURRENT_CALLS",
    "AsyncRedisSemaphore",
    "RateLimitContext",
    "RateLimitError",
    "RedisSemaphore",
    "SlotTimeoutError",
    "calculate_backoff",
    "process_chunk_with_timeout",
    "process_with_retry",
    "process_with_retry_sync",
    "rate_limited_api_call",
]
