"""Changes a row of logits before temperature: penalties, then ``min_tokens``.

Both are computed from the sequence's token list, so no state passes from step to step.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.engine.core.updates import Work
from kvrelay.sampling import Sampling


def penalised(sampling: Sampling) -> bool:
    """Whether any penalty is in use."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def too_short(work: Work, sampling: Sampling) -> bool:
    """Whether an ending token is still forbidden: fewer than ``min_tokens`` were sampled."""
    return work.start + work.count - work.prompt_len < sampling.min_tokens


def penalise(row: torch.Tensor, work: Work, sampling: Sampling) -> None:
    """Change one row of float32 logits [vocab] in place.

    Repetition (the CTRL paper's, as in vLLM and `transformers`) counts prompt and output; presence
    and frequency (OpenAI's) count the output alone.
    """
    length = work.start + work.count
    if sampling.repetition_penalty != 1.0:
        seen = _indices(work, 0, length, row.device)
        picked = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        output = _indices(work, work.prompt_len, length, row.device)
        tokens, counts = torch.unique(output, return_counts=True)
        row[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def forbid_endings(row: torch.Tensor, sampling: Sampling) -> None:
    """Make the tokens that would end the request impossible, in place."""
    endings = [token for token in sampling.ending_token_ids if token < row.shape[0]]
    row[torch.tensor(endings, dtype=torch.int64, device=row.device)] = -torch.inf


def _indices(work: Work, first: int, last: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(work.tokens[first:last], np.int64)).to(device)
