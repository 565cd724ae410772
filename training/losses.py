"""The loss of the encoder: tokens, and scores read as expected values of digit tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


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


class _Normaliser(torch.autograd.Function):
    """Log of the softmax denominator, and a few logits of every row.

    Each dense gradient over a vocabulary of 150,000 costs as much as a layer on a CPU; taken
    apart by autograd the loss would make three, here it is one.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[K, V] and [K, M] to [K] and [K, M], float32."""
        normaliser = logits.float().logsumexp(-1)
        ctx.save_for_backward(logits, normaliser, ids)
        return normaliser, logits.gather(1, ids).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, at_normaliser: Tensor, at_picked: Tensor) -> tuple[Tensor, None]:
        """The softmax where the normaliser is asked for, plus what the picked logits ask for."""
        logits, normaliser, ids = ctx.saved_tensors
        grad = (logits.float() - normaliser[:, None]).exp_().mul_(at_normaliser[:, None])
        return grad.scatter_add_(1, ids, at_picked).to(logits.dtype), None


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
    ids = torch.cat([targets[:, None], digit_ids.expand(len(targets), -1)], dim=1)
    normaliser, picked = _Normaliser.apply(logits, ids)
    digits = picked[:, 1:]
    # Mass that leaves the ten digits altogether, as a cross-entropy of its own.
    outside = normaliser - digits.logsumexp(-1)
    at_scores = score_losses(digits, scores.clamp(min=0.0), alpha=alpha) + outside
    losses = torch.where(scores >= 0, at_scores, normaliser - picked[:, 0])
    return (losses * weights.float()).sum()
