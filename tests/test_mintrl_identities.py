"""MInTRL's identities (spec section 7) by exact enumeration: a tabular policy over 3 tokens, 3 steps, 27 sequences.

All in fp64 and through the public losses. A test's name begins with its number in the spec.
"""

from __future__ import annotations

import pytest
import torch
from loss_cases import IMPLS, on

from fastcollab.losses import advantage_regression, anchors, effective_advantage, value_estimate

F64 = torch.float64
V, T = 3, 3
Y = torch.cartesian_prod(*[torch.arange(V)] * T)  # [27, 3] every sequence
CONTEXT = torch.stack([torch.zeros(27, dtype=torch.int64), 1 + Y[:, 0], 4 + 3 * Y[:, 0] + Y[:, 1]], 1)  # of 13
BETA, KAPPA = 0.3, -0.7
GRID = 64  # the sampler's probabilities are multiples of 1 / GRID: "rollouts" that hold each sequence that often


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=generator(seed))


def logprobs(z):
    """[27, 3] log-prob of each token under the logits z [13, 3] of its context."""
    return z.log_softmax(-1)[CONTEXT, Y]


def joint(z):
    return logprobs(z).sum(1).exp()


def grid_policy(seed=0):
    """Logits of a policy whose probabilities are 1/2, 1/4, 1/4 in some order in every context."""
    order = torch.rand(13, V, generator=generator(seed)).argsort(1)
    return torch.tensor([0.5, 0.25, 0.25], dtype=F64)[order].log()


def random_law(seed):
    return normal(27, seed=seed).softmax(0)


def rewards(seed=0):
    return (torch.rand(27, generator=generator(seed)) < 0.3).double()


def value(z_t, r, soft):
    """The baseline over GRID rollouts, each sequence as often as the policy writes it."""
    counts = (GRID * joint(z_t)).round().long()
    assert counts.sum() == GRID
    return value_estimate(r.repeat_interleave(counts), BETA if soft else 0.0)


def regression(lp, anchor, A, law, beta=BETA):
    """Expectation of the loss over sequences drawn from ``law`` [N]; lp and anchor [N, 3], A [N].

    The loss knows plain sums alone: e is linear in all three, so their factor sqrt(law) weighs e^2 by law.
    """
    n, w = len(law), law.sqrt()
    mask, ids = torch.ones(n * T, dtype=torch.bool), torch.arange(n).repeat_interleave(T)
    args = (lp * w[:, None]).flatten(), (anchor * w[:, None]).flatten(), A * w, mask, ids, beta
    return advantage_regression(*args, denominator=1)[0]


def grad(f, z):
    z = z.detach().requires_grad_()
    return torch.autograd.grad(f(z), z)[0]


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def foreign(seed=0):
    """[27, 3] which tokens the verifier wrote."""
    return torch.rand(27, T, generator=generator(seed)) < 0.4


def minimise(z_t, A, mu):
    """The sequences' law that minimises the loss, by L-BFGS over the policy's logits."""
    z = z_t.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([z], max_iter=400, history_size=30, tolerance_grad=1e-13, tolerance_change=0,
                                  line_search_fn="strong_wolfe")  # fmt: skip

    def closure():
        optimizer.zero_grad()
        loss = regression(logprobs(z), logprobs(z_t), A, mu)
        loss.backward()
        return loss

    optimizer.step(closure)
    return joint(z.detach())


# T1


@pytest.mark.parametrize("kappa", [None, KAPPA], ids=["proxy", "const"])
@pytest.mark.parametrize("seed", range(4))
@IMPLS
def test_t1_gradient_at_the_logits(impl, dtype, tolerance, seed, kappa):
    """(2 beta / (B temperature)) e m (1[v = y] - pi), with random masks, authors and anchors."""
    N, W, B, temperature = 40, 5, 6, 0.7
    ids = torch.randint(0, B, (N,), generator=generator(seed)).sort().values
    y = torch.randint(0, W, (N,), generator=generator(seed + 10))
    mask, src = (torch.rand(N, generator=generator(seed + s)) < p for s, p in ((20, 0.8), (30, 0.3)))
    z, z_t, A = normal(N, W, seed=seed), normal(N, W, seed=seed + 40), normal(B, seed=seed + 50)

    def pick(z):
        return (z / temperature).log_softmax(-1).gather(1, y[:, None])[:, 0]

    a = anchors(pick(z_t), src, kappa)

    def L(z):
        args = (x.to(dtype) for x in (pick(z), a, A))
        return 2 * BETA * on(impl, advantage_regression)(*args, mask, ids, BETA)[0].double()

    want, segments = torch.zeros_like(z), sum(bool(mask[ids == s].any()) for s in range(B))
    for s in range(B):
        own = [k for k in range(N) if ids[k] == s and mask[k]]
        fit = sum(float(pick(z)[k]) - (kappa if src[k] and kappa is not None else float(pick(z_t)[k])) for k in own)
        for k in own:
            chosen = torch.nn.functional.one_hot(y[k], W) - (z[k] / temperature).softmax(-1)
            want[k] = 2 * BETA / (segments * temperature) * (BETA * fit - A[s]) * chosen
    close(grad(L, z), want, tolerance)
    if dtype is F64:
        for at in torch.randint(0, N * W, (25,), generator=generator(seed)).tolist():
            h = torch.zeros_like(z)
            h.view(-1)[at] = 1e-5
            assert (L(z + h) - L(z - h)).item() / 2e-5 == pytest.approx(want.view(-1)[at].item(), abs=1e-6)


# T2 .. T4: what the gradient is


def test_t2_on_policy_the_first_step_is_the_policy_gradient():
    """7.1: grad L = -2 beta grad J, hence grad of the scaled loss = -grad J, for any baseline without y."""
    z, r = normal(13, V), rewards()
    pi, J = joint(z), grad(lambda z: (joint(z) * r).sum(), z)
    assert J.abs().max() > 0.01
    for baseline in (0.0, float((pi * r).sum()), -3.0):
        g = grad(lambda z, b=baseline: regression(logprobs(z), anchors(logprobs(z), foreign()), r - b, pi), z)
        close(g, -J, 1e-14)


@pytest.mark.parametrize("kappa", [None, KAPPA], ids=["proxy", "const"])
def test_t3_the_first_step_under_any_sampling(kappa):
    """7.2: minus the gradient is E_mu[A_eff grad log pi], with A_eff = A + beta sum_I (kappa - l_t)."""
    z, mu, src, A = normal(13, V), random_law(1), foreign(), rewards() - 0.3
    old = logprobs(z).detach()
    a = anchors(old, src, kappa)
    bonus = torch.where(src, (old if kappa is None else kappa) - old, 0).sum(1)
    mask, ids = torch.ones(27 * T, dtype=torch.bool), torch.arange(27).repeat_interleave(T)
    effective = effective_advantage(a.flatten(), old.flatten(), A, mask, ids, BETA)
    close(effective, A + BETA * bonus, 1e-14)
    assert ((effective - A).abs().max() > 0.1) == (kappa is not None)
    want = grad(lambda z: (mu * effective * logprobs(z).sum(1)).sum(), z)
    close(-grad(lambda z: regression(logprobs(z), a, A, mu), z), want, 1e-14)


@pytest.mark.parametrize("kappa", [None, KAPPA], ids=["proxy", "const"])
def test_t4_away_from_the_sampler(kappa):
    """7.3: minus the gradient is E_mu[A grad Lambda - (beta / 2) grad Lambda^2]: what takes the place of clipping."""
    z, z_t, mu, A = normal(13, V), normal(13, V, seed=1), random_law(2), rewards() - 0.3
    a = anchors(logprobs(z_t), foreign(), kappa)

    def objective(z):
        fit = (logprobs(z) - a).sum(1)
        return (mu * (A * fit - BETA / 2 * fit**2)).sum()

    close(-grad(lambda z: regression(logprobs(z), a, A, mu), z), grad(objective, z), 1e-13)


# T5 .. T7: where it leads


def test_t5_with_the_soft_value_the_optimum_is_reached_whatever_the_sampling():
    """7.4a: residual 0 at pi_t e^(r / beta), the one minimiser for every mu with full support."""
    z_t, r = grid_policy(), rewards()
    A = r - value(z_t, r, soft=True)
    best = joint(z_t) * (A / BETA).exp()
    assert best.sum().item() == pytest.approx(1, abs=1e-14)
    tree = best.view(V, V, V)
    z = torch.cat([tree.sum((1, 2))[None], tree.sum(2), tree.view(9, V)]).log()  # marginals of each context's tokens
    close(joint(z), best, 1e-14)
    for seed in (1, 2):
        mu = random_law(seed)
        assert regression(logprobs(z), logprobs(z_t), A, mu) < 1e-28
        close(minimise(z_t, A, mu), best, 1e-10)
    off = r - value(z_t, r, soft=False)
    assert regression(logprobs(z), logprobs(z_t), off, random_law(1)) > 0.01


def lambert_w(x):
    """The principal branch on x >= 0, by Newton's method."""
    w = x.log1p()
    for _ in range(60):
        w = w - (w - x * (-w).exp()) / (1 + w)
    return w


def test_t6_with_the_mean_the_optimum_is_lamberts():
    """7.4b: rho = W(c w e^(A / beta)) / (c w), w = pi_t / mu, c by E rho = 1; it depends on mu."""
    z_t, r = grid_policy(), rewards()
    pi, A = joint(z_t), r - value(z_t, r, soft=False)
    assert (pi * (A / BETA).exp()).sum() > 1.01  # Jensen: the target has no norm 1
    found = []
    for mu in (pi, random_law(1), random_law(2)):
        w, low, high = pi / mu, 1e-9, 1e3
        for _ in range(200):
            c = (low + high) / 2
            rho = lambert_w(c * w * (A / BETA).exp()) / (c * w)
            low, high = (c, high) if (pi * rho).sum() > 1 else (low, c)
        assert (rho.log() + c * w * rho - A / BETA).abs().max() < 1e-12
        close(minimise(z_t, A, mu), pi * rho, 4e-9)
        found.append(pi * rho)
    assert (found[0] - found[1]).abs().max() > 1e-3 and (found[1] - found[2]).abs().max() > 1e-3


def test_t7_gauss_newton_is_the_natural_gradient():
    """7.5: on-policy at pi_t one Gauss-Newton step is (1 / beta) F^+ grad J, F the Fisher matrix."""
    z, r = normal(13, V), rewards()
    pi, old = joint(z), logprobs(z)

    def loss(flat, A):
        return regression(logprobs(flat.view(13, V)), old, A, pi)

    hessian = torch.autograd.functional.hessian(lambda x: loss(x, torch.zeros(27, dtype=F64)), z.flatten())  # e = 0
    step = -torch.linalg.pinv(hessian, rtol=1e-10) @ grad(lambda z: loss(z.flatten(), r - 0.2), z).flatten()
    scores = torch.autograd.functional.jacobian(lambda z: logprobs(z).sum(1), z).view(27, -1)
    fisher, J = scores.T @ (pi[:, None] * scores), grad(lambda z: (joint(z) * r).sum(), z).flatten()
    close(hessian, BETA * fisher, 1e-14)
    close(step, torch.linalg.pinv(fisher, rtol=1e-10) @ J / BETA, 1e-12)


# T8


def test_t8_controls_inside_their_own_mean():
    """7.6 with K = 2: the plain mean shrinks the controls' gradient by 1 - 1/K, leave-one-out and reviewed rollouts'
    advantages don't."""
    z, r = normal(13, V), rewards()
    pi, J = joint(z), grad(lambda z: (joint(z) * r).sum(), z)

    def mean_gradient(rows, A, law):
        """rows [N, n] sequences of one draw, A [N, n], law [N] -> minus the gradient of the mean over the n."""
        n, old = rows.shape[1], logprobs(z)[rows.flatten()]
        law = law.repeat_interleave(n) / n
        return -grad(lambda z: regression(logprobs(z)[rows.flatten()], old, A.flatten(), law), z)

    pairs = torch.cartesian_prod(torch.arange(27), torch.arange(27))
    law, mean = pi[pairs].prod(1), value_estimate(r[pairs], 0.0)
    close(mean_gradient(pairs, r[pairs] - mean[:, None], law), J / 2, 1e-14)
    others = [value_estimate(r[pairs], 0.0, torch.tensor([i != 0, i != 1])) for i in range(2)]
    close(mean_gradient(pairs, r[pairs] - torch.stack(others, 1), law), J, 1e-14)
    reviewed = torch.arange(27).repeat_interleave(len(pairs))  # a third draw: the mean of two controls knows nothing
    A = (r[reviewed] - mean.repeat(27))[:, None]
    close(mean_gradient(reviewed[:, None], A, pi[reviewed] * law.repeat(27)), J, 1e-14)


# T9, T11 .. T13: how it is computed


def ragged(dtype=F64, seed=0, lengths=(4, 1, 7, 3)):
    """lp, anchor (with foreign tokens), A, mask, ids of packed rows."""
    n, ids = sum(lengths), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    lp, old, A = (normal(k, seed=seed + s) for k, s in ((n, 0), (n, 1), (len(lengths), 2)))
    src = torch.rand(n, generator=generator(seed)) < 0.3
    a = anchors(-old.abs(), src, KAPPA)
    return (-lp.abs()).to(dtype), a.to(dtype), A.to(dtype), torch.rand(n, generator=generator(seed + 3)) < 0.8, ids


@pytest.mark.parametrize("seed", range(3))
def test_t9_two_passes_and_split_sequences_are_the_direct_gradient(seed):
    """Pass 1 sums Lambda without a graph, over the parts of a sequence; pass 2 backs e_i / B through its tokens."""
    lp, a, A, mask, ids = ragged(seed=seed)
    direct = grad(lambda lp: advantage_regression(lp, a, A, mask, ids, BETA)[0], lp)
    fit = torch.zeros(len(A), dtype=F64)
    parts = [torch.arange(len(lp)) % 2 == 0, torch.arange(len(lp)) % 2 == 1]
    for part in parts:  # beta Lambda of the part: what the advantage 0 would have to be raised by
        fit -= effective_advantage(a, lp, torch.zeros_like(A), mask & part, ids, BETA)
    B = len(ids[mask].unique())
    e = (fit - A) / B
    two_pass = sum(grad(lambda lp, p=part: (e[ids] * lp)[mask & p].sum(), lp) for part in parts)
    close(two_pass, direct, 1e-14)
    assert e.abs().min() > 1e-3
    alone = sum(
        grad(lambda lp, s=s: advantage_regression(lp, a, A, mask & (ids == s), ids, BETA, denominator=B)[0], lp)
        for s in range(len(A))
    )
    close(alone, direct, 1e-14)


@IMPLS
def test_t9_padded_rows_are_packed_rows_bit_for_bit(impl, dtype, tolerance):
    """6.24: what stands in the padding changes neither the loss nor a gradient by one bit."""
    lp, a, A, mask, ids = ragged(dtype)
    width = int(ids.bincount().max()) + 2
    at = ids * width + torch.cat([torch.arange(int(n)) for n in ids.bincount()])
    results = []
    for junk in (float("nan"), -1e30, 0.0):
        rows = [torch.full((len(A) * width,), junk, dtype=dtype).index_copy(0, at, x) for x in (lp, a)]
        kept = torch.zeros(len(A) * width, dtype=torch.bool).index_copy(0, at, mask)
        padded = rows[0].requires_grad_()
        loss, _ = on(impl, advantage_regression)(padded, rows[1], A, kept,
                                                 torch.arange(len(A)).repeat_interleave(width), BETA)  # fmt: skip
        g = torch.autograd.grad(loss, padded)[0]
        assert (g[~kept] == 0).all()
        results.append((loss.detach(), g[at]))
    packed = lp.requires_grad_()
    loss, _ = on(impl, advantage_regression)(packed, a, A, mask, ids, BETA)
    for got in results:
        assert torch.equal(got[0], loss.detach()) and torch.equal(got[1], torch.autograd.grad(
            loss, packed, retain_graph=True)[0])  # fmt: skip


def test_t11_what_beta_does_to_the_first_step():
    """Proxy: nothing. Const: the gradient is affine in beta. Away from the sampler beta counts for Proxy too."""
    z, mu, A, src = normal(13, V), random_law(1), rewards() - 0.3, foreign()
    betas = (1e-3, 0.1, 2.0)

    def gradients(z, kappa):
        a = anchors(logprobs(z_t), src, kappa)
        return [grad(lambda z, b=b: regression(logprobs(z), a, A, mu, b), z) for b in betas]

    z_t = z
    for g in gradients(z, None):
        close(g, gradients(z, None)[0], 1e-14)
    low, middle, high = gradients(z, KAPPA)
    part = (betas[1] - betas[0]) / (betas[2] - betas[0])
    close(middle, low + part * (high - low), 1e-14)
    assert (high - low).abs().max() > 0.1
    z_t = normal(13, V, seed=5)
    assert (gradients(z, None)[2] - gradients(z, None)[0]).abs().max() > 0.1


@IMPLS
def test_t12_without_foreign_tokens_const_is_proxy_bit_for_bit(impl, dtype, tolerance):
    lp, old, A, mask, ids = ragged(dtype)

    def both(src):
        found = []
        for kappa in (None, KAPPA):
            x = lp.clone().requires_grad_()
            loss, _ = on(impl, advantage_regression)(x, anchors(old, src, kappa), A, mask, ids, BETA)
            found.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
        return found

    proxy, const = both(torch.zeros(len(lp), dtype=torch.bool))
    assert torch.equal(proxy[0], const[0]) and torch.equal(proxy[1], const[1])
    one = torch.arange(len(lp)) == int(mask.nonzero()[0])
    proxy, const = both(one)
    assert not torch.equal(proxy[0], const[0])


@pytest.mark.parametrize("kappa", [None, KAPPA], ids=["proxy", "const"])
@IMPLS
def test_t13_only_what_stands_in_the_response_counts(impl, dtype, tolerance, kappa):
    """A stream with prompt, discarded suffix and verdict in it: they may hold anything, what stands may not."""
    kinds = "PPSSSDDDJJIISSPPPSSDJISS"  # prompt, student, discarded, judge, intervention: two rollouts
    ids = torch.tensor([0] * 14 + [1] * 10)
    lp, old = (-normal(len(kinds), seed=s).abs().to(dtype) for s in (0, 1))
    mask, src = (torch.tensor([k in wanted for k in kinds]) for wanted in ("SI", "I"))
    A = torch.tensor([0.75, -0.25], dtype=dtype)

    def L(lp, old):
        x = lp.clone().requires_grad_()
        loss, _ = on(impl, advantage_regression)(x, anchors(old, src, kappa), A, mask, ids, BETA)
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    loss, g = L(lp, old)
    assert (g[~mask] == 0).all() and (g[mask] != 0).all()
    for other in (float("nan"), -float("inf"), -5.0):
        changed = L(torch.where(mask, lp, other), torch.where(mask, old, other))
        assert torch.equal(changed[0], loss) and torch.equal(changed[1], g)
    for k in (kinds.index("I"), kinds.index("S")):
        there = torch.arange(len(kinds)) == k
        assert L(torch.where(there, lp - 1, lp), old)[0] != loss
        moved = L(lp, torch.where(there, old - 1, old))[0]
        assert (moved == loss) == (kinds[k] == "I" and kappa is not None)  # Const does not ask what the policy thought
