"""The loss of the encoder: tokens, and scores read as expected values of digit tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def two_hot(targets: Tensor, *, levels: int = 10) -> Tensor:
    """Spread each target over its two nearest levels so that the mean is the target.

    Args:
        targets: Scores in [0, 1], [N].
        levels: Number of levels; level k means k / (levels - 1).

    Returns:
        Probabilities, [N, levels], float32.
    """
    scaled = targets.float().clamp(0, 1) * (levels - 1)
    low = scaled.floor().clamp(max=levels - 2)
    weight = scaled - low
    out = torch.zeros(len(targets), levels, device=targets.device)
    index = low.long().unsqueeze(1)
    out.scatter_(1, index, (1 - weight).unsqueeze(1))
    out.scatter_(1, index + 1, weight.unsqueeze(1))
    return out


def expected_score(digit_logits: Tensor) -> Tensor:
    """Expected value in [0, 1] of the ten digit logits, [N, 10] to [N], in float32."""
    levels = torch.arange(10, device=digit_logits.device, dtype=torch.float32) / 9
    return digit_logits.float().softmax(-1) @ levels


def score_losses(digit_logits: Tensor, targets: Tensor, *, alpha: float = 0.3) -> Tensor:
    """Cross-entropy on two-hot targets plus squared error of the expectation, per position.

    Args:
        digit_logits: Logits of the ten digit tokens at score positions, [N, 10].
        targets: Scores in [0, 1], [N].
        alpha: Weight of the squared error.

    Returns:
        Losses, [N], float32.

    Reference: Lukasik et al., Better autoregressive regression with LLMs, ICLR 2025.
    """
    log_probs = digit_logits.float().log_softmax(-1)
    cross_entropy = -(two_hot(targets) * log_probs).sum(-1)
    error = (expected_score(digit_logits) - targets.float()) ** 2
    return cross_entropy + alpha * error


def encoder_loss(
    logits: Tensor,
    targets: Tensor,
    scores: Tensor,
    weights: Tensor,
    digit_ids: Tensor,
    *,
    alpha: float = 0.3,
) -> Tensor:
    """Weighted sum over target positions; divide it by the weights of the whole step.

    Digits also keep the plain cross-entropy over the vocabulary, so that free decoding writes a
    digit there at all.

    Args:
        logits: Logits at the target positions, [K, V].
        targets: Token to predict, [K].
        scores: Score in [0, 1] at score positions, -1 elsewhere, [K].
        weights: Weight of each position, [K].
        digit_ids: Token ids of 0-9, [10].
        alpha: Weight of the squared error of the expected score.

    Returns:
        Scalar, float32.
    """
    is_score = scores >= 0
    losses = logits.new_zeros(len(targets), dtype=torch.float32)
    text = ~is_score
    losses[text] = F.cross_entropy(logits[text].float(), targets[text], reduction="none")
    if is_score.any():
        at_scores = logits[is_score].float()
        digits = at_scores[:, digit_ids]
        # Mass that leaves the ten digits altogether, as a cross-entropy of its own.
        outside = at_scores.logsumexp(-1) - digits.logsumexp(-1)
        losses[is_score] = score_losses(digits, scores[is_score], alpha=alpha) + outside
    return (losses * weights.float()).sum()
