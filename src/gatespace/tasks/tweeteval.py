"""TweetEval (Barbieri et al. 2020) from a folder in its own layout, or from the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gatespace.errors import UsageError, unknown_name
from gatespace.tasks.data import SPLITS, Example, Task
from gatespace.tasks.parser import label_key
from gatespace.tasks.read import hub_splits

VARIABLE = "GATESPACE_TWEETEVAL"
HUB_NAME = "cardiffnlp/tweet_eval"
_REPOSITORY = "cardiffnlp/tweeteval"


def load_tweeteval(name: str, root: str | Path | None = None) -> Task:
    """The TweetEval task `name`, e.g. ``hate`` or ``stance/climate``.

    Args:
        name: A task of TweetEval, or a folder of `root` in the layout of one.
        root: A TweetEval folder (the one that holds emotion/, hate/, …, or a clone of its repository). None: the
            folder that $GATESPACE_TWEETEVAL names, and the Hub for what it lacks.
    """
    name = re.sub(r"^stance[-_/](?=.)", "stance/", name.strip("/"))
    if root is not None:
        base = _base(Path(root).expanduser(), "root")
        folder = _folder(base, name)
        if folder is None:
            present = [known for known in KNOWN if _folder(base, known)]
            if present and name not in KNOWN:
                raise unknown_name("TweetEval task", name, present)
            raise UsageError(
                f"{base} has no TweetEval task {name!r}",
                got=f"a folder with {', '.join(present) or 'none of the TweetEval tasks'}",
                instead="root= is the folder that holds emotion/, hate/ and so on",
            )
        return _from_folder(name, folder)
    if place := os.environ.get(VARIABLE):
        folder = _folder(_base(Path(place).expanduser(), f"${VARIABLE}"), name)
        if folder is not None:
            return _from_folder(name, folder)
    if name not in KNOWN:
        raise unknown_name("TweetEval task", name, KNOWN)
    return _from_hub(name)


def _base(root: Path, what: str) -> Path:
    if not root.is_dir():
        raise UsageError(f"{what} is not a folder", got=root, instead="the folder that holds emotion/, hate/ and so on")
    return root


def _folder(root: Path, name: str) -> Path | None:
    if ".." in Path(name).parts:
        return None
    for place in (root / name, root / "datasets" / name):
        if (place / "train_text.txt").is_file():
            return place
    return None


# ---------------------------------------------------------------------------------------------------- folder


def _from_folder(name: str, folder: Path) -> Task:
    labels = _mapping(name, folder)
    rows: dict[str, list[Example]] = {}
    dropped: dict[str, int] = {}
    for split in SPLITS:
        rows[split], dropped[split] = _rows(folder, split, labels)
    return _task(name, labels, rows, dropped, source=str(folder))


def _mapping(name: str, folder: Path) -> tuple[str, ...]:
    # The stance targets share the mapping of their parent folder.
    places = [folder / "mapping.txt", folder.parent / "mapping.txt"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UsageError(f"no mapping.txt for {name}", got=folder, why="it names the labels behind the integers")
    labels: list[str] = []
    for number, line in _numbered(path):
        fields = [field.strip() for field in line.split("\t") if field.strip()]
        if not fields:
            continue
        if len(fields) < 2 or fields[0] != str(len(labels)):
            raise UsageError(
                f"{path}:{number} is not a line of a mapping",
                got=repr(line),
                instead=f"'{len(labels)}<tab>label', integers from 0 in order",
            )
        labels.append(_canonical(name, fields[-1]))
    return tuple(labels)


def _canonical(name: str, label: str) -> str:
    # Releases of TweetEval and the Hub differ in not-/non- and in underscores; a prompt, and with it every number,
    # must not depend on where the rows come from.
    spelled = re.sub(r"[\s_]+", "-", label.strip("_ ")).casefold()
    known = {_spelling(own): own for own in KNOWN[name].definitions} if name in KNOWN else {}
    return known.get(_spelling(spelled), spelled)


def _spelling(label: str) -> str:
    return re.sub(r"^non ", "not ", label_key(label))


def _rows(folder: Path, split: str, labels: tuple[str, ...]) -> tuple[list[Example], int]:
    text_path, label_path = folder / f"{split}_text.txt", folder / f"{split}_labels.txt"
    texts, integers = _numbered(text_path), _numbered(label_path)
    if len(texts) != len(integers):
        raise UsageError(
            f"{text_path} and {label_path.name} differ in length",
            got=f"{len(texts)} texts and {len(integers)} labels",
            why="line n of one belongs to line n of the other",
        )
    rows: list[Example] = []
    for (number, text), (_, integer) in zip(texts, integers, strict=True):
        index = integer.strip()
        if not (index.isascii() and index.isdigit() and int(index) < len(labels)):
            raise UsageError(
                f"{label_path}:{number} is not a label",
                got=repr(integer),
                instead=f"an integer from 0 to {len(labels) - 1}",
            )
        if text.strip():
            rows.append(Example(text, labels[int(index)]))
    return rows, len(texts) - len(rows)


def _numbered(path: Path) -> list[tuple[int, str]]:
    # By "\n" only: tweets may hold U+2028, U+0085 and the like, at which str.splitlines would break a row in two.
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", got=str(error)) from error
    if lines[-1] == "":
        lines.pop()
    return [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]


# ---------------------------------------------------------------------------------------------------- hub


def _from_hub(name: str) -> Task:
    labels = tuple(KNOWN[name].definitions)
    splits = hub_splits(
        HUB_NAME,
        name.replace("/", "_"),
        otherwise=f"give root= or set ${VARIABLE} to a TweetEval folder (git clone https://github.com/{_REPOSITORY})",
    )
    rows: dict[str, list[Example]] = {}
    dropped: dict[str, int] = {}
    for split in SPLITS:
        if split not in splits:
            raise UsageError(f"{HUB_NAME} has no split {split} of {name}", got=", ".join(splits))
        # By position: the Hub's integers are TweetEval's, its names are not (non-hate, and bare emoji).
        pairs = list(zip(splits[split]["text"], splits[split]["label"], strict=True))
        for number, (text, integer) in enumerate(pairs, start=1):
            if not isinstance(text, str) or integer not in range(len(labels)):
                raise UsageError(f"{HUB_NAME}, {name}, {split} row {number} is bad", got=f"{text!r}, {integer!r}")
        rows[split] = [Example(text, labels[integer]) for text, integer in pairs if text.strip()]
        dropped[split] = len(pairs) - len(rows[split])
    return _task(name, labels, rows, dropped, source=f"hub:{HUB_NAME}")


def _task(
    name: str, labels: tuple[str, ...], rows: dict[str, list[Example]], dropped: dict[str, int], *, source: str
) -> Task:
    known = KNOWN.get(name)
    if known is None or set(labels) != set(known.definitions):
        known = Labels("Which label fits the tweet best?", {})
    return Task(
        name=f"tweeteval/{name}",
        labels=labels,
        definitions=known.definitions,
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        dropped=dropped,
        question=known.question,
        source=source,
    )


# ---------------------------------------------------------------------------------------------------- labels


@dataclass(frozen=True)
class Labels:
    """The question of a TweetEval task, and label → brief definition in the order of the integers."""

    question: str
    definitions: dict[str, str]


_EMOJI = {
    "red-heart": "❤",
    "smiling-face-with-hearteyes": "😍",
    "face-with-tears-of-joy": "😂",
    "two-hearts": "💕",
    "fire": "🔥",
    "smiling-face-with-smiling-eyes": "😊",
    "smiling-face-with-sunglasses": "😎",
    "sparkles": "✨",
    "blue-heart": "💙",
    "face-blowing-a-kiss": "😘",
    "camera": "📷",
    "united-states": "🇺🇸",
    "sun": "☀",
    "purple-heart": "💜",
    "winking-face": "😉",
    "hundred-points": "💯",
    "beaming-face-with-smiling-eyes": "😁",
    "christmas-tree": "🎄",
    "camera-with-flash": "📸",
    "winking-face-with-tongue": "😜",
}
_TARGETS = {
    "abortion": "the legalization of abortion",
    "atheism": "atheism",
    "climate": "the view that climate change is a real concern",
    "feminist": "the feminist movement",
    "hillary": "Hillary Clinton",
}


def _stance(target: str) -> Labels:
    return Labels(
        f"Which stance does the tweet take towards {target}?",
        {
            "none": f"The tweet takes no stance on {target}.",
            "against": f"The tweet is against {target}.",
            "favor": f"The tweet is in favor of {target}.",
        },
    )


KNOWN: dict[str, Labels] = {
    "emoji": Labels(
        "Which emoji did the author put at the end of the tweet?",
        {label: f"The emoji {emoji}." for label, emoji in _EMOJI.items()},
    ),
    "emotion": Labels(
        "Which emotion does the tweet express most strongly?",
        {
            "anger": "The author is angry, annoyed or outraged.",
            "joy": "The author is happy, amused or pleased.",
            "optimism": "The author is hopeful or encouraging about what is to come.",
            "sadness": "The author is sad, hurt, lonely or discouraged.",
        },
    ),
    "hate": Labels(
        "Does the tweet express hate against women or immigrants?",
        {
            "not-hate": "The tweet does not attack women or immigrants as a group.",
            "hate": "The tweet attacks, demeans or threatens women or immigrants as a group.",
        },
    ),
    "irony": Labels(
        "Is the tweet ironic?",
        {
            "non-irony": "The tweet means what it says.",
            "irony": "The tweet means something other than what it says, often the opposite.",
        },
    ),
    "offensive": Labels(
        "Is the tweet offensive?",
        {
            "not-offensive": "The tweet has no insult, threat or profanity.",
            "offensive": "The tweet has an insult, a threat or profanity.",
        },
    ),
    "sentiment": Labels(
        "What is the sentiment of the tweet?",
        {
            "negative": "The tweet is unfavorable or unhappy.",
            "neutral": "The tweet is neither favorable nor unfavorable.",
            "positive": "The tweet is favorable or happy.",
        },
    ),
    **{f"stance/{name}": _stance(target) for name, target in _TARGETS.items()},
}
