"""A trace that follows its commands: code around every send and attempt, and what a worker opens at its start."""

from contextvars import ContextVar

from commandbus import CommandBus, HandlerRegistry, Worker

handlers = HandlerRegistry()
trace = ContextVar("trace", default="no trace")


@handlers.lifespan
def open_book(state):
    state.book = []
    yield
    print("\n".join(state.book))  # after the last attempt


@handlers.send_middleware
def send_trace(domain, new):
    new.headers["traceparent"] = trace.get()
    yield


@handlers.middleware
def continue_trace(command, ctx):
    trace.set(command.headers["traceparent"])
    yield
    ctx.state.book.append(f"{command.command_type} in {trace.get()}")


if __name__ == "__main__":
    with CommandBus(middleware=handlers) as bus:
        bus.migrate(domains=["example_traces"])
        handlers.register("example_traces", "ship", lambda _: bus.send("example_traces", "bill").wait())
        handlers.register("example_traces", "bill", lambda _: None)
        with Worker(handlers):
            trace.set("trace 4711")
            bus.call("example_traces", "ship")
