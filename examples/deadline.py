"""Give an attempt a deadline, and let the handler stop in time by itself."""

from commandbus import CommandBus, CommandFailedError, DeadlineExceededError, HandlerRegistry, Worker

handlers = HandlerRegistry()


@handlers.handler("example_files", "import", timeout="0.5s", on_timeout="fail")  # "retry" is the default
def import_file(command, ctx):
    done = 0
    try:
        while done < command.data["pages"]:
            ctx.raise_if_canceled()
            done += 1
            ctx.sleep(0.1)  # ends early when the attempt is asked to stop; for a client: timeout=ctx.remaining()
    except DeadlineExceededError:
        print(f"asked to stop after {done} pages; closing the file")
        raise
    return f"{command.data['pages']} pages"


with CommandBus() as bus:
    bus.migrate(domains=["example_files"])
    with Worker(handlers):
        print("small file:", bus.call("example_files", "import", {"pages": 2}))
        try:
            bus.call("example_files", "import", {"pages": 1000})
        except CommandFailedError as error:
            print("large file:", error.error_code)
        print("more time:", bus.call("example_files", "import", {"pages": 8}, timeout="10s"))
