"""A real PostgreSQL in a folder of the project, for development, demonstrations and tests.

Duty: the life of that server. Any number of processes may ask for it at once; they get one server, and the
last one out stops it:

    no data ──initdb──▶ stopped ──first start()──▶ running ──last stop(), stop(force=True)──▶ stopped
                           ▲                          │
                           └──── start() recovers ────┴─ kill -9, power cut: users with `revive` start it again

    <folder>/postgres-15/         the data; the server's log and socket are in it too
    <folder>/postgres-15.users    users hold a shared flock on it: the kernel releases the lock of a killed user
    <folder>/postgres-15.pgpass   the superuser's password, for the owner of the folder (and root) alone
    <folder>/postgres-15.port     the port, kept so that a DSN in somebody's shell stays true
    <folder>/postgres-15.keep     there if a user left with `keep`: the last one out leaves the server up
    <folder>/postgres-15.died     there if a server that was killed could not be started again yet
    <folder>/binaries-…/          PostgreSQL's programs, if the server's user cannot reach them elsewhere
    <folder>/start.lock           exclusive flock while somebody starts or stops

Invariants: data appears whole (created elsewhere, then renamed) or not at all. Starts and stops are serialized.
Nothing outside the folder changes owner or mode. fsync is on unless the caller switched it off. Nobody connects
without the password, and the server's environment contains nothing of its starter's. If root starts the server, it
runs as another user, because PostgreSQL refuses to run as root. A folder that this user cannot enter is replaced
by one below /var/lib/commandbus.

Read `server.py` first; `state_folder.py` says where state is, `binaries.py` finds programs and the account to run
them, `postmaster.py` looks at the server's process, `addresses.py` picks port and socket, `access.py` decides who
may connect, `watch.py` notices that the server died.

It does not protect the data from root or from the user that the server runs as. It does not upgrade data between
major versions, and is not meant for production.
"""

from commandbus.db.embedded.server import EmbeddedPostgres, EmbeddedStatus

__all__ = ["EmbeddedPostgres", "EmbeddedStatus"]
