"""A small shop: what it sells and how it is paid, and the saga that makes an order of it.

    commandbus worker app:handlers

Every handler writes in `ctx.transaction()`: what it writes commits together with its command's completion, or not
at all. So none of them needs a note of what it has done before: killed or retried, it does its work once.
"""

from __future__ import annotations

from commandbus import (
    BusinessRuleException,
    Command,
    HandlerContext,
    HandlerRegistry,
    PermanentCommandError,
    Saga,
    step,
)

TABLES = """
    CREATE TABLE stock  (item text PRIMARY KEY, price int NOT NULL, on_hand int NOT NULL CHECK (on_hand >= 0));
    CREATE TABLE card   (card text PRIMARY KEY, credit int NOT NULL);
    CREATE TABLE ledger (order_no text NOT NULL, entry text NOT NULL, amount int NOT NULL);
    CREATE TABLE parcel (order_no text NOT NULL, address text NOT NULL);
    CREATE TABLE closed (completed int, failed int, canceled int);
"""

handlers = HandlerRegistry()

order = Saga(
    "order",
    step("reserve", "stock", undo="release"),
    step("charge", "billing", undo="refund"),
    step("ship", "shipping"),
)
handlers.register_process(order)


@handlers.handler("stock", "reserve")
def reserve(command: Command, ctx: HandlerContext) -> None:
    """Take the goods off the shelf. Its result is kept in the state, under the step's name."""
    wanted = command.data
    with ctx.transaction() as tx:
        row = tx.execute(
            "UPDATE stock SET on_hand = on_hand - %(count)s WHERE item = %(item)s AND on_hand >= %(count)s "
            "RETURNING price * %(count)s",
            wanted,
        ).fetchone()
        if row is None:
            raise BusinessRuleException(f"{wanted['item']} is sold out")  # FAILED for good: the saga turns round
        tx.complete({"price": row[0]})


@handlers.handler("stock", "release")
def release(command: Command, ctx: HandlerContext) -> None:
    """Put them back."""
    with ctx.transaction() as tx:
        tx.execute("UPDATE stock SET on_hand = on_hand + %(count)s WHERE item = %(item)s", command.data)


@handlers.handler("billing", "charge")
def charge(command: Command, ctx: HandlerContext) -> None:
    """Take the money. A card that nobody knows is a case for a person."""
    wanted, price = command.data, command.data["reserve"]["price"]
    with ctx.transaction() as tx:
        known = tx.execute("SELECT credit FROM card WHERE card = %(card)s", wanted).fetchone()
        if known is None:
            raise PermanentCommandError(f"card {wanted['card']} is unknown", code="UNKNOWN_CARD")
        if price > known[0]:
            raise BusinessRuleException(f"card {wanted['card']} is not good for {price}")
        tx.execute("INSERT INTO ledger VALUES (%s, 'charge', %s)", [wanted["order_no"], price])
        if wanted["card"] == "slow bank":
            ctx.heartbeat("the entry is written, and not committed")  # seen by whoever looks at the command
            ctx.sleep("3s")


@handlers.handler("billing", "refund")
def refund(command: Command, ctx: HandlerContext) -> None:
    """Give it back."""
    with ctx.transaction() as tx:
        amount = -command.data["reserve"]["price"]
        tx.execute("INSERT INTO ledger VALUES (%s, 'refund', %s)", [command.data["order_no"], amount])


@handlers.handler("shipping", "ship", timeout="2m")
def ship(command: Command, ctx: HandlerContext) -> None:
    """Send the parcel. To the island it waits for the ferry, unless somebody cancels the order meanwhile."""
    address = command.data["address"]
    if address == "Atlantis":
        raise BusinessRuleException("nobody delivers to Atlantis")
    if address == "Island":
        ctx.sleep("1m")
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO parcel VALUES (%(order_no)s, %(address)s)", command.data)


@handlers.handler("billing", "close")
def close(command: Command, ctx: HandlerContext) -> None:
    """What the batch of orders sends when the last one has ended."""
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO closed VALUES (%(completed)s, %(failed)s, %(canceled)s)", command.data)
