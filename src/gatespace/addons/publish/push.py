"""A model folder on its way to the Hugging Face Hub, for those who ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra
from gatespace.models.hub import first_line, hub_reachable

__all__ = ["check_push", "push"]

# What an earlier push may have left and this one does not have: a loader would take it for this model's.
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]


def check_push(repo: str, *, private: bool = False) -> None:
    """Raise unless `repo` can be pushed to, before anything heavy is done: its name, the Hub, the login.

    Args:
        repo: ``owner/name``.
        private: The repository must not be one that everybody can read.
    """
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError as error:
        raise UsageError("--push takes the name of a repository", got=repo, why=_reason(error)) from None
    if repo.count("/") != 1:
        raise UsageError("--push takes the name of a repository with its owner", got=repo, instead="owner/name")
    if not hub_reachable():
        raise RunError(
            "the Hugging Face Hub is out of reach from here, or HF_HUB_OFFLINE is set",
            instead="export without --push, and `hf upload` from where the Hub can be reached",
        )
    api = hub.HfApi()
    try:
        api.whoami()
    except hub.errors.LocalTokenNotFoundError:
        raise UsageError("the Hub does not know who is pushing", instead="hf auth login, or HF_TOKEN") from None
    except Exception as error:  # as in `_told`
        raise RunError("the Hub refuses this login", got=_reason(error), instead="hf auth login") from error
    with _told(repo):
        _check_private(api, repo, private, missing_ok=True)


def push(folder: Path, repo: str, *, private: bool = False, message: str = "Upload a model", bars: bool = False) -> str:
    """Upload all files of `folder` in one commit, and return where they are. Weights of an earlier push are replaced.

    Args:
        folder: A model folder.
        repo: ``owner/name``; made if it is not there.
        private: Make it private; an error where it is there and public.
        message: Of the commit.
        bars: Let the Hub's client draw its bars.
    """
    api = _hub().HfApi()
    with _told(repo), _bars(bars):
        # Without a word from the user, the owner's own default counts.
        where = api.create_repo(repo, private=True if private else None, exist_ok=True)
        _check_private(api, repo, private)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=_REPLACED)
    return str(where)


def _check_private(api: Any, repo: str, private: bool, *, missing_ok: bool = False) -> None:
    if not private:
        return
    try:
        found = api.repo_info(repo)
    except _hub().errors.RepositoryNotFoundError:
        if missing_ok:
            return
        raise
    if not found.private:
        raise UsageError(
            "--private: this repository is there and everybody can read it",
            got=repo,
            instead="another name, or make it private on the Hub first",
        )


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    utils = _hub().utils
    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """The Hub's answers and the network's failures as errors of ours."""
    try:
        yield
    except GatespaceError:
        raise
    except Exception as error:  # the Hub's client raises what its client of HTTP raises, which changes with releases
        raise RunError(
            f"the push to {repo} failed",
            got=_reason(error),
            why="the Hub has refused it, or the connection broke; the folder here is whole",
            instead="the same command again, or `hf upload`",
        ) from error


def _reason(error: BaseException) -> str:
    """What the Hub says rather than what its client says about it, where it says something."""
    told = getattr(error, "server_message", None)
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"HTTP {status}: {told}" if told else first_line(error)


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise missing_extra("pushing a model", module="huggingface_hub", extra="train") from error
    return huggingface_hub
