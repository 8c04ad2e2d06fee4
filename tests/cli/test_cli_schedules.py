"""`commandbus schedules`: create, look, pause, resume, run now and delete; what is refused; what `doctor` says."""

from __future__ import annotations

from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.schedules.declare import declare, put_into_effect, undecided
from commandbus.model.schedule import Schedule

NIGHTLY = ("schedules", "create", "orders", "nightly", "--cron", "30 2 * * *", "--timezone", "Europe/Berlin")


def test_a_life(orders, bus):
    assert orders("schedules", "list").out == "there are no schedules\n"
    made = orders(*NIGHTLY, "--data", '{"n": 1}', "--timeout", "2m", "--operator", "ann", "--reason", "new")
    assert made.code == ExitCode.OK
    assert made.out.startswith("schedule orders/nightly fires next at 20")
    assert made.out.rstrip().endswith(("02:30 CET)", "02:30 CEST)", "03:00 CEST)"))
    assert "warning: nobody knows command type 'nightly'" in made.err
    again = orders(*NIGHTLY, "--data", '{"n": 1}', "--timeout", "120", "--json")
    assert (again.code, again.document["data"], again.document["fired"]) == (ExitCode.OK, {"n": 1}, 0)
    assert (
        orders("schedules", "pause", "orders", "nightly", "--operator", "bob", "--reason", "\x1b[31mred").code == 0
    )
    assert orders("schedules", "pause", "orders", "nightly").out == "schedule orders/nightly was paused already\n"
    sent = orders("schedules", "run-now", "orders", "nightly", "--json").document
    assert bus.get_command("orders", sent["command_id"]).data == {"n": 1}

    head, line = orders("schedules", "list", "orders").out.splitlines()
    assert head.split()[:5] == ["DOMAIN", "NAME", "TIMES", "STATE", "NEXT"]
    assert line.split()[:9] == ["orders", "nightly", "30", "2", "*", "*", "*", "Europe/Berlin", "paused"]
    assert "PENDING" in line
    (document,) = orders("schedules", "list", "--json").document
    assert (document["name"], document["next_at"], document["paused_by"]) == ("nightly", None, "bob")

    shown = orders("schedules", "show", "orders", "nightly").out
    for text in (
        "times",
        "30 2 * * * Europe/Berlin",
        "run_once",
        "next firings",
        "CREATE",
        "ann",
        "bob",
        "RUN_NOW",
    ):
        assert text in shown
    assert "\x1b" not in shown
    document = orders("schedules", "show", "orders", "nightly", "--firings", "3", "--json").document
    assert (len(document["next_firings"]), [item["action"] for item in document["actions"]]) == (
        3, ["RUN_NOW", "PAUSE", "CREATE"],
    )  # fmt: skip

    assert orders("schedules", "resume", "orders", "nightly").out.startswith(
        "schedule orders/nightly fires next at 20"
    )
    assert orders("schedules", "delete", "orders", "nightly").out == "schedule orders/nightly is deleted\n"
    assert orders("schedules", "show", "orders", "nightly").code == ExitCode.NOT_FOUND


def test_what_is_refused(orders, bus):
    for arguments, code, said in (
        (("--cron", "61 * * * *"), ExitCode.USAGE, "bad minute '61'"),
        (("--cron", "* * * * *", "--every", "1m"), ExitCode.USAGE, "cron and every are both given"),
        ((), ExitCode.USAGE, "neither cron nor every is given"),
        (("--every", "0"), ExitCode.USAGE, "is too short"),
        (("--every", "soon"), ExitCode.USAGE, "'soon' is not a duration"),
        (("--cron", "0 0 * * *", "--timezone", "Mars/Base"), ExitCode.USAGE, "timezone 'Mars/Base' is not known"),
        (("--every", "1m", "--data", "{"), ExitCode.USAGE, "not JSON"),
        (("--every", "1m", "--overlap", "maybe"), ExitCode.USAGE, "'maybe'"),
    ):
        answer = orders("schedules", "create", "orders", "x", *arguments)
        assert (answer.code, said in answer.err) == (code, True), answer.err
    assert orders("schedules", "create", "nowhere", "x", "--every", "1m").code == ExitCode.NOT_FOUND
    assert orders("schedules", "list", "nowhere").code == ExitCode.NOT_FOUND
    assert orders("schedules", "pause", "orders", "x").code == ExitCode.NOT_FOUND
    assert orders(*NIGHTLY).code == ExitCode.OK
    other = orders("schedules", "create", "orders", "nightly", "--every", "1h")
    assert (other.code, "--replace" in other.err) == (ExitCode.REFUSED, True)
    assert orders("schedules", "create", "orders", "nightly", "--every", "1h", "--replace").code == ExitCode.OK
    bus.run(declare([Schedule("orders", "in-code", every="1h")]))
    for found in bus.run(undecided(["orders"])):
        bus.run(put_into_effect(found))
    assert orders("schedules", "delete", "orders", "in-code").code == ExitCode.REFUSED
    assert "code" in orders("schedules", "list").out


def test_what_doctor_says(orders, bus):
    def said():
        return [item for item in orders("doctor", "--json").document if item["check"] == "schedules"]

    assert said() == []
    bus.schedules.create("orders", "nightly", cron="@daily")
    assert [(item["level"], item["message"]) for item in said()] == [("OK", "1 schedule; none is overdue")]
    connections = [
        item["message"] for item in orders("doctor", "--json").document if item["check"] == "connections"
    ]
    assert "slots + 5) + 1), schedules included" in connections[0]
    with bus.connect() as conn:
        conn.execute("UPDATE commandbus.schedule SET next_at = now() - interval '2 hours'")
    (late,) = said()
    assert (late["level"], late["message"]) == ("WARN", "schedule orders/nightly should have fired 2h ago")
    bus.run(declare([Schedule("orders", "a", every="1h")]))
    bus.run(declare([Schedule("orders", "a", every="2h")]))
    assert "live workers declare schedule orders/a in 2 ways; the newest is in effect" in said()[1]["message"]


def test_the_next_firings_of_all_schedules_in_their_order(orders, bus):
    assert orders("schedules", "next").out == "no schedule fires within that time\n"
    bus.schedules.create("orders", "nightly", cron="30 2 * * *")
    bus.schedules.create("orders", "hourly", every="1h")
    bus.schedules.pause("orders", "nightly", operator="ann")
    head, *lines = orders("schedules", "next").out.splitlines()
    assert head.split()[:4] == ["AT", "WHAT", "DOMAIN", "NAME"]
    assert lines == sorted(lines)
    assert sum(" fires " in line for line in lines) == 20
    assert sum(" paused " in line for line in lines) == 1
    found = orders("schedules", "next", "--within", "90m", "--json").document
    hourly = [len(item["firings"]) for item in found["schedules"] if item["schedule"]["name"] == "hourly"]
    assert hourly in ([1], [2])
    refused = orders("schedules", "next", "--within", "9999d")
    assert refused.code != ExitCode.OK
    assert "within" in refused.err
