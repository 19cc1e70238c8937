"""Drafters by load: each sequence has one, and gets another when it is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from orchestrator.draft_client import DraftClient, PendingProposal
from orchestrator.pool import Pool
from orchestrator.sequence import Sequence
from specdec.v1 import draft_pb2


class DraftPool(Pool[DraftClient]):
    """The draft services.

    Attributes:
        fallbacks: Rounds that ran plain although drafts were wanted, by reason.
    """

    def __init__(
        self,
        addresses: list[str],
        make: Callable[[str, Counter[str]], DraftClient],
        *,
        refresh_interval_ms: int,
    ) -> None:
        """Connects to nothing yet.

        Args:
            addresses: HOST:PORT or dns:///NAME:PORT.
            make: Makes the client of one HOST:PORT, which counts its fallbacks there.
            refresh_interval_ms: Time between two looks at names and loads, in ms.
        """
        self.fallbacks: Counter[str] = Counter()
        super().__init__(
            addresses,
            lambda address: make(address, self.fallbacks),
            refresh_interval_ms=refresh_interval_ms,
        )
        self._homes: dict[int, DraftClient] = {}
        """The drafter of each sequence."""

    @property
    def drafters(self) -> list[str]:
        """Names that can be asked for, the default first; those of pods that were lost too."""
        infos = [client.info for client in self.clients if client.info and not client.refusal]
        return list(dict.fromkeys(name for info in infos for name in info.drafters))

    @property
    def info(self) -> draft_pb2.GetDraftInfoResponse | None:
        """What one of the draft services said about itself; None before one did."""
        return next((client.info for client in self.clients if client.info), None)

    def ask(self, sequence: Sequence, drafter: str, num_tokens: int) -> PendingProposal | None:
        """Asks for the proposal of one round; never fails.

        Args:
            sequence: Whose round it is.
            drafter: The drafter's name.
            num_tokens: Most tokens wanted, at least 1.

        Returns:
            What to wait for, or to abandon; None when the round runs plain.
        """
        home = self._homes.get(sequence.sequence_id)
        if home is None or not home.is_usable:
            usable = [client for client in self.usable() if client.offers(drafter)]
            if not usable:
                self.fallbacks["refused" if self.refusal else "gone"] += 1
                return None
            self.release(sequence)
            home = min(usable, key=lambda client: client.num_placed)
            self._homes[sequence.sequence_id] = home
        return home.ask(sequence, drafter, num_tokens)

    def release(self, sequence: Sequence) -> None:
        """Lets a sequence go at its drafter."""
        home = self._homes.pop(sequence.sequence_id, None)
        if home is not None:
            home.release(sequence)
