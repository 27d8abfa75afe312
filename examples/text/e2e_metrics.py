"""Custom metrics for the E2E data: slot coverage, and whether a response is one sentence.

A configuration that lists this file under `plugins` can use them in `task.text.metric` and `task.text.also`. They get
the response, the references, and the row's columns; `mr` is the meaning: name[The Punter], area[riverside].
"""

from __future__ import annotations

import re

from gatespace.tasks import register_metric

_HIGH, _LOW, _MIDDLE = (
    r"high|excellent|expensive|top|great",
    r"low|cheap|poor|inexpensive|affordable|bad",
    r"moderate|average|mid",
)
WORDINGS = {
    ("familyFriendly", None): r"famil|kid|child|adult",
    ("area", "city centre"): r"cent(re|er)|city|downtown",
    ("area", "riverside"): r"river",
    ("priceRange", "cheap"): _LOW,
    ("priceRange", "moderate"): _MIDDLE + r"|reasonabl",
    ("priceRange", "high"): _HIGH,
    ("priceRange", "less than £20"): r"20|" + _LOW,
    ("priceRange", "£20-25"): r"20|25|" + _MIDDLE,
    ("priceRange", "more than £30"): r"30|" + _HIGH,
    ("customer rating", "low"): r"\b1|one|" + _LOW,
    ("customer rating", "average"): r"\b3|three|" + _MIDDLE,
    ("customer rating", "high"): r"\b5|five|" + _HIGH,
    ("customer rating", "1 out of 5"): r"\b1|one|" + _LOW,
    ("customer rating", "3 out of 5"): r"\b3|three|" + _MIDDLE,
    ("customer rating", "5 out of 5"): r"\b5|five|" + _HIGH,
}
"""Common wordings of values that are not written literally."""


@register_metric("slots")
def slots(response, references, columns):
    """Share of the meaning's slots that the response mentions."""
    found = re.findall(r"([\w ]+)\[(.*?)\]", columns["mr"])
    covered = 0
    for slot, value in ((slot.strip(), value) for slot, value in found):
        wording = WORDINGS.get((slot, value)) or WORDINGS.get((slot, None)) or re.escape(value)
        covered += re.search(wording, response, re.IGNORECASE) is not None
    return covered / len(found)


@register_metric("one_sentence")
def one_sentence(response, references, columns):
    """1 for a single sentence of at most 40 words in plain text."""
    text = response.strip()
    return float(
        bool(re.fullmatch(r"[^\n\[\]{}*#]+[.!?]", text))
        and len(re.findall(r"[.!?](?:\s|$)", text)) == 1
        and len(text.split()) <= 40
    )
