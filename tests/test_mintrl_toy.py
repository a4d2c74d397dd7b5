"""T18 in miniature: a tabular policy and the public losses. One improbable token unlocks what the policy can do.

A response is an opening and L - 1 steps. Behind the key the policy gets each step right nine times of ten, but it opens
with the key in one rollout of 30,000. The verifier can write the key. It can also write on, to the end if it is let, in
one of four notations that it keeps to; the policy's steps don't look back, so it can't keep to one.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fastcollab.losses import advantage_regression, anchors, value_estimate

F64 = torch.float64
PROBLEMS, L, V = 4, 8, 6
KEY, OTHER = 0, 1  # openings: the key, the verifier's own; the rest lead nowhere
RIGHT, NOTATIONS = 0, range(2, 6)  # steps behind the key; behind the verifier's opening all must be the same of these
K, REVIEWED, INTERVENTIONS, UPDATES, RATE, BETA = 16, 8, 25, 70, 1.2, 1e-3
OPEN, ROUTE, LOST = 0, 1, 2  # where a response stands behind its opening


def start():
    """Logits [problem, place, where it stands, V]."""
    p = torch.full((PROBLEMS, L, 3, V), 1 / V, dtype=F64)
    p[:, 0] = torch.tensor([1 / 30_000, 1 / 30_000, *[0.25] * 4])
    p[:, 1:, OPEN] = torch.tensor([0.9, *[0.02] * 5], dtype=F64)
    p[:, 1:, ROUTE] = torch.tensor([0.4, 0.56, *[0.01] * 4], dtype=F64)
    return (p / p.sum(-1, keepdim=True)).log()


def stands(y):
    """[..., L] where each token is written; the opening nowhere yet."""
    way = torch.where(y[..., :1] == KEY, OPEN, torch.where(y[..., :1] == OTHER, ROUTE, LOST)).repeat_interleave(L, -1)
    way[..., 0] = OPEN
    return way


def logprob(z, y):
    """[problem, n, L] log-prob of each token of y."""
    problem, place = torch.arange(PROBLEMS)[:, None, None], torch.arange(L)
    return z.log_softmax(-1)[problem, place, stands(y), y]


def reward(y):
    steps, way = y[..., 1:], stands(y)[..., -1]
    same = (steps == steps[..., :1]).all(-1) & (steps[..., 0] >= NOTATIONS[0])
    return ((way == OPEN) & (steps == RIGHT).all(-1) | (way == ROUTE) & same).double()


def accuracy(z):
    """The probability of success, exact, mean over problems."""
    p = z.softmax(-1)
    own, route = p[:, 1:, OPEN, RIGHT].prod(1), p[:, 1:, ROUTE, NOTATIONS[0] :].prod(1).sum(-1)
    return (p[:, 0, 0, KEY] * own + p[:, 0, 0, OTHER] * route).mean().item()


def rollouts(z, external, rng):
    """y, and which tokens are the verifier's, both [problem, K, L]; it writes ``external`` tokens of the last rows."""
    y, src = torch.zeros(PROBLEMS, K, L, dtype=torch.int64), torch.zeros(PROBLEMS, K, L, dtype=torch.bool)
    if external:
        src[:, K - REVIEWED :, :external] = True
    notation = torch.randint(NOTATIONS[0], V, (PROBLEMS, K), generator=rng)
    for place in range(L):
        p = z.softmax(-1)[torch.arange(PROBLEMS)[:, None], place, stands(y)[..., place]]
        own = torch.multinomial(p.flatten(0, 1), 1, generator=rng).view(PROBLEMS, K)
        theirs = notation if place else torch.full_like(own, KEY if external == 1 else OTHER)
        y[..., place] = torch.where(src[..., place], theirs, own)
    return y, src


@cache
def train(external, kappa=None, seed=0):
    """Accuracy at the start, when interventions stop, and at the end."""
    z, rng = start(), torch.Generator().manual_seed(seed)
    ids, mask = torch.arange(PROBLEMS * K).repeat_interleave(L), torch.ones(PROBLEMS * K * L, dtype=torch.bool)
    track = [accuracy(z)]
    for update in range(UPDATES):
        intervene = external > 0 and update < INTERVENTIONS
        y, src = rollouts(z, external if intervene else 0, rng)
        r = reward(y)
        A = r - value_estimate(r[:, : K - REVIEWED] if intervene else r, 0.0)[:, None]
        lp = logprob(z.requires_grad_(), y).flatten()
        a = anchors(lp.detach(), src.flatten(), kappa)
        loss, _ = advantage_regression(lp, a, A.flatten(), mask, ids, BETA, denominator=K)
        z = z.detach() - RATE * torch.autograd.grad(loss, z)[0]
        if update + 1 in (INTERVENTIONS, UPDATES):
            track.append(accuracy(z))
    return track


VARIANTS = pytest.mark.parametrize("kappa", [None, -1.0], ids=["proxy", "const"])
SEEDS = pytest.mark.parametrize("seed", range(2))


@SEEDS
def test_t18_on_policy_nothing_is_learned(seed):
    """No success, no advantage: the control of everything below."""
    before, _, after = train(0, seed=seed)
    assert before < 2e-5 and after == pytest.approx(before, rel=1e-9)


@SEEDS
@VARIANTS
def test_t18_one_foreign_token_unlocks_it_and_it_stays(kappa, seed):
    """And once interventions have stopped the policy goes on learning, from its own successes alone."""
    before, stopped, after = train(1, kappa, seed)
    assert before < 2e-5 and stopped > 0.1 and after > max(0.85, stopped + 0.1)


@SEEDS
@VARIANTS
@pytest.mark.parametrize("external", [2, 4, L])
def test_t18_more_of_the_verifier_is_no_gain(external, kappa, seed):
    """Its solutions earn the reward, yet the policy can't go on from them, let alone write them."""
    assert train(external, kappa, seed)[-1] < 0.02


def test_t18_the_verifiers_tokens_are_worth_what_they_earn(monkeypatch):
    """Nothing is imitated: where the key opens nothing, neither it nor anything else is learned."""
    monkeypatch.setitem(globals(), "reward", lambda y: torch.zeros(y.shape[:-1], dtype=F64))
    assert train.__wrapped__(1)[-1] == pytest.approx(train(1)[0], rel=1e-9)
