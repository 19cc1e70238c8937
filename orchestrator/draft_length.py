"""How many tokens to draft in a round."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.sequence import Sequence


class DraftLength:
    """Chooses the draft length from the load and what can still be delivered.

    Under load a verify of many rows costs more than it saves, so the bound
    falls with the number of running sequences.
    """

    def __init__(self, default: int, limits: Mapping[int, int]) -> None:
        """Sets the bounds.

        Args:
            default: Tokens per round for requests that set no bound.
            limits: Most tokens per round, by the most running sequences it
                holds for; above the largest nothing is drafted.
        """
        self._default = default
        self._limits = sorted(limits.items())

    def choose(self, sequence: Sequence, num_running: int) -> int:
        """Chooses for one round.

        Args:
            sequence: Whose round it is.
            num_running: Sequences running, this one included.

        Returns:
            Tokens to draft, 0 or more.
        """
        wanted = sequence.speculation.num_speculative_tokens
        wanted = self._default if wanted is None else wanted
        limit = next((most for load, most in self._limits if num_running <= load), 0)
        return min(wanted, limit, sequence.max_useful_draft_tokens)
