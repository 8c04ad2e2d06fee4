"""Handle many commands in one call: one INSERT for all, and an outcome for each."""

from commandbus import CommandBus, CommandStatus, HandlerRegistry, NewCommand, PermanentCommandError, Worker

handlers = HandlerRegistry()


@handlers.handler("example_search", "index", chunk=100, chunk_wait="50ms", transaction=True)
def index(commands, ctx, tx):
    pages = [command.data for command in commands if command.data["text"]]
    print(f"a chunk of {len(commands)}" if len(commands) > 1 else f"page {commands[0].data['page']} by itself")
    if any(page["text"] == "poison" for page in pages):
        raise ValueError("nobody knows which page it was")
    tx.execute(
        "INSERT INTO example_pages SELECT * FROM unnest(%s::int[], %s::text[])",
        ([page["page"] for page in pages], [page["text"] for page in pages]),
    )
    return [None if command.data["text"] else PermanentCommandError("no text") for command in commands]


with CommandBus() as bus:
    bus.migrate(domains=["example_search"])
    with bus.connect() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS example_pages (page int, text text)")
    texts = [["some text"] * 99 + [""], ["good", "poison", "good"]]  # a bad page, and a chunk that fails
    for chunk in texts:
        pages = [{"page": number, "text": text} for number, text in enumerate(chunk)]
        sent = bus.send_many("example_search", [NewCommand("index", page, max_attempts=1) for page in pages])
        Worker(handlers, concurrency=1).run(until_idle=True)
        found = [bus.get_command("example_search", each.command_id).status for each in sent]
        print(f"{found.count(CommandStatus.COMPLETED)} of {len(found)} completed")
