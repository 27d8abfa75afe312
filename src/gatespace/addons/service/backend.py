"""What a teacher service computes with: a model in its own process, or a vLLM server.

The service itself knows wires, clients and turns; a backend knows what the teacher is and makes one for every kind of
question.
"""

from __future__ import annotations

import hashlib
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gatespace.addons.service.head import HeadBytes
from gatespace.addons.service.schedule import Kind
from gatespace.addons.service.wire import vocabulary_digest
from gatespace.addons.vllm.process import VllmProcess
from gatespace.addons.vllm.server import RefusedError, ServerAwayError, VllmServer
from gatespace.addons.vllm.source import VllmSource
from gatespace.addons.vllm.teacher import VllmTeacher, name_fingerprint
from gatespace.errors import GatespaceError, RunError, UsageError
from gatespace.models.load import Model
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalStats, LocalTeacher
from gatespace.teacher.scores import Scores, TeacherAwayError

MAX_CHOICES = 1024
"""First choices that a vLLM server started here gives at most."""
_TIMEOUT = 300.0
"""Seconds that vLLM may take for a batch. One that nobody listens at is away at once."""


class ServedTeacher(Protocol):
    """A teacher as the thread of the model uses it. One that is away for a while raises `TeacherAwayError`."""

    stats: LocalStats
    numerics: str

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        """The scores of all tokens of `responses`, each the continuation of its prompt (after the shared prefix)."""
        ...

    def close(self) -> None:
        """It is not needed any more."""
        ...


class Backend(Protocol):
    """What a service says of its teacher, and how it gets one. All but `close` is for one thread at a time."""

    name: str
    fingerprint: str
    kept: bool
    """Whether scores may be kept under the fingerprint."""
    tokenizers: frozenset[str]
    """Digests by which a student's tokens may be named."""
    payloads: tuple[str, ...]
    vocab_size: int
    """Ids of the tokenizer."""
    rows: int
    """Ids that the head tells of."""
    reach: int | None
    """Prefix, prompt and response of a row."""
    width: int
    """Columns of a hidden state, and"""
    dtype: str
    """its type."""

    def teacher(self, kind: Kind) -> ServedTeacher:
        """A teacher for questions of a kind."""
        ...

    def head(self) -> HeadBytes:
        """The bytes of the head; asked for only where hidden states are offered."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class LocalBackend:
    """A model in this process.

    Args:
        model: The teacher; its weights must not change from here on.
        cache: Scores computed before, and from now on.
        packed: As in `body_of`.
    """

    payloads: tuple[str, ...] = ("hidden", "top_k")
    kept = True

    def __init__(self, model: Model, *, cache: ScoreCache | None = None, packed: bool | None = None) -> None:
        self._model, self._cache, self._packed = model, cache, packed
        weight = model.head.weight
        self.name, self.fingerprint = model.name, model.fingerprint()
        self.tokenizers = frozenset({model.tokenizer_digest(), vocabulary_digest(model.tokenizer.get_vocab())})
        self.vocab_size, self.rows, self.width = model.vocab_size, len(weight), weight.shape[1]
        self.dtype = str(weight.dtype).removeprefix("torch.")
        reach = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
        self.reach = reach if isinstance(reach, int) and reach > 0 else None

    def teacher(self, kind: Kind) -> LocalTeacher:
        """A teacher for questions of a kind."""
        return LocalTeacher(
            self._model,
            kind.prefix,
            max_new_tokens=kind.max_new_tokens,
            payload=kind.payload,
            k=kind.k,
            vocab_size=kind.vocab_size,
            cache=self._cache,
            packed=self._packed,
        )

    def head(self) -> HeadBytes:
        """The bytes of the head."""
        return HeadBytes(self._model)

    def close(self) -> None:
        """Nothing was started."""


class VllmBackend:
    """A vLLM server: one that is started here, and again whenever it ends; or one that somebody else looks after.

    Args:
        source: The model, as far as it is known without its weights.
        where: The Python of an environment with vLLM; or ``vllm://host:port[/model]`` of a server with that model.
        cache: Scores computed before; not used with a server of somebody else's, which tells no hash of its weights.
        dtype: ``float32`` or ``bfloat16``, of a server that is started here.
        max_model_len: The longest prefix, prompt and response, of a server that is started here.
        options: Further options of it.
        patience: Seconds until it has to be ready.
        report: Is told what is worth a line.
    """

    payloads: tuple[str, ...] = ("top_k",)

    def __init__(
        self,
        source: VllmSource,
        where: str,
        *,
        cache: ScoreCache | None = None,
        dtype: str = "bfloat16",
        max_model_len: int = 2048,
        options: Sequence[str] = (),
        patience: float = 1200.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._source, self._report = source, report or (lambda text: None)
        self._process: VllmProcess | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.name, self.dtype = source.name, dtype
        self.tokenizers = frozenset({vocabulary_digest(source.tokenizer.get_vocab())})
        self.vocab_size, self.rows, self.width = source.vocab_size, source.rows, int(source.config.hidden_size)
        self.kept = "://" not in where
        self._cache = cache if self.kept else None
        if self.kept:
            self._scratch = tempfile.TemporaryDirectory(prefix="gatespace-vllm-")
            log = Path(self._scratch.name) / "vllm.log"
            self._report(f"starting vLLM with {source.name}; it writes to {log}")
            try:
                self._process = VllmProcess(
                    Path(where).expanduser(),
                    source.folder,
                    log=log,
                    dtype=dtype,
                    max_model_len=min(max_model_len, source.reach or max_model_len),
                    max_logprobs=MAX_CHOICES,
                    options=options,
                    patience=patience,
                )
            except BaseException:
                self._scratch.cleanup()
                raise
            where = self._process.address
        self._server = VllmServer(where, timeout=_TIMEOUT, patience=_TIMEOUT, wait=False)
        try:
            card, version = self._server.card(), self._server.version()
            self.reach = card.max_model_len
            # One token is always written.
            self.reach = None if self.reach is None else self.reach - 1
            if self._process is None:
                self.fingerprint = name_fingerprint(card, version)
            else:
                identity = "\n".join(("gatespace vllm 2", source.fingerprint(), dtype, shlex.join(options)))
                self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Of the vLLM server."""
        return str(self._server.place)

    @property
    def pid(self) -> int | None:
        """Of the vLLM server, where it was started here."""
        return None if self._process is None else self._process.pid

    def teacher(self, kind: Kind) -> ServedTeacher:
        """A teacher for questions of a kind."""
        self.revive()
        return _Supervised(self, kind)

    def head(self) -> HeadBytes:
        """There is none to be had."""
        raise UsageError("vLLM does not give its head away")

    def close(self) -> None:
        """End the server that was started here."""
        self._server.close()
        if self._process is not None:
            self._process.stop()
        if self._scratch is not None:
            self._scratch.cleanup()

    # ------------------------------------------------------------------ life and death

    def revive(self) -> None:
        """Start our server again if it has ended; `TeacherAwayError` if it does not come back."""
        process = self._process
        if process is None or process.alive:
            return
        self._report("vLLM has ended; starting it again")
        try:
            process.restart()
        except RunError as error:
            self._report(str(error))
            raise TeacherAwayError("vLLM has ended and does not start again", got=error.got) from error
        self._report("vLLM is back")

    def lost(self) -> bool:
        """Whether vLLM is not there, or not well. One of ours that only seems to live is ended."""
        if self._server.healthy():
            return False
        if self._process is not None and self._process.alive:
            self._process.kill()
        return True


class _Supervised:
    """A `VllmTeacher` behind which the server may end and come back."""

    def __init__(self, backend: VllmBackend, kind: Kind) -> None:
        self._backend = backend
        source = backend._source
        self._teacher = self._guarded(
            lambda: VllmTeacher(
                backend.address,
                kind.prefix,
                max_new_tokens=kind.max_new_tokens,
                k=kind.k,
                tokenizer=source.tokenizer,
                vocab_size=kind.vocab_size,
                cache=backend._cache,
                fingerprint=backend.fingerprint,
                timeout=_TIMEOUT,
                patience=_TIMEOUT,
                wait=False,
            )
        )
        self.stats, self.numerics = self._teacher.stats, self._teacher.numerics

    def score(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Scores:
        self._backend.revive()
        scores: Scores = self._guarded(lambda: self._teacher.score(prompts, responses))
        return scores

    def close(self) -> None:
        self._teacher.close()

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """An engine that has died answers for a while that it is broken; that is no word about the question."""
        try:
            return work()
        except (RefusedError, ServerAwayError) as error:
            if isinstance(error, RefusedError) and (error.status < 500 or not self._backend.lost()):
                raise
            raise _away(error) from error
        except TeacherAwayError as error:
            raise _away(error) from error


def _away(error: GatespaceError) -> TeacherAwayError:
    return TeacherAwayError("vLLM is away", got=error.got, instead="wait, and ask again")
