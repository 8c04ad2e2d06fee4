"""Count: an int that says when there are more."""

from __future__ import annotations

import json
import pickle

from commandbus.model.count import Count, added, capped, is_capped
from commandbus.model.counting import counted


def test_a_capped_count_is_shown_with_a_plus() -> None:
    count = capped(10_001)
    assert (count, count.is_capped, str(count), f"{count}", f"{count:d}") == (
        10_000,
        True,
        "10,000+",
        "10,000+",
        "10000",
    )
    assert counted(count, "command") == "10,000+ commands"
    assert json.dumps([count]) == "[10000]"
    again = pickle.loads(pickle.dumps(count))
    assert (again, again.is_capped) == (10_000, True)


def test_a_count_to_the_end_is_a_plain_number() -> None:
    assert (str(capped(10_000)), capped(10_000).is_capped, is_capped(3)) == ("10000", False, False)


def test_a_sum_with_a_capped_count_is_capped() -> None:
    total = added([Count(2), capped(7, 5), 1])
    assert (total, str(total)) == (8, "8+")
    assert not added([]).is_capped
