"""The checks of one hash tag that only the store can decide: a batch takes them along, and brings the verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimitd.cluster.bucket import Bucket
from ratelimitd.cluster.question import Question, granted, refused


class Asked:
    """Those that wait for the next batch, and those that the last one has taken, until it is answered."""

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Question]] = {}
        self._taken: dict[bytes, list[Question]] = {}

    @property
    def are_waiting(self) -> bool:
        """Whether there are any for the next batch."""
        return bool(self._waiting)

    @property
    def are_taken(self) -> bool:
        """Whether the last batch has taken any along."""
        return bool(self._taken)

    def wait(self, bucket: Bucket, question: Question) -> None:
        """Let the next batch take a check along."""
        question.ask = bucket.view.ask(question.now_us, question.cost)
        self._waiting.setdefault(bucket.name, []).append(question)

    def withdraw(self, bucket: Bucket, question: Question) -> None:
        """Do not take a check to the store, unless a batch has done so already."""
        waiting = self._waiting.get(bucket.name, [])
        if question not in waiting:
            return
        bucket.view.withdraw(question.ask)
        waiting.remove(question)
        if not waiting:
            del self._waiting[bucket.name]

    def take(self, bucket: Bucket) -> None:
        """A batch takes along what waits of a bucket."""
        if bucket.name in self._waiting:
            self._taken[bucket.name] = self._waiting.pop(bucket.name)

    def decide(self, bucket: Bucket, grants: Sequence[bool]) -> None:
        """The store has decided what the batch took along of a bucket, in order; its view has heard of the rest."""
        if grants:
            bucket.view.note_grants(grants)
        verdicts = [*zip(self._taken.pop(bucket.name, ()), grants, strict=True)]
        later = sum(question.cost for question, is_granted in verdicts if is_granted)
        for question, is_granted in verdicts:
            if is_granted:
                later -= question.cost
            _decide(bucket, question, later if is_granted else None)

    def forget_taken(self) -> None:
        """The batch will not be answered."""
        self._taken = {}


def _decide(bucket: Bucket, question: Question, later: int | None) -> None:
    """The store has refused a check (``None``), or granted it and so many tokens behind it."""
    view, now_us, cost = bucket.view, question.now_us, question.cost
    if question.answer.done():
        if later is not None and question.charged:
            view.pay(cost)
    elif later is None:
        question.tell(refused(view, now_us, cost))
    else:
        question.tell(granted(view, now_us, later))
