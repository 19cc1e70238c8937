"""Which target a sequence goes to: by shared prefix and free KV, within balance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from orchestrator.target_client import TargetClient

# A target with many more sequences than the least loaded one gets no more of them,
# whatever prefixes it holds: KV that is there saves one prefill, a queue costs all rounds.
_MOST_RATIO, _MOST_LEAD = 1.5, 4
_MAX_REMEMBERED_BLOCKS = 100_000


class TargetRouter:
    """Chooses targets, and remembers which prefixes went where.

    What a target really holds is its own affair: a wrong guess costs a prefill.
    """

    def __init__(self) -> None:
        """Remembers nothing yet."""
        self._homes: OrderedDict[bytes, str] = OrderedDict()
        """Address that last got each block of tokens, by the block's chained hash."""
        self._turn = 0

    def choose(self, clients: Seq[TargetClient], blocks: Seq[bytes]) -> TargetClient:
        """Chooses the target of a sequence.

        Args:
            clients: Those that can take it, at least one.
            blocks: Chained hashes of the sequence's full blocks, from the first on.

        Returns:
            The target.
        """
        least = min(client.num_placed for client in clients)
        most = max(least * _MOST_RATIO, least + _MOST_LEAD)
        self._turn += 1
        turned = [clients[(i + self._turn) % len(clients)] for i in range(len(clients))]
        return max(
            (client for client in turned if client.num_placed <= most),
            key=lambda client: (
                self._num_shared(client.address, blocks),
                client.num_free_blocks,
                -client.num_placed,
            ),
        )

    def _num_shared(self, address: str, blocks: Seq[bytes]) -> int:
        """Leading blocks that this target got last."""
        for index, block in enumerate(blocks):
            if self._homes.get(block) != address:
                return index
        return len(blocks)

    def remember(self, address: str, blocks: Seq[bytes]) -> None:
        """Learns that a target has computed a prefix."""
        for block in blocks:
            self._homes[block] = address
            self._homes.move_to_end(block)
        while len(self._homes) > _MAX_REMEMBERED_BLOCKS:
            self._homes.popitem(last=False)
