"""Masking rules: what they hide in JSON and in texts, what they restore, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from commandbus.errors import InvalidCommandError
from commandbus.model.mask import HIDDEN, Mask, parse_rules

DATA: dict[str, Any] = {
    "user": "ann",
    "Password": "hunter2",
    "card": {"number": 4111111111111111, "month": 7},
    "cards": [{"number": "4222-2222", "kind": "visa"}, {"number": "4333-3333", "kind": "amex"}],
    "deep": [[{"password": 'a\nb"quoted'}]],
    "none": {"password": None},
}


def test_rules_hide_fields_by_path_in_lists_and_at_any_depth() -> None:
    mask = Mask(["*.password", "data.card.number", "data.cards.number"])
    assert mask.hide("data", DATA) == {
        "user": "ann",
        "Password": HIDDEN,
        "card": {"number": HIDDEN, "month": 7},
        "cards": [{"number": HIDDEN, "kind": "visa"}, {"number": HIDDEN, "kind": "amex"}],
        "deep": [[{"password": HIDDEN}]],
        "none": {"password": None},
    }
    assert mask.hide("result", DATA)["card"] == DATA["card"]
    assert Mask(["data.*.number"]).hide("data", DATA)["card"]["number"] == HIDDEN
    assert Mask(["data"]).hide("data", DATA) == HIDDEN
    assert Mask(["*.result"]).hide("result", "x") == HIDDEN
    assert Mask().hide("data", DATA) == DATA


def test_hidden_values_are_found_in_texts_in_every_form() -> None:
    mask = Mask(["*.password", "data.card.number"])
    secrets = mask.secrets({"data": DATA})
    for text in ("card 4111111111111111", f"{DATA}", 'json "a\\nb\\"quoted"', 'b"quoted and', "it is hunter2!"):
        shown = mask.text(text, secrets)
        assert HIDDEN in shown
        assert not any(word in shown for word in ("4111111111111111", "hunter2", 'b"quoted', "b\\nb"))
    assert mask.text("cut off: 41111111", secrets) == f"cut off: {HIDDEN}"
    assert mask.text("user ann, month 7", secrets) == "user ann, month 7"
    for text in ("password=other", "'password': 'oth er'", '{"PASSWORD":"other"}', "password = 12"):
        assert "oth" not in mask.text(text, ())
        assert "12" not in mask.text(text, ())
    assert mask.text("the password was wrong", ()) == "the password was wrong"


def test_what_is_left_masked_is_restored_and_never_stored() -> None:
    mask = Mask(["*.password", "data.card.number", "data.cards.number"])
    shown = mask.hide("data", DATA)
    assert mask.restore("data", shown, DATA) == DATA
    edited = {**shown, "user": "bob", "Password": "new"}
    assert mask.restore("data", edited, DATA) == {**DATA, "user": "bob", "Password": "new"}
    assert mask.restore("data", {"user": HIDDEN}, DATA) == {"user": HIDDEN}, "no rule hides it: it is its value"
    for wrong, where in (
        ({"other": {"password": HIDDEN}}, "data.other.password"),
        ({"cards": list(reversed(shown["cards"]))}, "data.cards.0.number"),
        ({"cards": shown["cards"][1:]}, "data.cards.0.number"),
        ({"cards": [*shown["cards"], {"number": HIDDEN}]}, "data.cards.2.number"),
        ({"card": {"number": [HIDDEN]}}, "data.card.number"),
        ({"none": {"password": HIDDEN}}, "data.none.password"),
        ([shown["cards"]], None),
    ):
        if where is not None:
            with pytest.raises(InvalidCommandError, match=rf"{where} is \*\*\*"):
                mask.restore("data", wrong, DATA)
    assert Mask().restore("data", {"password": HIDDEN}, DATA) == {"password": HIDDEN}


@pytest.mark.parametrize("rule", ["", "*", "*.*", "data..x", ".x", "a b", "da*", "data.\x00", 7, None, "x" * 201])
def test_a_rule_that_is_not_one_is_named(rule: Any) -> None:
    with pytest.raises(ValueError, match="is not a masking rule; give a path such as"):
        parse_rules(["data.ok", rule])


def test_rules_are_bounded_and_each_counts_once() -> None:
    assert parse_rules(["*.a", " *.a ", "data.b"]) == ("*.a", "data.b")
    with pytest.raises(ValueError, match="at most 100"):
        parse_rules([f"data.x{n}" for n in range(101)])


def test_rules_for_data_and_results_hold_in_the_state_of_a_process() -> None:
    state = {"card": {"number": 5}, "charge": {"token": "t", "ok": True}, "many": [{"token": "t"}]}
    assert Mask(["data.card.number", "result.token"]).hide("state", state) == {
        "card": {"number": "***"},
        "charge": {"token": "***", "ok": True},
        "many": [{"token": "***"}],
    }
    assert Mask(["result.card.number"]).hide("state", {"charge": state})["charge"]["card"] == {"number": "***"}
    for rule in ("data", "result"):
        assert Mask([rule]).hide("state", {"card": {"number": 5}}) == {"card": "***"}
        assert Mask([rule]).hide("state", "PAUSED") == "PAUSED", "of a worker"
