"""`top` on the screen, with textual. It shows what `cli/top_view.py` says, and never text of others as markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from commandbus.cli.top_view import DomainRow, SlotRow, TopView, look, view_of
from commandbus.errors import CommandBusError
from commandbus.flow.workers.requests import LiveStack
from commandbus.model.safe_text import escaped

if TYPE_CHECKING:
    from commandbus.bus import CommandBus
    from commandbus.web.attention import Fleet

DOMAIN_HEADS: Final = (
    "Domain", "Ready", "Oldest", "Delayed", "Parked", "Running", "TSQ", "Wait 50%", "Wait 99%", "Rate",
    "Settled in the last hour",
)  # fmt: skip
SLOT_HEADS: Final = ("State", "Domain/type", "Command", "Time", "Of its time", "Worker")
MOST_CONCERNS: Final = 8
STACK_SECONDS: Final = 4.0
KEYS: Final = (
    "arrows, tab   move",
    "enter         details; of a slot: where its command is now",
    "/             filter; escape ends it",
    "p             pause the screen, and go on",
    "r             look now",
    "?             these keys",
    "q             quit",
)


class TextScreen(ModalScreen[None]):
    """Some lines in front of the rest. Escape, enter or q closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss", "Close"),
    ]

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        """The lines, in a box."""
        with VerticalScroll(id="box"):
            yield Static(Text("\n".join(self._lines)), id="lines")

    def show(self, lines: list[str]) -> None:
        """Show other lines."""
        self._lines = lines
        self.query_one("#lines", Static).update(Text("\n".join(lines)))


class TopApp(App[None]):
    """The screen of `commandbus top`."""

    CSS = """
    #sentence { height: auto; max-height: 12; padding: 0 1; }
    #state { height: 1; padding: 0 1; color: $text-muted; }
    #domains { height: auto; max-height: 40%; }
    #slots { height: 1fr; }
    #filter { display: none; dock: bottom; }
    TextScreen { align: center middle; }
    #box { width: 90%; height: auto; max-height: 90%; border: round $accent; background: $surface; padding: 1 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("r", "look", "Look now"),
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("escape", "end_filter", "End filter", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, bus: CommandBus, *, interval: float, wanted: str = "") -> None:
        super().__init__()
        self._bus = bus
        self._interval = interval
        self.wanted = wanted
        self.is_paused = False
        self._fleet: Fleet | None = None
        self._problem: str | None = None
        self.view: TopView | None = None

    def compose(self) -> ComposeResult:
        """The sentence, two tables, the filter and the keys."""
        yield Static("looking…", id="sentence", markup=False)
        yield Static("", id="state", markup=False)
        yield DataTable(id="domains", cursor_type="row", zebra_stripes=True)
        yield DataTable(id="slots", cursor_type="row", zebra_stripes=True)
        yield Input(value=self.wanted, placeholder="a domain, type, id or worker", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.title = "commandbus top"
        self._table("domains").add_columns(*DOMAIN_HEADS)
        self._table("slots").add_columns(*SLOT_HEADS)
        self._table("domains").focus()
        self.action_look()
        self.set_interval(self._interval, self._look_unless_paused)

    # --- looking ---------------------------------------------------------------------------------------------

    def action_look(self) -> None:
        """Look now."""
        self.run_worker(self._look, thread=True, group="look", exclusive=True)

    def _look_unless_paused(self) -> None:
        if not self.is_paused:
            self.action_look()

    def _look(self) -> None:
        """In a thread: the screen answers keys while the database does not."""
        try:
            found, problem = look(self._bus), None
        except Exception as error:  # noqa: BLE001 - it is shown, and the next look may succeed
            found, problem = None, escaped(str(error).strip().partition("\n")[0])
        self.call_from_thread(self._looked, found, problem)

    def _looked(self, found: Fleet | None, problem: str | None) -> None:
        self._fleet, self._problem = found or self._fleet, problem
        self._show()

    def _show(self) -> None:
        state = [f"filter: {escaped(self.wanted)}"] if self.wanted else []
        state += ["PAUSED"] if self.is_paused else []
        state += (
            [f"The database does not answer, what is shown is from before: {self._problem}"]
            if self._problem
            else []
        )
        self.query_one("#state", Static).update(" | ".join(state))
        if self._fleet is None:
            return
        self.view = view = view_of(self._fleet, self.wanted)
        more = len(view.concerns) - MOST_CONCERNS
        texts = [f"  {text}" for text in view.concerns[:MOST_CONCERNS]] + (
            [f"  and {more} more"] if more > 0 else []
        )
        self.query_one("#sentence", Static).update(Text("\n".join([view.headline, *texts])))
        self._fill("domains", view.domains)
        self._fill("slots", view.slots)

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)

    def _fill(self, name: str, rows: list[DomainRow] | list[SlotRow]) -> None:
        """Fill a table anew; the cursor stays in its line."""
        table = self._table(name)
        line = table.cursor_row
        table.clear()
        for row in rows:
            bold = "bold reverse" if row.cells[0].startswith("!") else ""
            table.add_row(*(Text(cell, style=bold) for cell in row.cells))
        if rows:
            table.move_cursor(row=min(line, len(rows) - 1), animate=False)

    # --- keys ------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Stop the screen, or let it go on."""
        self.is_paused = not self.is_paused
        self._show()

    def action_filter(self) -> None:
        """Ask for a filter."""
        given = self.query_one("#filter", Input)
        given.display = True
        given.focus()

    def action_end_filter(self) -> None:
        """Show everything."""
        self._set_filter("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Use the filter."""
        self._set_filter(event.value)

    def _set_filter(self, wanted: str) -> None:
        self.wanted = wanted
        given = self.query_one("#filter", Input)
        given.value, given.display = wanted, False
        self._table("slots" if wanted else "domains").focus()
        self._show()

    def action_keys(self) -> None:
        """List the keys."""
        self.push_screen(TextScreen(list(KEYS)))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the details of a line."""
        if self.view is None:
            return
        rows: list[DomainRow] | list[SlotRow]
        rows = self.view.domains if event.data_table.id == "domains" else self.view.slots
        if event.cursor_row >= len(rows):
            return
        row = rows[event.cursor_row]
        screen = TextScreen(list(row.details))
        self.push_screen(screen)
        if isinstance(row, SlotRow) and row.command is not None:
            domain, command_id = row.command
            self.run_worker(lambda: self._ask(screen, row, domain, command_id), thread=True, group="stack")

    def _ask(self, screen: TextScreen, row: SlotRow, domain: str, command_id: str) -> None:
        """In a thread: ask where a command is."""
        try:
            lines = _lines(self._bus.request_stack(domain, command_id, wait=STACK_SECONDS))
        except CommandBusError as error:
            lines = [escaped(str(error))]
        self.call_from_thread(self._answered, screen, [*row.details, "", *lines])

    def _answered(self, screen: TextScreen, lines: list[str]) -> None:
        if screen.is_attached:
            screen.show(lines)


def _lines(found: LiveStack) -> list[str]:
    if found.problem is not None:
        return [f"where it is now: {escaped(found.problem)}"]
    lines = []
    for stack in found.stacks:
        lines.append(f"where it is now, innermost first ({escaped(stack.title)}):")
        lines += [escaped(f"  {frame.function}  {frame.file}:{frame.line}") for frame in reversed(stack.frames)]
    return lines
