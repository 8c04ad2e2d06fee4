"""Send a command in the same transaction as your own data: both are committed, or neither is."""

from commandbus import CommandBus, HandlerRegistry, Worker

handlers = HandlerRegistry()


@handlers.handler("example_shop", "ship")
def ship(command, ctx):
    print("shipping order", command.data["order_no"])


def place_order(bus, order_no, *, card_is_good):
    # bus.connect() opens a new connection each time: an application lends one of its own pool instead.
    with bus.connect() as conn, conn.transaction():
        conn.execute("INSERT INTO example_order VALUES (%s)", [order_no])
        bus.send("example_shop", "ship", {"order_no": order_no}, conn=conn)
        if not card_is_good:
            raise ValueError("the card was refused")


with CommandBus() as bus:
    bus.migrate(domains=["example_shop"])
    with bus.connect() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS example_order (order_no int)")
        conn.execute("TRUNCATE example_order")

    place_order(bus, 1, card_is_good=True)
    try:
        place_order(bus, 2, card_is_good=False)
    except ValueError as error:
        print("order 2 was rolled back:", error)

    Worker(handlers).run(until_idle=True)
    with bus.connect() as conn:
        print("orders in the table:", conn.execute("SELECT order_no FROM example_order").fetchall())
