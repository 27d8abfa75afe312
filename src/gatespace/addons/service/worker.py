"""The thread of a teacher service that has the model: it takes one job after another and leaves their results.

It shares nothing with the thread of the socket but the jobs: one at a time goes in, its result comes out, and `wake` is
called. Whatever a job raises is its result, and the thread lives on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatespace.addons.service.backend import Backend, ServedTeacher
from gatespace.addons.service.head import HeadBytes
from gatespace.addons.service.schedule import Batch, Kind, Part, Request
from gatespace.addons.service.wire import WIDTHS, Frame, HeadInfo, Payload, ScoreReply, array_of, encode
from gatespace.errors import GatespaceError, RunError
from gatespace.gating.tokens import TeacherTopK
from gatespace.teacher.scores import TeacherAwayError

_BEAT = 0.5
"""Seconds between two looks for a job."""


@dataclass(frozen=True)
class Opening:
    """A job: be ready for questions of a kind, for the client that has asked."""

    kind: Kind
    identity: bytes


@dataclass(frozen=True)
class Ready:
    """What a client is told of a kind."""

    numerics: str
    k: int
    position_bytes: int
    head: HeadInfo | None


@dataclass(frozen=True)
class Opened:
    """The result of an `Opening`."""

    job: Opening
    ready: Ready | None
    error: GatespaceError | None
    passing: bool = False
    """Whether another attempt may go well."""


@dataclass
class Scored:
    """The result of a batch: the requests that have all their rows now, as frames, and those that failed."""

    job: Batch
    replies: list[tuple[Request, list[Frame]]] = field(default_factory=list)
    failures: list[tuple[Request, GatespaceError, bool]] = field(default_factory=list)
    """With whether another attempt may go well."""
    rows: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0


class ModelThread:
    """Scores batches.

    Args:
        backend: Makes the teachers.
        teachers: How many kinds are kept ready.
        wake: Is called when a result is there. In the thread of the model.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        teachers: int,
        wake: Callable[[], None],
    ) -> None:
        self._backend = backend
        self.results: deque[Opened | Scored] = deque()
        self.idle = True
        """For the thread of the socket, which hands in a job only when the last one has come out."""
        self._limit = teachers
        self._teachers: OrderedDict[Kind, ServedTeacher] = OrderedDict()
        self._head: HeadBytes | None = None
        self._wake = wake
        self._jobs: queue.SimpleQueue[Opening | Batch | None] = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self.work, name="gatespace-teacher-model", daemon=True)

    @property
    def head(self) -> HeadBytes | None:
        """The bytes of the head, once a client has been told of it."""
        return self._head

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Opening | Batch) -> None:
        """Hand in a job."""
        self.idle = False
        self._jobs.put(job)

    def take(self) -> Opened | Scored | None:
        """The result of the job that was handed in; None: not yet."""
        if not self.results:
            return None
        self.idle = True
        return self.results.popleft()

    def end(self) -> None:
        """Have it end after the job it is at."""
        self._jobs.put(None)

    def stop(self, timeout: float) -> bool:
        """End the thread after the job it is at; False if it takes longer than `timeout` seconds."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def work(self) -> None:
        """Do jobs until `end`, in the calling thread."""
        torch.set_num_threads(self._threads)  # of this thread; OpenMP keeps the number by thread
        try:
            while (job := self._next()) is not None:
                self.results.append(self._open(job) if isinstance(job, Opening) else self._scored(job))
                self._wake()
        finally:
            for teacher in self._teachers.values():
                teacher.close()

    def _next(self) -> Opening | Batch | None:
        while True:
            try:
                return self._jobs.get(timeout=_BEAT)  # in between, the main thread sees to its signals
            except queue.Empty:
                continue

    # ------------------------------------------------------------------ jobs

    def _open(self, job: Opening) -> Opened:
        try:
            teacher = self._teacher(job.kind)
            k = min(job.kind.k, job.kind.vocab_size)
            if job.kind.payload == "top_k":
                return Opened(job, Ready(teacher.numerics, k, 8 * k + 8, None), None)
            if self._head is None:
                self._head = self._backend.head()
            head = self._head.info
            return Opened(job, Ready(teacher.numerics, k, head.shape[1] * WIDTHS[head.dtype], head), None)
        except Exception as error:  # whatever a model can raise
            return Opened(job, None, _told(error), _passing(error))

    def _scored(self, job: Batch) -> Scored:
        result = Scored(job)
        start = time.monotonic()
        try:
            self._score(job.kind, job.parts, result)
        except Exception as error:
            requests = list({id(part.request): part.request for part in job.parts}.values())
            if len(requests) == 1:
                result.failures.append((requests[0], _told(error), _passing(error)))
            else:
                # Whoever's rows they are that failed, the others have their scores.
                for request in requests:
                    mine = [part for part in job.parts if part.request is request]
                    try:
                        self._score(job.kind, mine, result)
                    except Exception as its_own:
                        result.failures.append((request, _told(its_own), _passing(its_own)))
        result.seconds = time.monotonic() - start
        return result

    def _score(self, kind: Kind, parts: tuple[Part, ...] | list[Part], result: Scored) -> None:
        teacher = self._teacher(kind)
        prompts = [row for part in parts for row in part.request.prompts[part.start : part.stop]]
        responses = [row for part in parts for row in part.request.responses[part.start : part.stop]]
        passes, computed = teacher.stats.passes, teacher.stats.computed_tokens
        payload = teacher.score(prompts, responses).payload
        passes, computed = teacher.stats.passes - passes, teacher.stats.computed_tokens - computed
        sizes = [sum(map(len, part.request.responses[part.start : part.stop])) for part in parts]
        pieces = zip(*(values.split(sizes) for values in _fields(payload)), strict=True)
        before = 0
        for part, size, piece in zip(parts, sizes, pieces, strict=True):
            request = part.request
            # A part of a larger tensor would keep the whole of it.
            request.pieces.append(piece if len(parts) == 1 else tuple(values.clone() for values in piece))
            request.scored += part.stop - part.start
            # What was done is divided by tokens, and adds up.
            after = before + size
            request.passes += passes * after // sum(sizes) - passes * before // sum(sizes)
            request.computed_tokens += computed * after // sum(sizes) - computed * before // sum(sizes)
            before = after
            if request.scored == len(request.prompts):
                result.replies.append((request, _reply(request, kind)))
        result.rows += len(prompts)
        result.tokens += sum(sizes)
        result.passes += passes
        result.computed_tokens += computed

    def _teacher(self, kind: Kind) -> ServedTeacher:
        teacher = self._teachers.get(kind)
        if teacher is None:
            while len(self._teachers) >= self._limit:
                # Before, not after: two prefixes need more room than one.
                self._teachers.popitem(last=False)[1].close()
            teacher = self._teachers[kind] = self._backend.teacher(kind)
        self._teachers.move_to_end(kind)
        return teacher


def _fields(payload: Tensor | TeacherTopK) -> tuple[Tensor, ...]:
    """The tensors of scores, as they travel; positions first."""
    if isinstance(payload, Tensor):
        return (payload[0],)
    if payload.sampled_log_probs is None:
        raise RunError("the teacher has not said how probable the tokens themselves are")
    log_probs = payload.log_probs[0]
    tail = (1 - log_probs.double().exp().sum(-1)).clamp(min=0).float()
    return payload.ids[0].int(), log_probs, payload.sampled_log_probs[0], tail


def _reply(request: Request, kind: Kind) -> list[Frame]:
    arrays = [array_of(torch.cat(values)) for values in zip(*request.pieces, strict=True)]
    request.pieces.clear()
    payload: Payload = "hidden" if kind.payload == "hidden" else "top_k"
    message = ScoreReply(request.id, payload, len(request.prompts), request.computed_tokens, request.passes)
    return encode(message, arrays)


def _told(error: Exception) -> GatespaceError:
    if isinstance(error, GatespaceError):
        return error
    text = str(error).strip().splitlines()
    return RunError("the teacher has failed", got=f"{type(error).__name__}: {text[0][:300] if text else ''}")


def _passing(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError, TeacherAwayError))
