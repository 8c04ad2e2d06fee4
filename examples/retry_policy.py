"""Say how often a failed command is tried again, and after which pauses."""

from commandbus import (
    CommandBus,
    CommandInTroubleshootingError,
    HandlerRegistry,
    RetryPolicy,
    TransientCommandError,
    Worker,
)

handlers = HandlerRegistry()
patient = RetryPolicy(max_attempts=4, backoff_schedule=[0.1, 0.2], jitter=0)  # the last pause repeats


@handlers.handler("example_ftp", "upload", retry_policy=patient)
def upload(command, ctx):
    print(f"{command.data['file']}: attempt {ctx.attempt} of {ctx.max_attempts}")
    if ctx.attempt <= command.data["bad_attempts"]:
        raise TransientCommandError("the server is busy")
    return "uploaded"


with CommandBus() as bus:
    bus.migrate(domains=["example_ftp"])
    with Worker(handlers):
        print("good.csv:", bus.call("example_ftp", "upload", {"file": "good.csv", "bad_attempts": 2}))
        try:  # a sender can allow fewer attempts, or more
            bus.call("example_ftp", "upload", {"file": "bad.csv", "bad_attempts": 9}, max_attempts=2)
        except CommandInTroubleshootingError as error:
            print("bad.csv: in the troubleshooting queue:", error.error)
