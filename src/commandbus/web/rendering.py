"""How values become HTML. Everything is made harmless twice: characters that do something instead of being seen
become visible escapes (`model/safe_text.py`), and Jinja quotes HTML's own characters.

Times are written in UTC; the console's script shows them in the viewer's zone, and UTC on hover.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from commandbus.model.counting import counted
from commandbus.model.durations import in_utc, roughly, without_clock, without_moment
from commandbus.model.folded_frames import folded
from commandbus.model.ledger_bar import how_long
from commandbus.model.safe_text import escaped, escaped_lines
from commandbus.shell_words import arguments, quoted
from commandbus.web import sparkline
from commandbus.web.attention import Concern, clock_of

LONGEST_TEXT: Final = 20_000
LONGEST_EDIT: Final = 200_000
LAST_MOMENT: Final = 2**33  # in seconds since 1970: the year 2242


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates of the console."""
    made = Environment(
        loader=PackageLoader("commandbus.web"),
        autoescape=True,
        finalize=_harmless,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        time=time,
        clock=clock,
        ago=ago,
        span=span,
        json=json_text,
        compact=compact,
        lines=lines,
        query=query,
        raw=raw,
        shell=shell,
        shell_value=quoted,
        editable=editable,
        autopsy=autopsy,
        concern=concern,
        with_moments=with_moments,
        exactly=how_long,
        folded=folded_text,
        without_clock=without_clock,
        without_moment=without_moment,
        spark_settled=sparkline.settled,
        spark_ready=sparkline.ready,
        spark_waits=sparkline.waits,
    )
    return made


def _harmless(value: Any) -> Any:
    if isinstance(value, Markup):
        return value
    return "–" if value is None else escaped(str(value))


def raw(value: object) -> Markup:
    """A value that a form gives back unchanged, so that an id stays what it is."""
    return escape(str(value))


def shell(words: object) -> str:
    """A name, or several, at the end of a command line."""
    return arguments(*words) if isinstance(words, tuple) else arguments(words)


def editable(value: object) -> Markup:
    """A JSON value for a field in which people edit it: in plain ASCII, so that every character comes back as it
    was. One that is too long for that is left to the command line."""
    text = json.dumps(value, indent=2)
    return escape(text if len(text) <= LONGEST_EDIT else "")


def time(moment: datetime | None) -> Markup:
    """A moment, for people and for the script."""
    if moment is None:
        return Markup("–")
    return Markup('<time datetime="{}">{}</time>').format(moment.astimezone(UTC).isoformat(), in_utc(moment))


def concern(item: Concern) -> Markup:
    """The text of a concern. The script shows its moment in the viewer's zone."""
    return _with_times(item.text, [] if item.since is None else [(clock_of(item.since), item.since)])


def with_moments(text: str, moments: Sequence[datetime]) -> Markup:
    """A text that names these moments, in this order. The script shows them in the viewer's zone."""
    return _with_times(text, [(in_utc(moment), moment) for moment in moments])


def _with_times(text: str, named: Sequence[tuple[str, datetime]]) -> Markup:
    shown, rest = Markup(""), text
    for utc, moment in named:
        before, _, rest = rest.partition(utc)
        time_of = Markup('<time datetime="{}">{}</time>').format(moment.astimezone(UTC).isoformat(), utc)
        shown += escape(escaped(before)) + time_of
    return shown + escape(escaped(rest))


def clock(moment: datetime) -> str:
    """A moment in UTC, for texts that the script cannot change (in SVG)."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def ago(moment: datetime | None) -> str:
    """How long ago a moment was."""
    return "–" if moment is None else f"{span((datetime.now(UTC) - moment).total_seconds())} ago"


def span(seconds: float | None) -> str:
    """A duration, roughly."""
    return "–" if seconds is None else roughly(max(seconds, 0.0))


def json_text(value: object) -> Markup:
    """A JSON value, laid out, up to a length."""
    return lines(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def compact(value: object) -> str:
    """A JSON value on one line; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def lines(text: str | None) -> Markup:
    """A text whose line breaks are meant, up to a length."""
    shown = (text or "")[:LONGEST_TEXT]
    block = escape("\n".join(escaped_lines(shown)))
    cut = len(text or "") - len(shown)
    more = Markup('\n<span class="cut">… {} more characters</span>').format(cut) if cut else ""
    return Markup('<pre tabindex="0">{}{}</pre>').format(block, more)


def folded_text(text: str | None, own_frame: str | None = None) -> Markup:
    """A traceback: frames of libraries are folded, those of the application are open."""
    own_file = None if own_frame is None else own_frame.rpartition(": ")[0]
    shown = Markup("")
    for part in folded((text or "")[:LONGEST_TEXT], own_file):
        block = lines(part.text)
        if part.is_folded:
            shown += Markup('<details class="folded"><summary>{}</summary>{}</details>').format(
                counted(part.frames, "frame") + " of libraries", block
            )
        else:
            shown += block
    cut = len(text or "") - LONGEST_TEXT
    return shown + (Markup('<p class="cut">… {} more characters</p>').format(cut) if cut > 0 else Markup(""))


def autopsy(found: Mapping[str, Any]) -> Markup:
    """What was seen of a stuck attempt: each stack as Python prints it, then the rest."""
    taken = _taken(found.get("taken_at"))
    rest = {
        name: value for name, value in found.items() if name != "stacks" and not (taken and name == "taken_at")
    }
    stacks = Markup("").join(
        Markup("<h4>{}</h4>{}").format(
            escaped(str(stack.get("title", ""))), folded_text("\n".join(_frames(stack)))
        )
        for stack in found.get("stacks", ())
        if isinstance(stack, Mapping)
    )
    return taken + stacks + json_text(rest)


def _taken(moment: object) -> Markup:
    """When an autopsy was taken. What cannot be a moment is left to the rest."""
    if not isinstance(moment, int | float) or not 0 < moment < LAST_MOMENT:
        return Markup("")
    return Markup("<p>Taken {}.</p>").format(time(datetime.fromtimestamp(moment, UTC)))


def _frames(stack: Mapping[str, Any]) -> list[str]:
    return [str(frame).rstrip("\n") for frame in stack.get("frames", ())]


def query(given: Mapping[str, object], **more: object) -> str:
    """The query string of a link: what was given, changed by `more`; None leaves a name out."""
    values = {name: value for name, value in {**given, **more}.items() if value is not None}
    return f"?{urlencode(values)}" if values else ""
