"""Model cards, exported model folders, and pushing them to the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatespace.runs import RunFolder

CARD = "README.md"
"""File name of the model card in a model folder."""


def write_card(run: RunFolder) -> None:
    """Write the card of a run into its model folder, if the run kept its model.

    Skipped if jinja2 or huggingface_hub, which come with torch and transformers, is missing: a run must not fail for
    its card.
    """
    from gatespace.addons.publish.card import model_card
    from gatespace.files import atomic_write

    if not run.model.is_dir():
        return
    try:
        text = model_card(run)
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "huggingface_hub"):
            raise
        return
    atomic_write(run.model / CARD, text)
