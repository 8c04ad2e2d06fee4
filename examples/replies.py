"""Have the outcome of a command sent to a queue of your own, in the transaction that settles the command."""

from commandbus import BusinessRuleException, CommandBus, HandlerRegistry, Worker

QUEUE = "example_replies"
handlers = HandlerRegistry()


@handlers.handler("example_bank", "withdraw")
def withdraw(command, ctx):
    if command.data["amount"] > 100:
        raise BusinessRuleException("not enough money", code="NO_FUNDS")  # FAILED for good, without a retry
    return {"left": 100 - command.data["amount"]}


with CommandBus() as bus:
    bus.migrate(domains=["example_bank"])
    bus.create_queue(QUEUE)
    for amount in (30, 300):
        bus.send("example_bank", "withdraw", {"amount": amount}, correlation_id=f"{amount} EUR", reply_to=QUEUE)

    Worker(handlers, concurrency=1).run(until_idle=True)

    with bus.connect() as conn:  # any PGMQ client can read the queue, in any language
        for (reply,) in conn.execute("SELECT message FROM pgmq.pop(%s, 2)", [QUEUE]):
            why = f", because of {reply['error']['code']}" if "error" in reply else ""
            print(f"{reply['correlation_id']}: {reply['outcome']} {reply['result']}{why}")
