"""`roles`: the least-privilege roles, created and granted, or as SQL."""

from __future__ import annotations

import click

from commandbus.cli.parameters import DURATION
from commandbus.cli.render import print_table
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.flow.setup.roles import print_roles

PURPOSES = {
    "reader": "looks: status, commands, show",
    "producer": "sends, and reads the outcome of commands whose id it knows",
    "limiter": "uses limits in an application (bus.limit)",
    "worker": "claims and settles; may also do what a producer may",
    "operator": "troubleshooting queue, cancel, pause, prune",
}


# Printed as an SQL comment, because the login of the workers is not known here. A direct connection does not need
# it.
BEHIND_A_POOLER = """\

-- Behind PgBouncer in transaction mode workers set no timeouts in a session. Set them for the workers' login:
-- ALTER ROLE app SET lock_timeout = '2s';
-- ALTER ROLE app SET statement_timeout = '30s';
-- ALTER ROLE app SET default_transaction_isolation = 'read committed';
"""


@click.command(cls=CliCommand)
@click.option("--print", "print_sql", is_flag=True, help="Print the SQL and do nothing else.")
@click.option("--prefix", default="commandbus", show_default=True, help="How the roles' names begin.")
@click.option("--domain", "domains", multiple=True, help="The roles have this domain only. May be repeated.")
@click.option("--queue", "queues", multiple=True, help="A reply queue for roles with --domain. May be repeated.")
@click.option("--keep", type=DURATION, help="Nobody can prune a finished command before this time is over.")
@click.pass_obj
def roles(
    session: CliSession,
    print_sql: bool,  # noqa: FBT001
    prefix: str,
    domains: tuple[str, ...],
    queues: tuple[str, ...],
    keep: float | None,
) -> None:
    """Create the roles reader, producer, limiter, worker and operator, and grant them what they need.

    Run it again after an upgrade. The roles cannot log in: grant them to users who can
    (GRANT commandbus_worker TO app). Grants for domains that are created later follow automatically.

    With --domain the roles belong to a tenant: they see and change nothing of other domains.
    """
    with session.bus() as bus:
        if print_sql:
            script = bus.run(print_roles(prefix, domains=domains, queues=queues, keep_seconds=keep))
            script += BEHIND_A_POOLER
            session.answer({"sql": script}, lambda: click.echo(script, nl=False))
            return
        names = bus.create_roles(prefix, domains=domains, queues=queues, keep=keep)
    session.answer(
        [{"kind": kind, "role": name} for kind, name in names.items()],
        lambda: print_table(
            columns("=role +purpose"), [(name, PURPOSES.get(kind, kind)) for kind, name in names.items()]
        ),
    )


COMMANDS = [roles]
