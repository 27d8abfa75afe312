from __future__ import annotations

import pytest

from gatespace.errors import RunError, UsageError
from gatespace.tasks.scores import METRICS, find_metric, number_in, register_metric


def score(metric: str, response: str, *references: str) -> float:
    return find_metric(metric)(response, references, {})


@pytest.mark.parametrize(
    ("metric", "response", "references", "expected"),
    [
        ("exact", " a  pub\n", ["a pub"], 1),
        ("exact", "A pub", ["a pub"], 0),
        ("exact", "b", ["a", "b"], 1),
        ("contains", "It is a PUB by\nthe river.", ["pub by the river"], 1),
        ("contains", "It is a bar.", ["pub", "inn"], 0),
        ("regex", "Call 555-0199.", [r"\d{3}-\d{4}"], 1),
        ("regex", "Call me.", [r"\d{3}-\d{4}"], 0),
        ("number", "We get 48 + 24 = <<48+24=72>>72 clips.\n#### 72", ["…\n#### 72"], 1),
        ("number", "#### 72 and not 9", ["72"], 1),
        ("number", "1,250.0 dollars", ["#### 1250"], 1),
        ("number", "minus -3", ["3"], 0),
        ("number", "no idea", ["3"], 0),
        ("token_f1", "The cat sat.", ["a cat"], 2 / 3),
        ("token_f1", "dog", ["a cat", "the dog!"], 1),
        ("token_f1", "", ["a cat"], 0),
    ],
)
def test_right_and_wrong(metric: str, response: str, references: list[str], expected: float) -> None:
    assert score(metric, response, *references) == pytest.approx(expected)


def test_numbers() -> None:
    assert number_in("1.5 or .5") == number_in("0.50")
    assert number_in("#### none, but 4 before 7") == 4
    assert number_in("4 #### none") == 4
    assert number_in("") is None


def longest_common(left: list[str], right: list[str]) -> int:
    """By trying all: no dynamic programming, which is what is tested."""
    if not left or not right:
        return 0
    if left[0] == right[0]:
        return 1 + longest_common(left[1:], right[1:])
    return max(longest_common(left[1:], right), longest_common(left, right[1:]))


def test_rouge_l_against_its_definition() -> None:
    pytest.importorskip("rouge_score")
    response, reference = "the pub near the river is cheap", "a cheap pub is near the river"
    common, own, right = longest_common(response.split(), reference.split()), 7, 7
    precision, recall = common / own, common / right
    assert score("rouge_l", response, "nothing like it", reference) == pytest.approx(
        2 * precision * recall / (precision + recall)
    )


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_sentence_and_corpus_scores(metric: str) -> None:
    pytest.importorskip("sacrebleu")
    same = "Blue Spice is a pub near the river."
    assert score(metric, same, "x", same) == pytest.approx(1)
    assert score(metric, "", same) == 0
    assert 0 < score(metric, "Blue Spice is a bar near a river.", same) < 1
    figures = find_metric(metric).figures
    assert figures is not None
    assert figures([same, same], [[same], ["x", same]]) == {f"corpus_{metric}": pytest.approx(1)}


def test_references_that_cannot_be_compared() -> None:
    assert "no number" in find_metric("number").refuses("many")
    assert find_metric("number").refuses("7") == ""
    for pattern in ("(", "a{99999999999999999999}", "(" * 5000 + ")" * 5000, "(?V0)(?V1)x", "{1s<{[P)"):
        assert "not a regular expression" in find_metric("regex").refuses(pattern)


def test_a_pattern_that_takes_for_ever_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from gatespace.tasks import scores

    monkeypatch.setattr(scores, "PATTERN_SECONDS", 0.1)
    with pytest.warns(RuntimeWarning, match="takes more than 0.1 s"):
        assert find_metric("regex")("a" * 60 + "b", ["(a|aa)+$"], {}) == 0
    assert find_metric("regex")("a" * 60, ["(a|aa)+$"], {}) == 1


def test_own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    from gatespace.tasks import scores

    monkeypatch.setattr(scores, "_known", dict(scores._known))
    register_metric("slots")(lambda response, references, columns: float(columns["name"] in response))
    assert find_metric("slots")("At Blue Spice", [], {"name": "Blue Spice"}) == 1
    with pytest.raises(UsageError, match="'slots' is taken"):
        register_metric("slots")(lambda *_: 0.0)
    register_metric("wild")(lambda *_: 2.0)
    with pytest.raises(RunError, match="from 0 to 1"):
        find_metric("wild")("", [], {})
    register_metric("mute")(lambda *_: None)
    with pytest.raises(RunError, match="from 0 to 1"):
        find_metric("mute")("", [], {})
    with pytest.raises(UsageError, match=r"not given: 'name'[^~]*'mr'[^~]*task\.text\.columns"):
        find_metric("slots")("", [], {"mr": "x"})
    with pytest.raises(UsageError, match="did you mean 'rouge_l'"):
        find_metric("rouge-l")
    assert {"accuracy", "exact", "contains", "regex", "number", "token_f1", "rouge_l", "bleu", "chrf"} == set(METRICS)
