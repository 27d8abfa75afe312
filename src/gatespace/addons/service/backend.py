"""Scoring backends of the teacher service: a model in this process, or a vLLM server.

`Backend` describes the teacher and builds one per `ScoreSpec`. `Scorer` keeps the most recent ones and scores
batches; it runs in the model thread.
"""

from __future__ import annotations

import hashlib
import shlex
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gatespace.addons.service import wire
from gatespace.addons.service.schedule import Request, Row
from gatespace.errors import GatespaceError, RunError, UsageError, unknown_name
from gatespace.gating.tokens import TeacherTopK
from gatespace.models.load import Model
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import Scores, ScoreSpec, Teacher, TeacherAwayError

_MAX_LOGPROBS = 1024  # largest k of a vLLM server started here
_VLLM_START = 1200.0  # seconds for a vLLM server started here to become ready
_VLLM_TIMEOUT = 300.0  # seconds vLLM may take for a batch


class Backend:
    """A teacher and its metadata for clients. Not thread-safe."""

    name: str
    fingerprint: str
    cacheable: bool
    """Whether scores may be cached under the fingerprint."""
    cache: ScoreCache | None
    """Cached scores."""
    tokenizers: frozenset[str]
    """Vocabulary digests that a student may send."""
    payloads: tuple[str, ...]
    vocab_size: int
    """Number of tokenizer ids."""
    rows: int
    """Rows of the head; those beyond `vocab_size` are padding."""
    reach: int | None
    """Longest row in tokens: prefix, prompt and response."""
    width: int
    """Hidden size."""
    dtype: str
    """Dtype of a hidden state."""

    def teacher(self, spec: ScoreSpec) -> Teacher:
        """Return a teacher for a spec."""
        raise NotImplementedError

    def score(self, teacher: Teacher, rows: Sequence[Row]) -> Scores:
        """Score rows with one of its teachers; raise `TeacherAwayError` if a retry may succeed."""
        return teacher.score([row.prompt for row in rows], [row.response for row in rows])

    def head(self) -> HeadBytes:
        """Return the head's bytes, for the payload ``hidden``."""
        raise UsageError("this teacher has no head that can be sent", got=self.name)

    def close(self) -> None:
        """Stop what was started."""


# ---------------------------------------------------------------------------------------------------- this process


class LocalBackend(Backend):
    """A model in this process.

    Args:
        model: The teacher; its weights must not change.
        cache: Cached scores.
        packed: As in `body_of`.
    """

    payloads = ("hidden", "top_k")
    cacheable = True

    def __init__(self, model: Model, *, cache: ScoreCache | None = None, packed: bool | None = None) -> None:
        weight = model.head.weight
        self._model, self.cache, self._packed = model, cache, packed
        self.name, self.fingerprint = model.name, model.fingerprint()
        self.dtype = str(weight.dtype).removeprefix("torch.")
        if self.dtype not in wire.FLOATS:
            raise UsageError("a model of this type cannot be served", got=self.dtype, instead=", ".join(wire.FLOATS))
        self.tokenizers = frozenset({model.tokenizer_digest(), wire.vocabulary_digest(model.tokenizer.get_vocab())})
        self.vocab_size, self.rows, self.width = model.vocab_size, len(weight), weight.shape[1]
        reach = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
        self.reach = reach if isinstance(reach, int) and reach > 0 else None

    def teacher(self, spec: ScoreSpec) -> Teacher:
        """Return a teacher for a spec."""
        return LocalTeacher(self._model, spec, cache=self.cache, packed=self._packed)

    def head(self) -> HeadBytes:
        """Return the bytes of the model's head."""
        return HeadBytes(self._model)


class HeadBytes:
    """Bytes of a model's head: weight, then bias. A weight on the CPU without a bias is not copied."""

    def __init__(self, model: Model) -> None:
        head = model.head
        weight = wire.array_of(head.weight)
        self._data = memoryview(weight.data)
        if head.bias is not None:
            bias = wire.array_of(head.bias)
            if bias.dtype != weight.dtype:
                got = f"a weight of type {weight.dtype}, a bias of type {bias.dtype}"
                raise UsageError("the head of this model cannot be sent", got=got, instead="the payload top_k")
            self._data = memoryview(bytes(self._data) + bytes(bias.data))
        rows, columns = weight.shape
        self.info = wire.HeadInfo(
            sha256=hashlib.sha256(self._data).hexdigest(),
            bytes=self._data.nbytes,
            dtype=weight.dtype,  # type: ignore[arg-type]  # one of wire.FLOATS
            shape=(rows, columns),
            bias=head.bias is not None,
            scale=float(head.scale),
            softcap=None if head.softcap is None else float(head.softcap),
            parts=-(-self._data.nbytes // wire.PART_BYTES),
        )

    def part(self, number: int) -> wire.Array:
        """Return the buffer of a part."""
        data = self._data[number * wire.PART_BYTES : (number + 1) * wire.PART_BYTES]
        return wire.Array("uint8", (data.nbytes,), data)


# ---------------------------------------------------------------------------------------------------- vLLM


class VllmBackend(Backend):
    """A vLLM server: started here and restarted when it exits, or running at an address.

    Args:
        model: A folder, or a name on the Hub.
        where: The Python of an environment with vLLM; or ``vllm://HOST:PORT[/MODEL]`` of a server with that model.
        cache: Cached scores; unused with a server at an address, whose weights have no known hash.
        precision: ``fp32``, ``bf16``, or None for bf16; for a server started here.
        max_model_len: Longest prefix, prompt and response; for a server started here.
        arguments: Its extra arguments, in shell syntax.
        report: Called with a message when vLLM starts, exits, or is back.
    """

    payloads = ("top_k",)

    def __init__(
        self,
        model: str,
        where: str,
        *,
        cache: ScoreCache | None = None,
        precision: str | None = None,
        max_model_len: int = 2048,
        arguments: str = "",
        report: Callable[[str], None] | None = None,
    ) -> None:
        from gatespace.addons.vllm import check_place
        from gatespace.addons.vllm.process import VllmProcess
        from gatespace.addons.vllm.server import VllmServer
        from gatespace.addons.vllm.source import vllm_source
        from gatespace.addons.vllm.teacher import name_fingerprint

        check_place(where)
        if precision not in (None, "auto", "fp32", "bf16"):
            raise unknown_name("precision", precision, ("auto", "fp32", "bf16"))
        self._report = report or (lambda text: None)
        self._source = source = vllm_source(model, weights="://" not in where, report=report)
        self.dtype = "float32" if precision == "fp32" else "bfloat16"
        options = shlex.split(arguments)
        self._process: VllmProcess | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.name = source.name
        self.tokenizers = frozenset({wire.vocabulary_digest(source.tokenizer.get_vocab())})
        self.vocab_size, self.rows, self.width = source.vocab_size, source.rows, int(source.config.hidden_size)
        self.cacheable = "://" not in where
        self.cache = cache if self.cacheable else None
        if self.cacheable:
            self._scratch = tempfile.TemporaryDirectory(prefix="gatespace-vllm-")
            log = Path(self._scratch.name) / "vllm.log"
            self._report(f"starting vLLM with {source.name}; its log is {log}")
            try:
                self._process = VllmProcess(
                    Path(where).expanduser(),
                    source.folder,
                    log=log,
                    dtype=self.dtype,
                    max_model_len=min(max_model_len, source.reach or max_model_len),
                    max_logprobs=_MAX_LOGPROBS,
                    options=options,
                    patience=_VLLM_START,
                )
            except BaseException:
                self._scratch.cleanup()
                raise
            where = self._process.address
        self.address = where
        self._server = VllmServer(where, timeout=_VLLM_TIMEOUT, patience=_VLLM_TIMEOUT, wait=False)
        try:
            card, version = self._server.card(), self._server.version()
            # vLLM always generates one more token.
            self.reach = None if card.max_model_len is None else card.max_model_len - 1
            if self._process is None:
                self.fingerprint = name_fingerprint(card, version)
            else:
                identity = "\n".join(("gatespace vllm 2", source.fingerprint(), self.dtype, shlex.join(options)))
                self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of a vLLM server started here."""
        return None if self._process is None else self._process.pid

    def teacher(self, spec: ScoreSpec) -> Teacher:
        """Return a teacher for a spec."""
        from gatespace.addons.vllm.teacher import VllmTeacher

        with self._supervised():
            return VllmTeacher(
                self.address,
                spec,
                self._source.tokenizer,
                cache=self.cache,
                fingerprint=self.fingerprint,
                timeout=_VLLM_TIMEOUT,
                patience=_VLLM_TIMEOUT,
                wait=False,
            )

    def score(self, teacher: Teacher, rows: Sequence[Row]) -> Scores:
        """Score rows; restart a server started here that has exited."""
        with self._supervised():
            return super().score(teacher, rows)

    def close(self) -> None:
        """Stop the server if it was started here."""
        self._server.close()
        if self._process is not None:
            self._process.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    @contextmanager
    def _supervised(self) -> Iterator[None]:
        """Restart vLLM if it has exited; raise `TeacherAwayError` if it exits meanwhile, so that clients retry."""
        from gatespace.addons.vllm.server import RefusedError, ServerAwayError

        if self._process is not None and not self._process.alive:
            self._restart()
        try:
            yield
        except RefusedError as error:
            # A dead engine still replies 5xx for a while; that is no fault of the request.
            if error.status < 500 or self._is_healthy():
                raise
            raise _away(error) from error
        except (ServerAwayError, TeacherAwayError) as error:
            raise _away(error) from error

    def _restart(self) -> None:
        assert self._process is not None
        self._report("vLLM has ended; restarting it")
        try:
            self._process.restart()
        except RunError as error:
            self._report(str(error))
            raise TeacherAwayError("vLLM has ended and cannot be restarted", got=error.got) from error
        self._report("vLLM is back")

    def _is_healthy(self) -> bool:
        """Return whether the server reports healthy; kill our own process if not, so that it is restarted."""
        if self._server.healthy():
            return True
        if self._process is not None and self._process.alive:
            self._process.kill()
        return False


def _away(error: GatespaceError) -> TeacherAwayError:
    return TeacherAwayError("vLLM is away", got=error.got, instead="wait, and retry")


# ---------------------------------------------------------------------------------------------------- scoring


@dataclass(frozen=True)
class Prepared:
    """Metadata for clients about the teacher of a spec."""

    numerics: str
    position_bytes: int
    head: wire.HeadInfo | None


@dataclass
class Scored:
    """Result of a batch: fully scored requests with their reply frames, and failures."""

    replies: list[tuple[Request, list[wire.Frame]]] = field(default_factory=list)
    failures: list[tuple[Request, Exception]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    """Rows, (response) tokens, computed_tokens, passes."""
    seconds: float = 0.0


class Scorer:
    """Scores batches with a backend's teachers; keeps the `limit` most recently used."""

    def __init__(self, backend: Backend, *, limit: int) -> None:
        self.head: HeadBytes | None = None
        """Set once a client requests the payload ``hidden``."""
        self._backend, self._limit = backend, limit
        self._teachers: OrderedDict[ScoreSpec, Teacher] = OrderedDict()

    def prepare(self, spec: ScoreSpec) -> Prepared:
        """Build the teacher of a spec."""
        teacher = self._teacher(spec)
        if spec.payload == "top_k":
            return Prepared(teacher.numerics, 8 * spec.k + 8, None)
        if self.head is None:
            self.head = self._backend.head()
        return Prepared(teacher.numerics, self._backend.width * wire.WIDTHS[self._backend.dtype], self.head.info)

    def score(self, batch: Sequence[Row]) -> Scored:
        """Score rows of one spec; on failure, score each request separately."""
        result, start = Scored(), time.monotonic()
        self._try(batch, result)
        result.seconds = time.monotonic() - start
        return result

    def close(self) -> None:
        """Close all teachers."""
        for teacher in self._teachers.values():
            teacher.close()

    def _try(self, rows: Sequence[Row], result: Scored) -> None:
        try:
            self._score(rows, result)
        except Exception as error:  # a model can raise anything
            requests = list(dict.fromkeys(row.request for row in rows))
            if len(requests) == 1:
                result.failures.append((requests[0], error))
                return
            for request in requests:
                self._try([row for row in rows if row.request is request], result)

    def _score(self, rows: Sequence[Row], result: Scored) -> None:
        teacher = self._teacher(rows[0].request.session.spec)
        passes, computed = teacher.stats.passes, teacher.stats.computed_tokens
        fields = _fields(self._backend.score(teacher, rows).payload)
        passes, computed = teacher.stats.passes - passes, teacher.stats.computed_tokens - computed
        total = len(fields[0])
        start = 0
        for row in rows:
            request, stop = row.request, start + len(row.response)
            # A view would keep the whole batch in memory.
            request.scores[row.number] = tuple(values[start:stop].clone() for values in fields)
            # Share of the computation, by response tokens; shares add up exactly.
            request.passes += passes * stop // total - passes * start // total
            request.computed_tokens += computed * stop // total - computed * start // total
            start = stop
            if len(request.scores) == len(request.prompts):
                result.replies.append((request, _reply(request)))
        result.counters.update(rows=len(rows), tokens=total, computed_tokens=computed, passes=passes)

    def _teacher(self, spec: ScoreSpec) -> Teacher:
        teacher = self._teachers.get(spec)
        if teacher is None:
            while len(self._teachers) >= self._limit:
                self._teachers.popitem(last=False)[1].close()  # first, to free memory for the new one
            teacher = self._teachers[spec] = self._backend.teacher(spec)
        self._teachers.move_to_end(spec)
        return teacher


def _fields(payload: Tensor | TeacherTopK) -> tuple[Tensor, ...]:
    """Tensors of a ScoreReply, positions in dim 0."""
    if isinstance(payload, Tensor):
        return (payload[0],)
    if payload.sampled_log_probs is None:
        raise RunError("the teacher has not given the log-probabilities of the tokens themselves")
    log_probs = payload.log_probs[0]
    tail = (1 - log_probs.double().exp().sum(-1)).clamp(min=0).float()
    return payload.ids[0].int(), log_probs, payload.sampled_log_probs[0], tail


def _reply(request: Request) -> list[wire.Frame]:
    rows = [request.scores.pop(number) for number in range(len(request.prompts))]
    arrays = [wire.array_of(torch.cat(values)) for values in zip(*rows, strict=True)]
    payload: wire.Payload = "hidden" if request.session.spec.payload == "hidden" else "top_k"
    message = wire.ScoreReply(request.id, payload, len(rows), request.computed_tokens, request.passes)
    return wire.encode(message, arrays)
