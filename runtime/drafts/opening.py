"""Who guesses in this run, by the configuration and by what the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conf.schema import DraftsConfig, DraftSource
from runtime.drafts.gate import DepthGate
from runtime.drafts.heads import HeadedModel
from runtime.drafts.lookup import PromptLookup
from runtime.drafts.passes import Drafting, Source
from runtime.errors import UserError

LOOKUP_DEPTH = 4  # guesses of a look-up where drafts.depth does not say


def check_device(config: DraftsConfig, device: torch.device) -> None:
    """Refuse drafts where rows cannot be taken back. Raises UserError."""
    if config.enabled and device.type != "cpu":
        raise UserError("drafts are decoded on the CPU only so far", "leave out drafts.enabled")


def has_heads(config: DraftsConfig, block: int) -> bool:
    """Return whether draft heads are used.  block: guesses that the checkpoint's heads give; 0: it has none.

    Raises UserError for heads that are not there, and for more guesses than they give.
    """
    if not config.enabled or config.source is DraftSource.lookup:
        return False
    if not block and config.source is DraftSource.heads:
        raise UserError(
            "drafts.source=heads, but this checkpoint has no draft heads",
            "set drafts.source=lookup, which needs none, or leave it out",
        )
    if block and config.depth is not None and config.depth > block:
        raise UserError(
            f"drafts.depth is {config.depth}, this checkpoint's draft heads give up to {block} tokens",
            f"set drafts.depth={block} or less, or leave it out",
        )
    return block > 0


def most_rows(config: DraftsConfig, block: int) -> int:
    """Return how many rows a pass has at most: the token drawn last and the guesses.  block: as for `has_heads`."""
    most = block if has_heads(config, block) else LOOKUP_DEPTH
    return 1 + (most if config.depth is None else config.depth)


def open_drafting(config: DraftsConfig, model: Any, read_nbytes: Callable[[], int]) -> Drafting:
    """Return what decodes with drafts on a model as its family has opened it.

    read_nbytes: running total of what was read from the drive.
    """
    source: Source
    if isinstance(model, HeadedModel):
        source, name, most = model, DraftSource.heads, model.heads.block
    else:
        lookup = PromptLookup(config.ngrams)
        source, name, most = lookup, DraftSource.lookup, LOOKUP_DEPTH
    depth = most if config.depth is None else config.depth
    gate = DepthGate(depth) if config.gate else None
    return Drafting(model, source, name.value, depth, read_nbytes, gate)
