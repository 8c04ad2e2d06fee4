"""The two commands of the pipeline: recognize a chunk, and merge the document.

    commandbus worker handlers:handlers --processes 3

What the API allows is declared in commandbus.toml, once for all workers. `limits=["docai"]` is all that it takes
to keep to it: a chunk whose turn has not come is parked, holds no slot, and spends no attempt.
"""

from __future__ import annotations

import base64
import os
from urllib.request import Request, urlopen

from commandbus import BusinessRuleException, Command, HandlerContext, HandlerRegistry, RetryPolicy

# Neither table has a key: a chunk or a document that was written twice would show.
TABLES = """
    CREATE TABLE chunk    (document text NOT NULL, number int NOT NULL, content text NOT NULL);
    CREATE TABLE document (document text NOT NULL, chunks int NOT NULL, content text NOT NULL);
"""

handlers = HandlerRegistry()


@handlers.handler(
    "ocr", "recognize", limits=["docai"], retry_policy=RetryPolicy(max_attempts=6, backoff_schedule=[1, 2])
)
def recognize(command: Command, ctx: HandlerContext) -> None:
    """One chunk. What goes wrong need not be caught: a 429 is known by its status and `Retry-After`, the chunk is
    parked, and nobody in the fleet calls until that time is over. All else is tried again by the policy."""
    chunk = command.data
    # The block uses the permit that the command has by `limits`, and bounds the call by the limit's call_timeout.
    # A call that takes longer fails this attempt with the code TIMEOUT. The API may still be working, so the
    # permit stays taken until its lease ends.
    with ctx.limit("docai") as call:
        content = ask_api(chunk["number"], base64.b64decode(chunk["scan"]), timeout=call.remaining())
    with ctx.transaction() as tx:  # written with the command's completion, or not at all
        tx.execute("INSERT INTO chunk VALUES (%s, %s, %s)", [chunk["document"], chunk["number"], content])
        tx.complete({"letters": len(content)})


def ask_api(number: int, scan: bytes, timeout: float | None) -> str:
    """The call itself, as one makes it with any client."""
    request = Request(os.environ["OCR_API"], data=scan, headers={"Chunk": str(number)})
    with urlopen(request, timeout=timeout) as answer:
        return str(answer.read(), "utf-8")


@handlers.handler("ocr", "merge")
def merge(command: Command, ctx: HandlerContext) -> None:
    """What the batch sends when its last chunk has ended."""
    batch = command.data
    if batch["completed"] < batch["total"]:
        raise BusinessRuleException(f"{batch['total'] - batch['completed']} chunks are missing")
    with ctx.transaction() as tx:
        tx.execute(
            "INSERT INTO document SELECT document, count(*), string_agg(content, '' ORDER BY number) FROM chunk "
            "WHERE document = %s GROUP BY document",
            [batch["batch_id"]],
        )
