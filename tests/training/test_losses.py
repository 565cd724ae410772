import torch
from torch.nn import functional as F

from training.losses import encoder_loss, expected_score, score_losses, two_hot


def test_two_hot_has_the_target_as_its_mean():
    targets = torch.linspace(0, 1, 31)
    probs = two_hot(targets)
    assert torch.allclose(probs.sum(-1), torch.ones(31))
    assert torch.allclose(probs @ (torch.arange(10) / 9), targets, atol=1e-6)
    assert ((probs > 1e-6).sum(-1) <= 2).all()


def test_expected_score_of_a_sure_digit_is_its_level():
    logits = torch.full((10, 10), -40.0)
    logits.fill_diagonal_(40.0)
    assert torch.allclose(expected_score(logits), torch.arange(10) / 9)


def test_score_loss_is_smallest_at_the_target_and_grows_with_distance():
    logits = torch.full((10, 10), 0.0)
    logits.fill_diagonal_(12.0)
    losses = score_losses(logits, torch.full((10,), 3 / 9))
    assert losses.argmin() == 3
    assert losses[9] > losses[4]


def test_a_full_level_target_costs_exactly_the_token_cross_entropy():
    torch.manual_seed(0)
    logits, digit_ids = torch.randn(4, 50), torch.arange(20, 30)
    targets = torch.tensor([20, 23, 29, 5])
    scores = torch.tensor([0.0, 3 / 9, 1.0, -1.0])
    loss = encoder_loss(logits, targets, scores, torch.ones(4), digit_ids, alpha=0.0)
    assert torch.allclose(loss, F.cross_entropy(logits, targets, reduction="sum"), atol=1e-5)


def test_weights_scale_their_position_only():
    torch.manual_seed(0)
    logits, digit_ids = torch.randn(2, 50), torch.arange(10)
    targets, scores = torch.tensor([40, 3]), torch.tensor([-1.0, 3 / 9])

    def loss(*weights):
        return encoder_loss(logits, targets, scores, torch.tensor(weights), digit_ids)

    assert torch.allclose(loss(2.0, 3.0), 2 * loss(1.0, 0.0) + 3 * loss(0.0, 1.0))


def test_the_gradient_is_that_of_the_plain_formula():
    torch.manual_seed(0)
    logits = torch.randn(5, 30, dtype=torch.float64, requires_grad=True)
    digit_ids, targets = torch.arange(10), torch.tensor([4, 20, 0, 29, 9])
    scores, weights = torch.tensor([0.4, -1, 0.0, -1, 0.95]), torch.tensor([1.0, 2, 0.5, 0, 3])

    def plain() -> torch.Tensor:
        total = logits.new_zeros(())
        for row, target, score, weight in zip(logits, targets, scores, weights, strict=True):
            loss = F.cross_entropy(row, target)
            if score >= 0:
                own = row[digit_ids]
                wanted = two_hot(score[None])[0].double()
                loss = -(wanted * (own - row.logsumexp(-1))).sum()
                error = own.softmax(-1) @ (torch.arange(10) / 9).double() - score
                loss = loss + 0.3 * error**2
            total = total + weight * loss
        return total

    ours = encoder_loss(logits, targets, scores, weights, digit_ids, alpha=0.3)
    (got,) = torch.autograd.grad(ours, logits)
    (want,) = torch.autograd.grad(plain(), logits)
    assert torch.allclose(ours.double(), plain(), atol=1e-5)
    assert torch.allclose(got, want, atol=1e-6)
