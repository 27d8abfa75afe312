"""Export a run's model to a folder with weights, tokenizer and card, and push it to the Hugging Face Hub."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gatespace.addons.publish import CARD
from gatespace.addons.publish.card import Evidence, model_card, public_task
from gatespace.errors import GatespaceError, RunError, UsageError, missing_extra, unknown_name
from gatespace.files import atomic_write
from gatespace.models.cache_root import RECORD, read_record, refuse_foreign, write_record
from gatespace.models.hub import first_line, hub_reachable, without_progress_bars
from gatespace.models.load import load_model
from gatespace.runs import RunFolder

__all__ = ["DTYPES", "Exported", "check_export", "check_push", "export_model", "push"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MARK = "export"
"""Key in the record of a folder that is an export, whose files another export may replace."""
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]
"""Leftovers of an earlier push to delete: a loader would take them for this model's."""


# ---------------------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class Exported:
    """A written export."""

    folder: Path
    identity: str
    """Identity of the run."""
    fingerprint: str
    """Fingerprint of the weights as written."""
    files: tuple[str, ...]
    size: int
    """Bytes of all files."""

    @property
    def card(self) -> Path:
        """The model card's file."""
        return self.folder / CARD


def check_export(run: RunFolder, output: Path, *, dtype: str = "fp32") -> None:
    """Raise unless the model of `run` can be exported to `output`."""
    if dtype not in DTYPES:
        raise unknown_name("precision of weights", dtype, DTYPES)
    if not run.exists:
        raise UsageError(
            "this is not the folder of a run",
            got=str(run),
            why="it has no configuration and no identity",
            instead="the folder that `gatespace train` or `teach` has written",
        )
    if not run.is_done:
        raise UsageError("this run is not done", got=str(run), instead="the command that began it, which resumes it")
    if not run.model.is_dir():
        job = "train" if "teacher" in run.identity()["content"] else "teach"
        again = f"gatespace {job} --set checkpoint.model=true --output OTHER {run.config_file}"
        raise UsageError(
            "the model of this run was not kept",
            got=str(run),
            why="checkpoint.model is false, as in a study without keep_models: true",
            instead=f"train it once more, to the same numbers: {again}",
        )
    place, own = output.resolve(), run.path.resolve()
    if place == own or own in place.parents:
        raise UsageError("an export is a folder of its own", got=str(output), why="this one is inside the run's folder")
    if (place / RECORD).exists() and _MARK not in read_record(place):
        raise UsageError(
            "this folder holds a model that is not an export, and it would be lost",
            got=str(output),
            instead="name a new folder",
        )
    refuse_foreign(place)


def export_model(
    run: RunFolder,
    output: Path,
    *,
    dtype: str = "fp32",
    evidence: Evidence | None = None,
    name: str | None = None,
    license: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Exported:
    """Write the model of a run with its card to `output`, replacing the files of an earlier export and no others.

    The weights must be those that the run evaluated, by their fingerprint. The record has the settings that
    `gatespace predict` needs, without paths of this machine.

    Args:
        run: A finished run.
        output: A new folder, or that of an earlier export.
        dtype: Precision of the written weights: fp32, as trained, or bf16.
        evidence: A study's evidence about the run's point.
        name: Name in the card to load the model by; None: the folder's.
        license: Identifier of the model's licence, for the card.
        report: Called with a message before slow operations.
    """
    check_export(run, output, dtype=dtype)
    card = model_card(run, evidence=evidence, name=name or output.name, dtype=dtype, license=license)
    if report is not None:
        report("reading the weights")
    model = load_model(str(run.model))
    _check_weights(run, model.fingerprint())
    network: Any = model.network
    network.to(DTYPES[dtype])
    identity, fingerprint = run.identity()["identity"], model.fingerprint()
    record = {_MARK: 1, "run": identity, "fingerprint": fingerprint, "dtype": dtype, "settings": _settings(run)}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.new-", dir=output.parent) as scratch:
        fresh = Path(scratch)
        with without_progress_bars():
            network.save_pretrained(fresh)
            model.tokenizer.save_pretrained(fresh)
        atomic_write(fresh / CARD, card)
        names = tuple(sorted({RECORD, *_files(fresh)}))
        write_record(fresh, {**record, "files": names})
        _replace_files(output, fresh, names)
    return Exported(output, identity, fingerprint, names, sum((output / name).stat().st_size for name in names))


def _settings(run: RunFolder) -> dict[str, Any]:
    """What `gatespace predict` needs of a run's settings."""
    settings = run.settings()
    evaluation = {key: settings["evaluation"][key] for key in ("max_new_tokens", "batch_size")}
    engine, plugins = {"precision": settings["engine"]["precision"]}, [Path(one).name for one in settings["plugins"]]
    return {"task": public_task(run), "evaluation": evaluation, "engine": engine, "plugins": plugins}


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def _replace_files(output: Path, fresh: Path, names: Sequence[str]) -> None:
    """Move the files `names` of `fresh` to `output`, in place of what an earlier export wrote and of nothing else."""
    listed = read_record(output).get("files")
    present = _files(output) if output.is_dir() else set()
    earlier = {name for name in present if name == RECORD or (isinstance(listed, list) and name in listed)}
    if foreign := sorted(present.intersection(names) - earlier):
        raise UsageError(
            "refusing to overwrite a file that no export wrote",
            got=", ".join(str(output / name) for name in foreign),
            instead="move it elsewhere, or name a new folder",
        )
    output.mkdir(exist_ok=True)
    # A killed export leaves a record of all its files, and no config.json, without which no model is loaded.
    write_record(output, {_MARK: 1, "files": sorted(earlier.union(names))})
    for name in earlier - {RECORD}:
        (output / name).unlink()
    for name in sorted(names, key="config.json".__eq__):
        (output / name).parent.mkdir(exist_ok=True)
        # safetensors writes files that only their owner can read; the folder's mode follows the umask.
        (fresh / name).chmod(output.stat().st_mode & 0o666)
        os.replace(fresh / name, output / name)


def _check_weights(run: RunFolder, fingerprint: str) -> None:
    """Raise unless the card's accuracies are of these weights."""
    settings, summary = run.settings(), run.summary()
    assert summary is not None
    if settings.get("pair", settings)["lora"] is not None:
        return  # the fingerprint was taken before the adapters were merged
    if fingerprint != summary["fingerprint"]:
        raise UsageError(
            "the weights of this run are not those that it evaluated",
            got=f"{fingerprint[:12]} in {run.model}, {summary['fingerprint'][:12]} in its summary",
            why="something has changed them since, and the run's numbers are not theirs",
            instead="the run's own model, or train it again in another folder",
        )


# ---------------------------------------------------------------------------------------------------- the Hub


def check_push(repo: str, *, private: bool = False) -> None:
    """Raise unless `repo` can be pushed to: check its name, the Hub and the login before any heavy work.

    Args:
        repo: ``owner/name``.
        private: The repository must not be public.
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
        raise UsageError("not logged in to the Hub", instead="hf auth login, or HF_TOKEN") from None
    except Exception as error:  # see `_hub_errors`
        raise RunError("the Hub refuses this login", got=_reason(error), instead="hf auth login") from error
    with _hub_errors(repo):
        _check_private(api, repo, private, missing_ok=True)


def push(folder: Path, repo: str, *, private: bool = False, bars: bool = False) -> str:
    """Upload an export in one commit, and return its URL. Weights of an earlier push are replaced.

    Args:
        folder: The export. Only files that the export wrote are uploaded.
        repo: ``owner/name``; created if it does not exist.
        private: Make it private; raises if it exists and is public.
        bars: Show the Hub client's progress bars.
    """
    api = _hub().HfApi()
    with _hub_errors(repo), nullcontext() if bars else _without_bars():
        # None: the owner's default visibility.
        where = api.create_repo(repo, private=True if private else None, exist_ok=True)
        _check_private(api, repo, private)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload a model",
            allow_patterns=read_record(folder)["files"],
            delete_patterns=_REPLACED,
        )
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
            "--private: this repository exists and is public",
            got=repo,
            instead="another name, or make it private on the Hub first",
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    utils = _hub().utils
    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Convert errors of the Hub and the network to `RunError`."""
    try:
        yield
    except GatespaceError:
        raise
    except Exception as error:  # the Hub's client leaks errors of its HTTP client, which changes with releases
        raise RunError(
            f"the push to {repo} failed",
            got=_reason(error),
            why="the Hub has refused it, or the connection broke; the folder here is whole",
            instead="the same command again, or `hf upload`",
        ) from error


def _reason(error: BaseException) -> str:
    """The Hub's own message if there is one, else its client's."""
    message = getattr(error, "server_message", None)
    status = getattr(getattr(error, "response", None), "status_code", None)
    return f"HTTP {status}: {message}" if message else first_line(error)


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise missing_extra("pushing a model", module="huggingface_hub", extra="train") from error
    return huggingface_hub
