"""`gatespace export`: a folder that anybody can load, what it refuses, evidence of a study, and the way to a Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gatespace.config import StudyConfig, parse_config
from gatespace.gating.coefficients import Gate
from gatespace.runs import StudyFolder
from gatespace.study.plan import make_plan
from tests.addons.publish.conftest import TRAIN
from tests.sample_study import set_correct

_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def predictions(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "predictions-test.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# ---------------------------------------------------------------------------------------------------- the folder


def test_its_card_s_code_gives_the_run_s_predictions_without_gatespace(cli, taught, tmp_path):
    """By the code in the card alone, offline, in a process that cannot import gatespace."""
    out = tmp_path / "student"
    result = cli("export", taught.folder, "--output", out)
    assert result.exit_code == 0, result.stderr
    assert f"wrote {out}" in result.stdout
    code = _CODE.findall((out / "README.md").read_text(encoding="utf-8"))[0]
    assert "name = 'student'" in code  # the folder's own name, so that it runs from beside the folder
    told = predictions(taught.folder)
    texts = json.dumps([row["text"] for row in told])
    script = f"import sys\nsys.modules['gatespace'] = None\n{code}\nimport json\n"
    script += f"print(json.dumps([answer(text) for text in {texts}]))"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    wanted = ['{"label": "' + row["raw"] for row in told]
    assert [answer[: len(text)] for answer, text in zip(answers, wanted, strict=True)] == wanted
    assert len({*wanted}) > 2


def test_it_is_the_run_s_model_with_a_card(cli, trained, tmp_path):
    out = tmp_path / "student"
    result = cli("export", trained, "-o", out, "--license", "mit", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["files"] == sorted(path.name for path in out.iterdir())
    assert told["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert (told["study"], told["pushed"], told["dtype"]) == (None, None, "fp32")
    summary = json.loads((trained / "summary.json").read_text())
    assert told["fingerprint"] == summary["fingerprint"]
    ours, theirs = weights(out), weights(trained / "model")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "mit"
    assert "G5, (a, b, c, d) = (4, 0, -1, 0)" in card.text
    assert f"{summary['run']['lam_mean']:.4f}, SD {summary['run']['lam_sd']:.4f}" in card.text
    everything = b"".join(path.read_bytes() for path in out.iterdir())
    assert str(trained.parent).encode() not in everything  # neither paths of this machine nor of its cache
    assert os.environ["GATESPACE_CACHE"].encode() not in everything


def test_the_next_command_labels_texts_as_the_run_did(cli, trained, tmp_path):
    shown = cli("export", trained / "model", "--output", tmp_path / "out", "--quiet")
    assert shown.stderr == ""
    (command,) = re.findall(r"^next  gatespace (.*) < texts.txt$", shown.stdout, re.MULTILINE)
    told = predictions(trained)
    assert shlex.split(command) == ["predict", str(tmp_path / "out")]  # its record has the task
    result = cli(*shlex.split(command), stdin="\n".join(row["text"] for row in told))
    assert result.exit_code == 0, result.stderr
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == [row["response"] or "" for row in told]


def test_a_second_export_replaces_the_files_of_the_first_and_no_others(cli, trained, tmp_path):
    out = tmp_path / "out"
    assert cli("export", trained, "--output", out).exit_code == 0
    first = {path.name for path in out.iterdir()}
    (out / ".git" / "objects").mkdir(parents=True)
    (out / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (out / "notes.txt").write_text("mine")
    (out / "README.md").write_text("changed")
    record = json.loads((out / "gatespace.json").read_text())
    assert set(record["files"]) == first
    # A file of an earlier export that this one does not write; and names outside the folder, which a record may claim.
    (out / "model-00001-of-00002.safetensors").write_text("old")
    (tmp_path / "outside.txt").write_text("mine")
    record["files"] += ["model-00001-of-00002.safetensors", "../outside.txt", str(tmp_path / "outside.txt"), 7]
    (out / "gatespace.json").write_text(json.dumps(record))
    result = cli("export", trained, "--output", out, "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["files"]) == first
    assert {path.name for path in out.iterdir()} == first | {".git", "notes.txt"}
    assert (out / ".git" / "HEAD").read_text() == "ref: refs/heads/main"
    assert (out / ".git" / "objects").is_dir()
    assert (out / "notes.txt").read_text() == (tmp_path / "outside.txt").read_text() == "mine"
    assert "these weights are bf16" in (out / "README.md").read_text()
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.bfloat16}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    # A file in the way that no export wrote
    record = json.loads((out / "gatespace.json").read_text())
    record["files"].remove("README.md")
    (out / "gatespace.json").write_text(json.dumps(record))
    (out / "README.md").write_text("mine")
    result = cli("export", trained, "--output", out)
    assert result.exit_code == 2
    assert "refusing to overwrite a file that no export wrote" in result.stderr
    assert (out / "README.md").read_text() == "mine"
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.bfloat16}


def test_a_killed_export_is_no_model_and_can_be_repeated(cli, trained, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert cli("export", trained, "--output", out).exit_code == 0
    moved = []

    def replace(source, target):
        if len(moved) == 3:
            raise KeyboardInterrupt
        moved.append(target)
        shutil.move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("gatespace.addons.publish.export.os.replace", replace)
        assert cli("export", trained, "--output", out).exit_code != 0
    assert "not a model folder" in cli("predict", out, "--task", "synthetic", stdin="a").stderr
    assert cli("export", trained, "--output", out).exit_code == 0
    assert weights(out)


def test_bf16_halves_it(cli, trained, tmp_path):
    out = tmp_path / "half"
    assert cli("export", trained, "--output", out).exit_code == 0
    assert cli("export", trained, "--output", out, "--dtype", "bf16").exit_code == 0  # an export may be replaced
    ours, theirs = weights(out), weights(trained / "model")
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in ours)
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert "these weights are bf16" in (out / "README.md").read_text()


def test_adapters_are_merged(cli, taught, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    lora = ("--set", "pair.lora={r: 4}", "--steps", "3", "--gate", "static:0.5", "--lr", "0.02")
    result = cli(*TRAIN, "--teacher", taught.folder, *lora, "--output", run)
    assert result.exit_code == 0, result.stderr
    result = cli("export", run, "--output", out)
    assert result.exit_code == 0, result.stderr
    assert not [name for name in weights(out) if "lora" in name]
    assert "LoRA of rank 4" in (out / "README.md").read_text()
    told = predictions(run)
    result = cli("predict", out, "--json", stdin="\n".join(row["text"] for row in told))
    assert [json.loads(line)["raw"] for line in result.stdout.splitlines()] == [row["raw"] for row in told]


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "words, message",
    [
        (["--dtype", "fp61"], "error: unknown precision of weights 'fp61'\n"),
        (["--private"], "error: --private says how to push, and there is no --push\n"),
        (["--push", "no-owner"], "error: --push takes the name of a repository with its owner\n"),
        (["--push", "a b/c"], "error: --push takes the name of a repository\n"),
        (["--study", "."], "error: this is not the folder of a study\n"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(cli, trained, tmp_path, words, message):
    result = cli("export", trained, "--output", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_no_hub_is_told_before_anything_is_written(cli, trained, tmp_path):
    result = cli("export", trained, "--output", tmp_path / "out", "--push", "me/it")  # HF_HUB_OFFLINE is set
    assert result.exit_code == 1
    assert "error: the Hugging Face Hub is out of reach from here" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_no_finished_run_with_a_model_is_refused(cli, trained, tmp_path):
    out = tmp_path / "out"
    assert "this is not the folder of a run" in cli("export", tmp_path, "--output", out).stderr
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "model")
    result = cli("export", copy, "--output", out)
    assert result.exit_code == 2
    assert "the model of this run was not kept" in result.stderr
    assert f"gatespace train --set checkpoint.model=true --output OTHER {copy}/config.yaml" in result.stderr
    (copy / "done").unlink()
    assert "this run is not done" in cli("export", copy, "--output", out).stderr
    assert not out.exists()


def test_weights_that_the_numbers_are_not_about_are_refused(cli, trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    changed = weights(copy / "model")
    changed["model.norm.weight"][0] += 0.01
    save_file(changed, copy / "model" / "model.safetensors", metadata={"format": "pt"})
    result = cli("export", copy, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "the weights of this run are not those that it evaluated" in result.stderr
    assert not (tmp_path / "out").exists()


def test_other_people_s_folders_are_left_alone(cli, trained, taught, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    before = weights(taught.folder / "model")
    for place, message in (
        (foreign, "refusing to overwrite a folder that gatespace did not create"),
        (taught.folder / "model", "holds a model that is not an export, and it would be lost"),
        (trained / "model", "an export is a folder of its own"),
        (trained, "an export is a folder of its own"),
    ):
        result = cli("export", trained, "--output", place)
        assert result.exit_code == 2, place
        assert message in result.stderr
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(taught.folder / "model").items())


# ---------------------------------------------------------------------------------------------------- a study

RIGHT = {("G5", 42): 8, ("G5", 2): 6, ("G4", 42): 5, ("G4", 2): 5, ("twin(G5)", 42): 6, ("twin(G5)", 2): 7}
"""How many of ten rows a run of the study has right; 4 where it is not said."""


@pytest.fixture(scope="module")
def study(trained, tmp_path_factory) -> StudyFolder:
    """A study whose run of G5 at 42 is the trained one; the others have its records with other numbers."""
    settings = {
        "name": "small",
        "tasks": {"messages": {"task": {"name": "synthetic", "brief": True}}},
        "points": ["G4", "G5"],
        "seeds": [42, 2],
        "train": {"pair": {"teacher": "tiny", "student": "tiny"}},
    }
    config = parse_config(StudyConfig, settings)
    folder = StudyFolder(tmp_path_factory.mktemp("studies") / "small")
    folder.begin(config, workers=1, threads=1)
    for spec in make_plan(config).runs.values():
        place, is_it = folder.run(spec.id).path, (spec.point, spec.seed) == ("G5", 42)
        shutil.copytree(trained, place, ignore=None if is_it else shutil.ignore_patterns("model"))
        summary = json.loads((place / "summary.json").read_text())
        right = RIGHT.get((spec.point, spec.seed), 4)
        set_correct(summary["evaluation"]["test"]["metrics"], right)
        (place / "summary.json").write_text(json.dumps(summary))
        if not is_it:
            gate = Gate(*spec.gate) if spec.gate is not None else Gate.static(0.5)
            own = {"identity": spec.id, "content": {"gate": str(gate), "teacher": "t", "task": "t"}}
            (place / "identity.json").write_text(json.dumps(own))
    return folder


def section(out: Path) -> str:
    card = (out / "README.md").read_text(encoding="utf-8")
    return card.partition("## What the evidence supports\n")[2].partition("\n## ")[0]


def test_a_run_of_a_study_has_its_evidence(cli, study, trained, tmp_path):
    (run,) = [path for path in (study.path / "runs").iterdir() if (path / "model").is_dir()]
    result = cli("export", run, "--output", tmp_path / "inside", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["study"] == "small"
    told = section(tmp_path / "inside")
    assert "From the study `small`." in told
    assert "G5 on messages: 80.0 % of the test texts are right at this model's seed 42" in told
    assert "70.0 % on average over 2 seeds (42, 2), SD 14.14 pp" in told
    # +20 and -10 against its twin; +40 and +20 against what has 4 right
    assert "- Against twin(G5) (a constant λ of the same mean): +5.00 pp over 2 seeds" in told
    assert "- Against static:0.5 (a constant λ): +30.00 pp over 2 seeds" in told
    assert "Its seed 42 is the one that choices were made by" in told
    assert "- Mean-matched constant: " in told
    assert "No single comparison is claimed." in told
    # The same run elsewhere is the study's by its identity, and has the same evidence.
    shown = cli("export", trained, "--output", tmp_path / "outside", "--study", study)
    assert "with the evidence of the study small" in shown.stdout
    assert section(tmp_path / "outside") == told


def test_a_run_of_another_study_is_none_of_this_one_s(cli, study, taught, tmp_path):
    result = cli("export", taught.folder, "--output", tmp_path / "out", "--study", study)
    assert result.exit_code == 2
    assert "error: this run is not part of the study\n" in result.stderr


# ---------------------------------------------------------------------------------------------------- the Hub


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's protocol that a push and a download need; repositories are in memory."""

    protocol_version = "HTTP/1.1"
    repos: dict[str, dict[str, Any]]
    blobs: dict[str, bytes]
    seen: list[str]
    token: str
    address: str

    def log_message(self, format: str, *arguments: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.seen.append(f"{self.command} {path}")
        if path == "/":
            self.reply(200, b"hello")
        elif path == "/api/whoami-v2":
            known = self.headers.get("authorization") == f"Bearer {self.token}"
            self.reply(200 if known else 401, {"name": "me", "type": "user"} if known else {"error": "Who is that?"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            repo, rest = self.repos.get(found[1]), found[2] or ""
            if repo is None:
                self.reply(404, {"error": "Repository not found"}, error="RepoNotFound")
            elif rest.startswith("/tree/") and not rest.endswith("additional_chat_templates"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0"}
                    for name, data in repo["files"].items()
                ]
                self.reply(200, tree)
            elif rest.startswith("/tree/"):
                self.reply(404, b"", error="EntryNotFound")
            else:
                siblings = [{"rfilename": name} for name in repo["files"]]
                self.reply(200, {"id": found[1], "sha": "0" * 40, "private": repo["private"], "siblings": siblings})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            data = self.repos.get(found[1], {"files": {}})["files"].get(found[2])
            self.reply(404, b"", error="EntryNotFound") if data is None else self.reply(200, data)
        else:
            self.reply(404, b"")

    def do_PUT(self) -> None:
        data = self.body()
        self.seen.append(f"PUT {self.path}")
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.blobs[oid] = data
        self.reply(200, b"")

    def do_POST(self) -> None:
        path, data = self.path.split("?")[0], self.body()
        self.seen.append(f"POST {path}")
        if path == "/api/repos/create":
            self.create(json.loads(data))
        elif path.endswith("/preupload/main"):
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(data)["files"]
            ]
            self.reply(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.address}/lfs/{one['oid']}"}}}
                for one in json.loads(data)["objects"]
            ]
            self.reply(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self.commit(found[1], [json.loads(line) for line in data.splitlines()])
        elif path == "/api/validate-yaml":
            self.reply(200, {})
        else:
            self.reply(404, b"")

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name.startswith("closed/"):
            self.reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        elif name in self.repos:
            self.reply(409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"})
        else:
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.repos[name] = {"private": private, "files": {}, "commits": []}
            self.reply(200, {"url": f"{self.address}/{name}"})

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repo = self.repos[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repo["commits"].append(value["summary"])
            elif line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo["files"][value["path"]] = self.blobs[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del repo["files"][value["path"]]
        oid = "1" * 40
        self.reply(200, {"commitUrl": f"{self.address}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def reply(self, status: int, body: Any, error: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        headers = {
            "Content-Type": "application/octet-stream" if isinstance(body, bytes) else "application/json",
            "Content-Length": str(len(data)),
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": "0" * 40,
            "X-Error-Code": error,
        }
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    state: dict[str, Any] = {"repos": {}, "blobs": {}, "seen": [], "token": "hf_for_this_test_only"}
    served = type("Served", (Hub,), state)
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    served.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import json, sys
from gatespace.cli.app import app
for words in json.loads(sys.argv[1]):
    if isinstance(words, str):
        exec(words)
        continue
    try:
        app(words, prog_name="gatespace")
    except SystemExit as error:
        print("exit", error.code)
"""


def at_the_hub(hub: type[Hub], child: dict[str, str], tmp_path: Path, *steps: Any) -> Any:
    """Commands, and code as text, in a process of its own: the Hub's client reads its settings when it is imported."""
    drop = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    env = {name: value for name, value in child.items() if name not in drop}
    env |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1"}
    env |= {"HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
    steps = tuple([*map(str, step)] if isinstance(step, list) else step for step in steps)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(steps)], env=env, capture_output=True, text=True, timeout=600
    )


def test_a_push_uploads_the_folder_and_loads_from_there(hub, child, trained, tmp_path):
    """Pushed, changed, pushed again, and loaded by its name."""
    out = tmp_path / "out"
    export = ["export", trained, "--output", out, "--push", "me/student", "--private", "--quiet"]
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained('me/student', dtype='auto')\n"
        "print('loaded', model.dtype, len(AutoTokenizer.from_pretrained('me/student')))"
    )
    hub.repos["me/student"] = {"private": True, "files": {"model-00001-of-00002.safetensors": b"old"}, "commits": []}
    hub.repos["me/student"]["files"] |= {"mine.txt": b"kept"}
    own = f"import pathlib; pathlib.Path({str(out / 'secret.txt')!r}).write_text('mine')"
    done = at_the_hub(hub, child, tmp_path, export, own, [*export, "--dtype", "bf16", "--json"], load)
    assert done.stdout.count("exit 0") == 2, done.stderr
    repo = hub.repos["me/student"]
    local = {path.name: path.read_bytes() for path in out.iterdir()}
    assert local.pop("secret.txt") == b"mine"  # the user's, and not the export's
    assert repo["files"] == local | {"mine.txt": b"kept"}  # all of it, byte for byte, and no weights of before
    assert len(repo["commits"]) == 2
    assert f"at    {hub.address}/me/student" in done.stdout
    assert f'"pushed": "{hub.address}/me/student"' in done.stdout
    assert "loaded torch.bfloat16" in done.stdout
    assert b"name = 'me/student'" in local["README.md"]
    assert hub.token not in done.stdout + done.stderr


def test_nothing_leaves_without_being_asked(hub, child, trained, tmp_path):
    hub.repos["me/public"] = {"private": False, "files": {"README.md": b"old"}, "commits": []}
    done = at_the_hub(
        hub,
        child,
        tmp_path,
        ["export", trained, "--output", tmp_path / "plain", "--quiet"],
        ["export", trained, "--output", tmp_path / "a", "--push", "me/public", "--private"],
        ["export", trained, "--output", tmp_path / "b", "--push", "closed/model"],
        "import os; os.environ['HF_TOKEN'] = 'hf_wrong'",
        ["export", trained, "--output", tmp_path / "c", "--push", "me/x"],
        "os.environ['HF_TOKEN'] = ''",
        ["export", trained, "--output", tmp_path / "c", "--push", "me/x"],
    )
    assert done.stdout.count("exit 2") == 2, done.stdout + done.stderr
    assert done.stdout.count("exit 1") == 2
    assert (tmp_path / "plain" / "README.md").is_file()
    assert "error: --private: this repository exists and is public" in done.stderr
    assert hub.repos == {"me/public": {"private": False, "files": {"README.md": b"old"}, "commits": []}}
    assert "error: the push to closed/model failed" in done.stderr
    assert "You don't have the rights" in done.stderr
    assert (tmp_path / "b" / "README.md").is_file()  # the folder here is whole
    assert "error: the Hub refuses this login" in done.stderr
    assert "error: not logged in to the Hub" in done.stderr
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()
    assert [line for line in hub.seen if line.startswith(("POST", "PUT"))] == ["POST /api/repos/create"]
    assert "Traceback" not in done.stderr
