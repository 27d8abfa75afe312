"""Rows of a dataset on the Hugging Face Hub, through the package `datasets`, imported lazily."""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gatespace.errors import MissingExtraError, UsageError, missing_extra

EXTRA = "tasks"
TIMEOUT = 3.0
"""Seconds after which the Hub counts as unreachable. Its own client retries for half a minute."""
SPLIT_NAMES = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}


LABEL_COLUMNS = "text_column, label_column and teacher_column of task.table name the columns"


@dataclass(frozen=True)
class HubSplit:
    """Some columns of one split, and the names of a column of named integers."""

    columns: dict[str, list[Any]]
    names: dict[str, tuple[str, ...]]

    def cells(self) -> Iterator[dict[str, Any]]:
        """Row by row; an integer with a name is replaced by it."""
        for row in zip(*self.columns.values(), strict=True):
            yield {column: self._named(column, value) for column, value in zip(self.columns, row, strict=True)}

    def _named(self, column: str, value: Any) -> Any:
        names = self.names.get(column, ())
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def hub_reachable() -> bool:
    """Whether the Hub responds. False without a request if HF_HUB_OFFLINE is set."""
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise missing_extra("loading a model", module="huggingface_hub", extra="train") from error
    return not constants.is_offline_mode() and _answers(constants.ENDPOINT)


@cache
def _answers(address: str) -> bool:
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "gatespace"})
        urllib.request.urlopen(request, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return True  # a response, even if an error
    except (OSError, ValueError):
        return False
    return True


def optional_module(name: str, *, feature: str, otherwise: str = "") -> Any:
    """Import a package of the extra `tasks`, or raise an error that says how to get it or do without."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = missing_extra(feature, module=name, extra=EXTRA)
        instead = f"{missing.instead}; or {otherwise}" if otherwise else missing.instead
        raise MissingExtraError(missing.what, instead=instead) from error


def hub_splits(
    name: str,
    config: str | None,
    columns: Sequence[str],
    *,
    otherwise: str,
    settings: str = LABEL_COLUMNS,
    for_train: Sequence[str] = (),
) -> dict[str, HubSplit]:
    """All splits of a Hub dataset that are named like train, val or test; train has the columns `for_train` too."""
    datasets = optional_module("datasets", feature=f"loading {name} from the Hugging Face Hub", otherwise=otherwise)
    shown = f"{name} ({config})" if config else name
    offline = datasets.config.HF_HUB_OFFLINE
    try:
        # Offline, cached datasets are found and others fail without retries.
        datasets.config.HF_HUB_OFFLINE = offline or not hub_reachable()
        loaded = datasets.load_dataset(name, config)
    except Exception as error:  # anything the network, the Hub's client or the dataset's format may raise
        raise UsageError(
            f"{shown} could not be loaded from the Hugging Face Hub",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            why="the Hub is out of reach from here, or has no such dataset",
            instead=otherwise,
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    found: dict[str, HubSplit] = {}
    for split in loaded:
        ours = SPLIT_NAMES.get(split)
        if ours is None or ours in found:
            continue
        rows = loaded[split]
        wanted = dict.fromkeys((*columns, *(for_train if ours == "train" else ())))
        for column in wanted:
            check_column(column, rows.column_names, where=f"{shown}, split {split}", instead=settings)
        named = {column: getattr(rows.features[column], "names", None) for column in wanted}
        names = {column: tuple(known) for column, known in named.items() if known}
        found[ours] = HubSplit({column: list(rows[column]) for column in wanted}, names)
    if "train" not in found:
        raise UsageError(f"{shown} has no split named train", got=", ".join(map(str, loaded)))
    return found


def check_column(
    column: str,
    columns: Iterable[str],
    *,
    where: str,
    instead: str = LABEL_COLUMNS,
) -> None:
    """Raise if `column` is not among `columns`."""
    present = list(columns)
    if column not in present:
        raise UsageError(
            f"{where} has no column {column!r}",
            got=f"columns {', '.join(map(repr, present))}",
            instead=instead,
        )
