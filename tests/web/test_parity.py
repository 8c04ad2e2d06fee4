"""The console and its API have every view and every action that operators have on the command line.

The commands are found in the parser of the command line. A new one that has no place here fails this test: give it
its action, its page and its call, or say why it needs none.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from commandbus import Settings
from commandbus.cli.entry import COMMANDS, root
from commandbus.web.actions import ACTIONS
from commandbus.web.app import create_console
from commandbus.web.pages import page_routes

ACTS = {
    "batch cancel": ["cancel-batch"],
    "batch close": ["close-batch"],
    "batch retry-failed": ["retry-batch"],
    "breakers close": ["close-breaker"],
    "breakers open": ["open-breaker"],
    "breakers reset": ["reset-breaker"],
    "cancel": ["cancel"],
    "effect resolve": ["resolve-effect"],
    "keys delete": ["delete-key-limit"],
    "keys end-override": ["end-key-override"],
    "keys override": ["override-key"],
    "keys set": ["set-key-limit"],
    "limits set": ["set-limit"],
    "limits unset": ["unset-limit"],
    "pause": ["pause"],
    "plan preview": ["preview-plan"],
    "plan start": ["start-plan"],
    "plan stop": ["stop-plan"],
    "priority": ["set-priority"],
    "process cancel": ["cancel-process"],
    "process retry": ["retry-process"],
    "process signal": ["signal"],
    "prune": ["prune"],
    "pause-worker": ["pause-worker"],
    "recycle": ["recycle-worker"],
    "replay": ["replay"],
    "resume": ["resume"],
    "resume-worker": ["resume-worker"],
    "schedules create": ["create-schedule"],
    "schedules delete": ["delete-schedule"],
    "schedules pause": ["pause-schedule"],
    "schedules resume": ["resume-schedule"],
    "schedules run-now": ["run-schedule"],
    "tsq cancel": ["cancel-troubled", "preview-plan"],
    "tsq complete": ["complete", "preview-plan"],
    "tsq retry": ["retry", "preview-plan"],
}
VIEWS = {  # page, call of the API
    "audit": ("/audit", "/api/audit"),
    "batch list": ("/batches", "/api/batches"),
    "batch show": ("/batch", "/api/batch"),
    "batch watch": ("/batch", "/api/batch"),
    "breakers": ("/limits", "/api/breakers"),
    "commands": ("/commands", "/api/commands"),
    "database": ("/database", "/api/database"),
    "domain list": ("/domains", "/api/domains"),
    "effect list": ("/effects", "/api/effects"),
    "failures": ("/troubleshooting", "/api/failures"),
    "keys list": ("/keys", "/api/keys"),
    "keys show": ("/key", "/api/key"),
    "limits": ("/limits", "/api/limits"),
    "limits estimate": ("/limit", "/api/limit/estimate"),
    "limits show": ("/limit", "/api/limit"),
    "pauses": ("/domains", "/api/pauses"),
    "plan list": ("/plans", "/api/plans"),
    "plan show": ("/plan", "/api/plan"),
    "process list": ("/processes", "/api/processes"),
    "process show": ("/process", "/api/process"),
    "process strays": ("/strays", "/api/strays"),
    "rejected": ("/rejected", "/api/rejected"),
    "schedules list": ("/schedules", "/api/schedules"),
    "schedules next": ("/schedules", "/api/schedules/timeline"),
    "schedules show": ("/schedule", "/api/schedule"),
    "show": ("/command", "/api/command"),
    "stack": ("/stack", "/api/stack"),
    "status": ("/domains", "/api/domains"),
    "stuck": ("/stuck", "/api/stuck"),
    "top": ("/", "/api/concerns"),
    "tsq count": ("/troubleshooting", "/api/troubleshooting"),
    "tsq list": ("/troubleshooting", "/api/troubleshooting"),
    "undelivered": ("/undelivered", "/api/undelivered"),
    "wait": ("/command", "/api/command"),
    "workers": ("/workers", "/api/workers"),
}
SET_UP = "set-up of the installation"
OF_PROGRAMS = "it makes work, which is for programs"
EXEMPT = {
    "batch add": OF_PROGRAMS,
    "batch create": OF_PROGRAMS,
    "config": SET_UP,
    "console": "the console itself",
    "demo": SET_UP,
    "doctor": SET_UP,
    "domain create": SET_UP,
    "embedded start": SET_UP,
    "embedded status": SET_UP,
    "embedded stop": SET_UP,
    "handlers": "it imports the code of an application; a console does not",
    "migrate": SET_UP,
    "process start": OF_PROGRAMS,
    "queue create": SET_UP,
    "rehearse": "a form of its own: tests/web/test_rehearse_page.py",
    "roles": SET_UP,
    "send": OF_PROGRAMS,
    "worker": SET_UP,
}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its words."""
    ctx = click.Context(root)
    todo = [(name, root.get_command(ctx, name)) for name in COMMANDS]
    while todo:
        path, command = todo.pop()
        assert command is not None
        if isinstance(command, click.Group):
            todo += [(f"{path} {name}", found) for name, found in command.commands.items()]
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield path, command


FOUND = dict(commands())


def is_acting(command: click.Command) -> bool:
    """Does the command record who did it?"""
    return any("--operator" in option.opts for option in command.params)


def test_every_command_has_its_place() -> None:
    assert not ACTS.keys() & VIEWS.keys() & EXEMPT.keys()
    places = {"plan": "as `plan list`"} | ACTS | VIEWS | EXEMPT
    missing = sorted(FOUND.keys() - places.keys())
    assert not missing, (
        f"give these an action (ACTS), a page and a call (VIEWS), or say why not (EXEMPT): {missing}"
    )
    gone = sorted(places.keys() - FOUND.keys())
    assert not gone, f"the command line has no {gone} any more"


def test_whoever_acts_on_the_command_line_can_act_in_the_console() -> None:
    acting = {path for path, command in FOUND.items() if is_acting(command)}
    assert acting == ACTS.keys()
    named = {name for names in ACTS.values() for name in names}
    assert named == ACTIONS.keys(), "and the console has nothing that the command line lacks"


def test_every_view_has_a_page_and_a_call() -> None:
    app = create_console(Settings(database_url="postgresql://nobody@localhost/none"))
    pages = {route.path for route in page_routes(app.state.console).routes}  # type: ignore[attr-defined]
    calls = {path for path, methods in app.openapi()["paths"].items() if "get" in methods}
    for command, (page, call) in VIEWS.items():
        assert page in pages, (command, page)
        assert call in calls, (command, call)


@pytest.mark.parametrize(
    ("command", "action"), [(command, action) for command, names in ACTS.items() for action in names]
)
def test_an_action_takes_what_the_command_takes(command: str, action: str) -> None:
    """Options of the command line that change what is done are fields of the action."""
    names = {each.name or "" for each in FOUND[command].params} - OF_THE_COMMAND_LINE
    if len(ACTS[command]) > 1:  # one action for a single command, one for many
        names -= {"command_id"} if action == "preview-plan" else OF_MANY
    fields = {field.rstrip("?") for field in ACTIONS[action].fields}
    lacking = {
        name for name in names if name not in fields and SAME.get((command, name), SAME.get(name)) not in fields
    }
    assert lacking == set(), f"give {action} these fields"


OF_THE_COMMAND_LINE = {
    *("config", "database", "debug", "as_json", "operator", "reason"),
    *("wait", "yes", "preview"),  # how it waits, asks and answers
}
OF_MANY = {"everything", "domain_option", "command_type", "error_code"}
SAME: dict[str | tuple[str, str], str] = {
    "command_id": "id",
    "batch_id": "id",
    "process_id": "id",
    "plan_id": "plan",
    "command_ids": "ids",
    "is_done": "done",
    "everything": "domain",  # without ids
    "domain_option": "domain",
    ("limits set", "name"): "limit",
    ("limits unset", "name"): "limit",
    ("effect resolve", "name"): "effect",
}
