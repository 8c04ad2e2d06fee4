"""What an operator can do in the console, each defined once for pages and API.

Every action names its fields, and returns a sentence that says what was done; a `Step` has a page, too. The
operator is always the visitor. The bus records each action with the operator's name and reason.
"""

from __future__ import annotations

from commandbus.web.actions import commands, controls, groups, limits, plans, retention
from commandbus.web.actions.fields import LONGEST_FIELD as LONGEST_FIELD
from commandbus.web.actions.fields import MANY as MANY
from commandbus.web.actions.fields import Action as Action
from commandbus.web.actions.fields import Portion as Portion
from commandbus.web.actions.fields import Step as Step

ACTIONS: dict[str, Action] = {
    name: action
    for module in (commands, plans, controls, limits, groups, retention)
    for name, action in module.ACTIONS.items()
}
