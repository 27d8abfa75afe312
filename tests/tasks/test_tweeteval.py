"""TweetEval: the real files, and folders in its layout with what can be wrong in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gatespace.errors import MissingExtraError, UsageError
from gatespace.tasks import Example, load_task
from gatespace.tasks.load import TASKS
from gatespace.tasks.tweeteval import KNOWN

REAL = {
    # sizes, labels, dropped, test texts in train, best constant
    "emotion": ((3257, 374, 1421), ("anger", "joy", "optimism", "sadness"), (0, 0, 0), 0, ("anger", 0.393)),
    "hate": ((8993, 999, 2970), ("not-hate", "hate"), (7, 1, 0), 231, ("not-hate", 0.578)),
    "offensive": ((11916, 1324, 860), ("not-offensive", "offensive"), (0, 0, 0), 4, ("not-offensive", 0.721)),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str, tweeteval: Path) -> None:
    sizes, labels, dropped, doubles, (label, accuracy) = REAL[name]
    task = load_task(f"tweeteval/{name}", root=tweeteval)
    assert task.name == f"tweeteval/{name}"
    assert (len(task.train), len(task.val), len(task.test)) == sizes
    assert task.labels == labels
    assert set(task.definitions) == set(labels)
    assert tuple(task.dropped[split] for split in ("train", "val", "test")) == dropped
    assert len(task.test_in_train) == doubles
    assert task.best_constant().label == label
    assert task.best_constant().accuracy == pytest.approx(accuracy, abs=5e-4)
    assert "/".join(map(str, sizes)) in task.describe()
    assert f"test texts also in train: {doubles}" in task.describe()


def test_real_rows_keep_their_labels(tweeteval: Path) -> None:
    """Row by row against the files, dropped rows included, by another way of reading them."""
    task = load_task("tweeteval/hate", root=tweeteval)
    hate = tweeteval / "hate"
    with (
        open(hate / "train_text.txt", encoding="utf-8", newline="\n") as texts,
        open(hate / "train_labels.txt") as labels,
    ):
        pairs = [(text[:-1], int(label)) for text, label in zip(texts, labels, strict=True)]
    kept = [Example(text, ("not-hate", "hate")[integer]) for text, integer in pairs if text.strip()]
    assert task.train == kept
    assert len(pairs) == 9000


def test_root_from_the_environment(tweeteval: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATESPACE_TWEETEVAL", str(tweeteval))
    assert load_task("tweeteval/emotion") == load_task("tweeteval/emotion", root=str(tweeteval))


# ---------------------------------------------------------------------------------------------------- made folders


def folder(
    root: Path, name: str, *, mapping: str = "0\tno\n1\tyes", text: str = "a\nb\n", labels: str = "0\n1\n"
) -> Path:
    place = root / name
    place.mkdir(parents=True)
    for split in ("train", "val", "test"):
        (place / f"{split}_text.txt").write_bytes(text.encode())
        (place / f"{split}_labels.txt").write_bytes(labels.encode())
    (place / "mapping.txt").write_text(mapping, encoding="utf-8")
    return place


def test_rows_end_at_newlines_only(tmp_path: Path) -> None:
    folder(tmp_path, "own", text="a\u2028b\x85c\x0cd\n e \n \u2003 \nf", labels="0\n1\n0\n1\n")
    task = load_task("tweeteval/own", root=tmp_path)
    assert task.train == [Example("a\u2028b\x85c\x0cd", "no"), Example(" e ", "yes"), Example("f", "yes")]
    assert task.dropped == {"train": 1, "val": 1, "test": 1}
    assert task.definitions == {}


def test_windows_line_ends(tmp_path: Path) -> None:
    folder(tmp_path, "own", text="a\r\nb\r\n", labels="0\r\n1\r\n", mapping="0\tno\r\n1\tyes\r\n")
    assert load_task("tweeteval/own", root=tmp_path).train == [Example("a", "no"), Example("b", "yes")]


@pytest.mark.parametrize(
    "name, mapping, labels",
    [
        ("hate", "0\tnon-hate\n1\thate", ("not-hate", "hate")),
        ("hate", "0\thate\n1\tnot_hate", ("hate", "not-hate")),
        ("irony", "0\tnon_irony\n1\tirony", ("non-irony", "irony")),
        ("sentiment", "0\tnegative\n1\tneutral\n2\tpositive\n", ("negative", "neutral", "positive")),
        ("hate", "0\tBlue Sky\n1\t😀\t_Big_Smile_\t\n", ("blue-sky", "big-smile")),
    ],
)
def test_labels_are_spelled_in_one_way(name: str, mapping: str, labels: tuple[str, ...], tmp_path: Path) -> None:
    folder(tmp_path, name, mapping=mapping)
    task = load_task(f"tweeteval/{name}", root=tmp_path)
    assert task.labels == labels
    assert set(task.definitions) in ({*labels}, set())


def test_emoji_labels_are_those_of_its_mapping(tmp_path: Path) -> None:
    # three lines of the real file, which has 20
    folder(tmp_path, "emoji", mapping="0\t❤\t_red_heart_\t\n1\t🇺🇸\t_United_States_\t\n2\t🎄\t_Christmas_tree_\t\n")
    labels = load_task("tweeteval/emoji", root=tmp_path).labels
    assert labels == ("red-heart", "united-states", "christmas-tree")
    assert set(labels) < set(KNOWN["emoji"].definitions)
    assert len(KNOWN["emoji"].definitions) == 20


@pytest.mark.parametrize("name", ["stance/climate", "stance_climate", "stance-climate"])
@pytest.mark.parametrize("clone", ["", "datasets"])
def test_stance_targets_share_a_mapping(name: str, clone: str, tmp_path: Path) -> None:
    place = folder(tmp_path / clone, "stance/climate", mapping="0\tnone\n1\tagainst\n2\tfavor")
    (place / "mapping.txt").rename(place.parent / "mapping.txt")
    task = load_task(f"tweeteval/{name}", root=tmp_path)
    assert task.name == "tweeteval/stance/climate"
    assert task.labels == ("none", "against", "favor")
    assert "climate" in task.definitions["favor"]


@pytest.mark.parametrize(
    "content, message",
    [
        ({"labels": "0\n"}, r"train_text.txt and train_labels.txt differ in length\n  got: 2 texts and 1 labels"),
        ({"labels": "0\n2\n"}, r"train_labels.txt:2 is not a label\n  got: '2'\n  instead: an integer from 0 to 1"),
        ({"labels": "x\n1\n"}, r"train_labels.txt:1 is not a label"),
        ({"labels": "²\n1\n"}, r"train_labels.txt:1 is not a label"),
        ({"mapping": "0\tno\n2\tyes"}, r"mapping.txt:2 is not a line of a mapping"),
        ({"mapping": "no\nyes"}, r"mapping.txt:1 is not a line of a mapping"),
    ],
)
def test_damaged_files_are_named(content: dict[str, str], message: str, tmp_path: Path) -> None:
    folder(tmp_path, "own", **content)
    with pytest.raises(UsageError, match=message):
        load_task("tweeteval/own", root=tmp_path)


def test_missing_and_undecodable_files_are_named(tmp_path: Path) -> None:
    place = folder(tmp_path, "own")
    (place / "val_text.txt").write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match=r"val_text.txt is not UTF-8"):
        load_task("tweeteval/own", root=tmp_path)
    (place / "val_text.txt").unlink()
    with pytest.raises(UsageError, match=r"val_text.txt cannot be read"):
        load_task("tweeteval/own", root=tmp_path)
    (place / "mapping.txt").unlink()
    with pytest.raises(UsageError, match=r"no mapping.txt for own"):
        load_task("tweeteval/own", root=tmp_path)


# ---------------------------------------------------------------------------------------------------- names and places


@pytest.mark.parametrize("name", ["hate", "tweeteval", "tweeteval/", "tweetevil/hate"])
def test_unknown_families(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown task .*\n.*tweeteval/hate"):
        load_task(name)


def test_unknown_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GATESPACE_TWEETEVAL", raising=False)
    with pytest.raises(UsageError, match="did you mean 'hate'"):
        load_task("tweeteval/haet")
    folder(tmp_path, "hate")
    with pytest.raises(UsageError, match="did you mean 'hate'"):
        load_task("tweeteval/haet", root=tmp_path)
    with pytest.raises(UsageError, match=r"has no TweetEval task 'emotion'\n  got: a folder with hate"):
        load_task("tweeteval/emotion", root=tmp_path)
    with pytest.raises(UsageError, match="has no TweetEval task"):
        load_task("tweeteval/../hate", root=tmp_path / "hate")


def test_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="root is not a folder"):
        load_task("tweeteval/hate", root=tmp_path / "none")
    monkeypatch.setenv("GATESPACE_TWEETEVAL", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"\$GATESPACE_TWEETEVAL is not a folder"):
        load_task("tweeteval/hate")
    with pytest.raises(UsageError, match="has no folder"):
        load_task("synthetic", root=tmp_path)


def test_without_a_folder_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `datasets`, or without a network, the error says what to do instead."""
    monkeypatch.setenv("GATESPACE_TWEETEVAL", str(tmp_path))  # a folder that has not the task: the Hub is next
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    try:
        import datasets
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"pip install '.\[tasks\]' in a clone of gatespace; or give root="):
            load_task("tweeteval/hate")
    else:
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(UsageError, match=r"could not be loaded from the Hugging Face Hub(.|\n)*give root= or set"):
            load_task("tweeteval/hate")


def test_rows_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Hub's layout and its own spelling of the labels, from a folder in place of the network."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.delenv("GATESPACE_TWEETEVAL", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = datasets.ClassLabel(names=["non-hate", "hate"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    columns: dict[str, list[object]] = {"text": ["x", "", "y"], "label": [0, 1, 1]}
    for split in ("train", "validation", "test"):
        rows = datasets.Dataset.from_dict(columns, features=features)
        (tmp_path / "cardiffnlp/tweet_eval/hate").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(str(tmp_path / "cardiffnlp/tweet_eval/hate" / f"{split}.parquet"))
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: load_dataset(str(tmp_path / name / config)))
    task = load_task("tweeteval/hate")
    assert task.train == task.val == task.test == [Example("x", "not-hate"), Example("y", "hate")]
    assert task.dropped == {"train": 1, "val": 1, "test": 1}


def test_every_name_is_listed() -> None:
    assert {"synthetic", "tweeteval/emoji", "tweeteval/stance/hillary"} < set(TASKS)
    assert len(TASKS) == 12
