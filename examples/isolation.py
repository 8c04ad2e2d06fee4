"""Run a handler in a process of its own. If it crashes, only that process ends."""

import os

from commandbus import CommandBus, CommandInTroubleshootingError, HandlerRegistry, Worker

handlers = HandlerRegistry()  # at module level: the child process imports this file


@handlers.handler("example_images", "resize", isolation="process")
def resize(command, ctx):
    if command.data["file"] == "broken.png":
        os.abort()  # as a C library does that meets a broken file
    return f"{command.data['file']} resized in process {os.getpid()}"


def main():
    with CommandBus() as bus:
        bus.migrate(domains=["example_images"])
        with Worker(handlers):
            result = bus.call("example_images", "resize", {"file": "good.png"})
            print("in another process:", str(os.getpid()) not in result)
            try:
                bus.call("example_images", "resize", {"file": "broken.png"}, max_attempts=1)
            except CommandInTroubleshootingError as error:
                print("broken.png:", error.error_type, error.error)
            print("the worker goes on:", bus.call("example_images", "resize", {"file": "next.png"})[:16])


if __name__ == "__main__":
    main()
