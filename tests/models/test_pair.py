"""The pair check on real tokenizers: equal maps pass, the first difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gatespace.errors import UsageError
from gatespace.models import Model, PairReport, TinyPair, build_tiny, check_pair, load_model
from gatespace.tasks import synthetic_task


def test_padded_heads_of_different_sizes_are_a_pair(student: Model, teacher: Model) -> None:
    rows = {len(student.head.weight), len(teacher.head.weight)}
    assert len(rows) == 2
    assert student.vocab_size < min(rows)
    assert check_pair(student, teacher) == PairReport(student.vocab_size)


def test_an_extra_token_is_the_first_difference(student: Model, teacher: Model) -> None:
    known = teacher.vocab_size
    teacher.tokenizer.add_tokens(["<extra>"])
    teacher = Model(teacher.network, teacher.tokenizer, "big", "")
    with pytest.raises(UsageError, match=rf"id {known} is no token to .*, '<extra>' to big \(1 ids differ\)"):
        check_pair(student, teacher)
    with pytest.raises(UsageError, match=rf"id {known} is '<extra>' to big, no token to"):
        check_pair(teacher, student)


def test_another_tokenizer_is_refused_at_its_first_difference(student: Model, tmp_path: Path) -> None:
    other = load_model(str(build_tiny(synthetic_task(seed=5, size=60), tmp_path, vocab_size=400).teacher))
    ours, theirs = ({id: token for token, id in model.tokenizer.get_vocab().items()} for model in (student, other))
    first = next(id for id in range(student.vocab_size) if ours.get(id) != theirs.get(id))
    assert first > 258  # bytes and special tokens agree
    with pytest.raises(UsageError) as raised:
        check_pair(student, other)
    assert f"id {first} is {ours[first]!r} to {student.name}" in str(raised.value)


def test_a_head_too_small(student: Model, teacher: Model) -> None:
    teacher.network.resize_token_embeddings(teacher.vocab_size - 1)
    with pytest.raises(UsageError, match="the teacher's head has fewer rows"):
        check_pair(student, teacher)
    with pytest.raises(UsageError, match="the student's head has fewer rows"):
        check_pair(teacher, student)


def test_what_differs_without_harm_is_noted(tiny: TinyPair, student: Model, teacher: Model) -> None:
    teacher.network.generation_config.eos_token_id = [2, 0]
    (ends,) = check_pair(student, teacher).notes
    assert "ends at '<|im_end|>'" in ends
    assert "'<|endoftext|>', '<|im_end|>'" in ends

    teacher = load_model(str(tiny.teacher))
    teacher.tokenizer.chat_template = teacher.tokenizer.chat_template + " "
    (template,) = check_pair(student, teacher).notes
    assert "chat templates differ" in template

    teacher = load_model(str(tiny.teacher))
    teacher.tokenizer.backend_tokenizer.model.dropout = 1.0  # the same tokens, never merged
    (division,) = check_pair(student, teacher).notes
    assert "divide a text differently" in division
