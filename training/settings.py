"""Settings of `training.write_data`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """What to write, with which model, and where to."""

    out: Path
    """Folder of the data set; made if missing, continued if there."""

    num_conversations: int | None = None
    """Conversations the folder is to hold; None, with `prompts` only: one per prompt."""

    model: str = "default"
    """The target: "default", a local folder of safetensors, or a hub id."""

    max_prompt_tokens: int = 128
    """Most tokens of a user's words; prompts that are longer are dropped."""

    max_answer_tokens: int = 256
    """Most tokens of an answer, its end included; longer ones are cut."""

    batch_size: int = 32
    """Sequences decoded at once."""

    temperature: float = 1.0
    """Of prompts and sampled answers, above 0; 0 is allowed with `prompts`."""

    top_p: float = 1.0
    """Of prompts and sampled answers, in (0, 1]; 1 is off."""

    greedy_share: float = 0.5
    """Share of the answers that are greedy, in [0, 1]."""

    seed: int = 0
    """In [0, 2^64). A conversation depends on the seed and its index alone."""

    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1, ..."""

    dtype: str = "bfloat16"
    """Compute type of weights and KV: float32 or bfloat16."""

    prompts: Path | None = None
    """File of prompts to answer; None lets the model write them."""

    exclude: tuple[Path, ...] = ()
    """Files of prompts that must not be in the data set."""

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            ValueError: Naming the setting and its value.
        """
        least_temperature = "at least 0" if self.prompts else "above 0"
        is_hot = self.temperature > 0.0 or (self.temperature == 0.0 and self.prompts is not None)
        for name, is_valid, wanted in (
            (
                "num_conversations",
                self.num_conversations is None or self.num_conversations >= 1,
                "at least 1",
            ),
            ("num_conversations", self.num_conversations or self.prompts, "given"),
            ("max_prompt_tokens", self.max_prompt_tokens >= 1, "at least 1"),
            ("max_answer_tokens", self.max_answer_tokens >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("temperature", is_hot and self.temperature < float("inf"), least_temperature),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("greedy_share", 0.0 <= self.greedy_share <= 1.0, "in [0, 1]"),
            ("seed", 0 <= self.seed < 1 << 64, "in [0, 2^64)"),
            ("dtype", self.dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {wanted} (got {getattr(self, name)!r})")
