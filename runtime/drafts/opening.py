"""Who guesses in this run, by the configuration and by what the checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from conf.schema import DraftsConfig, DraftSource, Head, RunConfig
from runtime.drafts.gate import DepthGate
from runtime.drafts.heads import HeadedModel
from runtime.drafts.lookup import PromptLookup
from runtime.drafts.passes import Drafting, Source
from runtime.errors import UserError
from runtime.experts.shared import SharedReads
from runtime.experts.source import ExpertSource
from runtime.models.decoded_rows import DecodedRows

# guesses of a look-up where drafts.depth does not say; on a GPU no heads give more, for this many decoders are opened
LOOKUP_DEPTH = 4
# of a decoder beside another on a GPU, less the state that it keeps: buffers and captured graphs; an estimate
ROW_NBYTES = 16 * 2**20


def check_device(config: DraftsConfig, device: torch.device) -> None:
    """Refuse drafts where rows cannot be taken back. Raises UserError."""
    if config.enabled and device.type != "cpu":
        raise UserError(
            "drafts of this family are decoded on the CPU only so far", "leave out drafts.enabled"
        )


def check_decoders(config: RunConfig, device: torch.device, heads_on_gpu: bool) -> None:
    """Refuse what decoders beside one another do not do on a GPU. Raises UserError.

    heads_on_gpu: whether the family's draft heads are computed there.
    """
    if not config.drafts.enabled or device.type == "cpu":
        return
    if config.drafts.source is DraftSource.heads and not heads_on_gpu:
        raise UserError(
            "draft heads of this family are computed on the CPU only so far",
            "set drafts.source=lookup, or leave it out",
        )
    if config.hw.token_limit_s is not None:
        raise UserError(
            "hw.graphs=token computes one token at a time, a pass with drafts several",
            "leave out one of hw.graphs=token and drafts.enabled",
        )
    if config.hw.cpu_experts != "off" or config.deepseek.head is not Head.gpu:
        raise UserError(
            "hw.cpu_experts and deepseek.head share one token's work with the CPU, a pass with drafts has several",
            "leave out these, or drafts.enabled",
        )


def drafts_on(config: DraftsConfig, device: torch.device, heads_on_gpu: bool) -> DraftsConfig:
    """Return who guesses on a device: where heads are computed on CPUs only, a GPU's `auto` is the look-up."""
    if device.type == "cpu" or heads_on_gpu or config.source is not DraftSource.auto:
        return config
    return replace(config, source=DraftSource.lookup)


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


def open_rows(
    make: Callable[..., Any], decoder: Any, config: DraftsConfig, experts: ExpertSource
) -> DecodedRows:
    """Return decoders beside one, as many as a pass with looked-up guesses has rows.

    make: called with the graphs of `decoder` and with it.  experts: shared (`experts.shared`).
    """
    assert isinstance(experts, SharedReads), "the engine shares the source of those who draft"
    rows = [make(graphs=decoder.graphs, beside=decoder) for _ in range(most_rows(config, block=0))]
    return DecodedRows(decoder, rows, experts)


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
    is_settled = getattr(model, "is_settled", None)  # of those that compile and capture launches
    return Drafting(model, source, name.value, depth, read_nbytes, gate, is_settled=is_settled)
