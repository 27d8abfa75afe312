"""Names and definitions of TweetEval's labels, in the order of its integers."""

from __future__ import annotations

from dataclasses import dataclass


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
