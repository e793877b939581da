"""The controller's board, where ranks that form a process group find each other: the addresses gloo listens on.

It serves as torch's key-value store, in place of its TCPStore, which listens on all interfaces and asks nobody for a
key, and of files, which hosts may not share. What is on it stays for the run: some hundred bytes for each rank of a
group. Pure.
"""

from collections import Counter

from penstock.runtime.control.messages import Count, Found, Look, Question


class Board:
    """Answers questions, some of them later: `Look` waits until all of its keys are there. For how long is the asker's
    business.
    """

    def __init__(self) -> None:
        self._posted: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: list[tuple[str, Look]] = []

    def hear(self, peer: str, question: Question) -> list[tuple[str, Found]]:
        """What `peer` says; the answers to whoever they are for."""
        if isinstance(question, Look):
            self._waiting.append((peer, question))
            return self._answers()
        if isinstance(question, Count):
            self._counts[question.key] += question.amount
            # In decimal digits, as torch's own stores keep a number.
            value = self._posted[question.key] = str(self._counts[question.key]).encode().hex()
            return [(peer, Found(question.number, {question.key: value})), *self._answers()]
        self._posted[question.key] = question.value
        return self._answers()

    def _answers(self) -> list[tuple[str, Found]]:
        """The answers to those who need not wait any longer."""
        ready = [(peer, look) for peer, look in self._waiting if look.at_once or self._posted.keys() >= {*look.keys}]
        self._waiting = [one for one in self._waiting if one not in ready]
        return [
            (peer, Found(look.number, {key: self._posted[key] for key in look.keys if key in self._posted}))
            for peer, look in ready
        ]
