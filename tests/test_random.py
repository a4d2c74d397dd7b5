"""Counter-based random numbers: published vectors, exact arithmetic, and the same bits in C++ and in torch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from fastcollab import ops
from fastcollab.reference import random as rng

native = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))

VECTORS = [  # Random123's kat_vectors for philox4x32-10: counter, key, words
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_known_answers(counter, key, words):
    assert rng.philox(key, *counter) == words
    signed = key - 2**64 if key >> 63 else key  # as a key tensor holds it
    assert rng.philox(signed, *counter) == words
    tensors = rng.philox(torch.tensor(signed), *map(torch.tensor, counter))
    assert tuple(int(w) for w in tensors) == words


def test_uniform_is_exact_and_open():
    words = torch.tensor([0, 511, 512, 0x80000000, 0xFFFFFFFF])
    u = rng.uniform(words)
    assert u.dtype == torch.float32 and u.tolist() == [rng.uniform(int(w)) for w in words]
    assert u[0] == u[1] == 2.0**-24 and u[4] == 1 - 2.0**-24


def test_author_draws_are_fair_and_apart_from_tokens():
    position = torch.arange(40_000)
    u = rng.author_uniform(torch.tensor(77), position, torch.tensor(0))
    assert abs(float(u.mean()) - 0.5) < 4 * (1 / 12 / 40_000) ** 0.5
    assert abs(float((u < 0.3).float().mean()) - 0.3) < 4 * (0.21 / 40_000) ** 0.5
    assert rng.author_uniform(77, 12, 0) == float(u[12])
    tokens = rng.uniform(rng.philox(torch.tensor(77), position * 0, position, torch.tensor(0), rng.TOKEN_STREAM)[0])
    assert abs(float(torch.corrcoef(torch.stack([u, tokens]))[0, 1])) < 0.02


def test_every_coordinate_of_the_key_matters():
    base = dict(key=torch.tensor([5]), position=torch.tensor([3]), epoch=torch.tensor([0]), ids=torch.arange(64))
    noise = [rng.token_noise(**base)]
    for name, value in (("key", 6), ("key", 5 + 2**40), ("position", 4), ("epoch", 1)):
        noise.append(rng.token_noise(**{**base, name: torch.tensor([value])}))
    noise.append(rng.token_noise(**{**base, "ids": torch.arange(64, 128)}))
    for i, a in enumerate(noise):
        assert all((a != b).all() for b in noise[i + 1 :])
    assert torch.equal(noise[0][17:18], rng.token_noise(**{**base, "ids": torch.tensor([17])}))


def _exact_fma(a, b, c):
    """The fp32 number nearest to a * b + c, ties to even, by rational arithmetic."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))


def test_fma_rounds_once():
    g = np.random.default_rng(0)
    a, b = (g.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = (-a * b * (1 + g.standard_normal(3000) * 10.0 ** g.integers(-9, 2, 3000))).astype(np.float32)
    # halfway cases, where rounding twice goes wrong: a * b + c lies just beside the middle of two fp32 numbers
    a[:8], b[:8] = 1 + 2.0**-23 * np.arange(1, 9), 2.0**-24 * (1 + 2.0**-23)
    c[:8] = 1 + 2.0**-23 * np.arange(8)
    got = rng.fma(*map(torch.from_numpy, (a, b, c)))
    assert got.tolist() == [float(_exact_fma(*abc)) for abc in zip(a, b, c, strict=True)]


def test_fma_keeps_infinities_and_nan():
    inf, nan = torch.inf, torch.nan
    a, b, c = torch.tensor([[-inf, 1.0, 3.0], [1.0, 2.0, inf], [nan, 1.0, 0.0], [inf, 0.0, 0.0]]).T
    got = rng.fma(a, b, c)
    assert got[:2].tolist() == [-inf, inf] and got[2:].isnan().all()


def test_exp_and_log_are_accurate():
    x = torch.cat([torch.linspace(-87, 20, 40_001), torch.tensor([0.0])])
    exp = rng.exp32(x).double()
    assert ((exp / x.double().exp() - 1).abs() < 1.5e-7).all() and exp[-1] == 1
    assert rng.exp32(torch.tensor([-87.5, -torch.inf])).tolist() == [0, 0]
    assert rng.exp32(torch.tensor([torch.nan])).isnan().all()
    y = torch.cat([torch.logspace(-30, 30, 20_001), 1 + torch.linspace(-1e-3, 1e-3, 10_000)])
    log = y.double().log()
    assert ((rng.log32(y).double() - log).abs() <= 1.5e-7 * log.abs()).all()


def test_gumbel_noise_has_its_law():
    word = rng.philox(torch.arange(100_000), torch.tensor(0), torch.tensor(0), torch.tensor(0), 0)[1]
    g = rng.gumbel(word).double()
    assert abs(float(g.mean()) - 0.5772157) < 4 * 1.2825 / 100_000**0.5
    assert abs(float(g.var()) - torch.pi**2 / 6) < 0.05
    ends = rng.gumbel(torch.tensor([0, 0xFFFFFFFF]))
    expected = torch.tensor([rng.SMALLEST_GUMBEL, rng.LARGEST_GUMBEL])
    torch.testing.assert_close(ends, expected, rtol=0, atol=1e-5)


@native
def test_compiled_noise_has_the_same_bits():
    """Logits that cancel the reference's noise make every score exactly 0, so id 0 wins by the tie rule; were any
    compiled number larger, its id would win. Then id 0 is lowered by a hair, so another wins unless it is smaller."""
    rows, vocab = 2000, 256
    g = torch.Generator().manual_seed(1)
    key = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    position = torch.randint(0, 2**31 - 1, (rows,), generator=g).int()
    epoch = torch.randint(0, 100, (rows,), generator=g).int()
    ids = torch.arange(vocab)
    noise = rng.token_noise(key[:, None], position[:, None].long(), epoch[:, None].long(), ids)
    one = torch.ones(rows)
    law = (one, one.int() * 0, one, one * 0, key, position, epoch)
    assert (ops.sample(-noise, *law)[0] == 0).all()
    for v in range(1, 9):
        pair = torch.full((rows, vocab), -torch.inf)
        pair[:, 0] = torch.nextafter(-noise[:, 0], torch.tensor(-torch.inf)) - 1e-6
        pair[:, v] = -noise[:, v]
        assert (ops.sample(pair, *law)[0] == v).all()
