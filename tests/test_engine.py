"""The engine against transformers' own generate, against itself in other company, and against bad input."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, tiny_model

import fastcollab as fc
from fastcollab.engine import native_scheduler

MIB = "4MiB"
SCHEDULERS = ["python", "native"] if native_scheduler else ["python"]
WORDS = list(range(10, VOCAB, 3))
SCHEDULES = {
    "word": fc.Word(boundaries=WORDS, max_gap=5),
    "bernoulli": fc.Bernoulli(p=0.4),
    "chunk": fc.Chunk(3),
    "alternate": fc.Alternate(),
    "call": lambda prompt, ids, author: int(len(prompt) + len(ids)) % 2,
}


def prompts(count: int, seed: int = 0, low: int = 2, high: int = 24) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, int(n)).tolist() for n in rng.integers(low, high, count)]


def plain_logprobs(model, rollout) -> np.ndarray:
    """Log-probs of the response under an untouched model's plain forward."""
    ids = torch.tensor([rollout.prompt_ids + rollout.ids])
    with torch.no_grad():
        logp = model(ids).logits[0].log_softmax(-1)
    start = len(rollout.prompt_ids)
    return logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()


def same(a, b) -> None:
    assert a.ids == b.ids and a.author.tolist() == b.author.tolist() and a.draws == b.draws and a.finish == b.finish
    np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma3_text", "gpt2", "qwen3_moe"])
def test_greedy_equals_transformers_generate(family):
    """Item 2: ids token for token at batch 1 and ragged batch 7, and the log-probs of every row."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = [2, 5, 9]
    untouched = copy.deepcopy(model)
    engine = fc.Engine({"m": model}, kv_memory=MIB, block_size=4)
    batch = prompts(7)
    greedy = fc.SamplingParams(temperature=0, max_new_tokens=24)
    got = engine.generate(batch, sampling=greedy)
    lengths = set()
    for prompt, rollout in zip(batch, got, strict=True):
        ids = torch.tensor([prompt])
        want = untouched.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert rollout.ids == want[0, len(prompt) :].tolist()
        np.testing.assert_allclose(rollout.logprob, plain_logprobs(untouched, rollout), atol=1e-5, rtol=0)
        same(engine.generate([prompt], sampling=greedy)[0], rollout)
        lengths.add(len(rollout.ids))
    assert max(lengths) == 24 and len({tuple(r.ids) for r in got}) > 1  # long enough to pass the sliding window


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_models_record_the_authors_own_logprobs(name, scheduler):
    """Each token's log-prob is its author's, at the sampling temperature, whatever the schedule."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("llama", seed=1)}
    plain = copy.deepcopy(models)
    engine = fc.Engine(models, kv_memory=MIB, block_size=4, scheduler=scheduler)
    sampling = fc.SamplingParams(temperature=0.7, max_new_tokens=20, ignore_eos=True)
    rollouts = engine.generate(prompts(5), n=3, schedule=SCHEDULES[name], sampling=sampling, seed=3)
    assert len(rollouts) == 15 and [(r.group, r.sample) for r in rollouts] == [
        (g, s) for g in range(5) for s in range(3)
    ]
    for r in rollouts:
        ids = torch.tensor([r.prompt_ids + r.ids])
        start = len(r.prompt_ids)
        for w, writer in enumerate(r.writers):
            with torch.no_grad():
                logp = (plain[writer](ids).logits[0] / 0.7).log_softmax(-1)[start - 1 : -1]
            own = logp.gather(1, ids[0, start:, None])[:, 0].numpy()
            np.testing.assert_allclose(r.logprob[r.author == w], own[r.author == w], atol=1e-5, rtol=0)
    assert {len(set(r.author.tolist())) for r in rollouts} == {2}
    assert engine.stats()["handoffs"] == sum(int((np.diff(r.author.astype(int)) != 0).sum()) for r in rollouts)
    assert all(engine.scheduler.free_blocks(m) == engine.num_blocks[m] for m in range(2))


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_weights_and_greedy_equal_solo(name):
    """Spec row 29."""
    model = tiny_model("qwen3")
    engine = fc.Engine({"senior": model, "junior": copy.deepcopy(model)}, kv_memory=MIB, block_size=4)
    greedy = fc.SamplingParams(temperature=0, max_new_tokens=30)
    solo = engine.generate(prompts(6), schedule=fc.Solo("senior"), sampling=greedy)
    team = engine.generate(prompts(6), schedule=SCHEDULES[name], sampling=greedy)
    assert [r.ids for r in team] == [r.ids for r in solo]
    assert any(0 < r.author.mean() < 1 for r in team)


def test_p_one_is_bit_equal_to_solo_and_p_zero_is_the_junior():
    """Spec row 29, on the engine's side."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}
    for p, writer in ((1.0, "senior"), (0.0, "junior")):
        solo, word = (  # an engine each: a warm prefix cache changes the rows per forward, hence the GEMM's rounding
            fc.Engine(models, kv_memory=MIB).generate(prompts(4), n=2, schedule=schedule, seed=5)
            for schedule in (fc.Solo(writer), fc.Word(boundaries=WORDS, p=p))
        )
        for a, b in zip(solo, word, strict=True):
            assert a.ids == b.ids and a.logprob.tobytes() == b.logprob.tobytes()
            assert b.mask(writer).all()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_row_does_not_depend_on_its_company(scheduler):
    """Item 5: alone, in a batch of 32, in another order, and after preemption."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("gpt2", seed=1)}
    schedule = fc.Word(boundaries=WORDS, max_gap=6)
    sampling = fc.SamplingParams(max_new_tokens=32, ignore_eos=True)
    batch = prompts(32, seed=2)

    def engine(kv_memory):
        return fc.Engine(models, kv_memory=kv_memory, block_size=4, token_budget=64, scheduler=scheduler)

    roomy, tight = engine("8MiB"), engine("100KiB")
    full = roomy.generate(batch, schedule=schedule, sampling=sampling, seed=1)
    assert roomy.stats()["preemptions"] == 0
    for i in (0, 9, 31):
        same(roomy.generate([batch[i]], schedule=schedule, sampling=sampling, seed=1)[0], full[i])
    order = np.random.default_rng(0).permutation(32)
    shuffled = roomy.generate([batch[i] for i in order], schedule=schedule, sampling=sampling, seed=1)
    for i, r in zip(order, shuffled, strict=True):
        same(r, full[i])
    for a, b in zip(tight.generate(batch, schedule=schedule, sampling=sampling, seed=1), full, strict=True):
        same(a, b)
    assert tight.stats()["preemptions"] > 10
    assert all(tight.scheduler.free_blocks(m) == tight.num_blocks[m] for m in range(2))


@pytest.mark.skipif(len(SCHEDULERS) < 2, reason="the compiled scheduler is absent")
def test_the_two_schedulers_write_the_same():
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("llama", seed=1)}
    runs = []
    for scheduler in SCHEDULERS:
        engine = fc.Engine(models, kv_memory="64KiB", block_size=4, token_budget=48, scheduler=scheduler)
        sampling = fc.SamplingParams(max_new_tokens=40)
        rollouts = engine.generate(prompts(9), n=3, schedule=SCHEDULES["word"], sampling=sampling, seed=4)
        runs.append((rollouts, engine.stats()))
    assert runs[0][1]["preemptions"] > 0
    for a, b in zip(runs[0][0], runs[1][0], strict=True):
        assert a.ids == b.ids and a.logprob.tobytes() == b.logprob.tobytes() and a.draws == b.draws
    assert all(
        runs[0][1][k] == runs[1][1][k] for k in ("tokens", "sampled", "catch_up", "cached", "preemptions", "copies")
    )


def test_draws_fall_only_on_boundaries_and_at_the_gap():
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}
    engine = fc.Engine(models, kv_memory=MIB)
    sampling = fc.SamplingParams(max_new_tokens=64, ignore_eos=True, temperature=1.5)
    rollouts = engine.generate(prompts(16), n=8, schedule=fc.Word(boundaries=WORDS[:6], max_gap=7), sampling=sampling)
    seen = set()
    for r in rollouts:
        assert r.draws[0][:2] == (0, "start")
        for before, d in zip(r.draws, r.draws[1:], strict=False):
            seen.add(d.reason)
            is_word = r.ids[d.position - 1] in WORDS[:6]
            assert d.reason == ("boundary" if is_word else "gap")
            assert is_word or d.position - before.position == 7
            assert set(r.author[before.position : d.position].tolist()) == {before.writer}  # constant between draws
        draws = {d.position for d in r.draws}
        assert all(t + 1 in draws for t, i in enumerate(r.ids[:-1]) if i in WORDS[:6])  # no boundary without a draw
    assert seen == {"boundary", "gap"}
    writers = np.array([d.writer for r in rollouts for d in r.draws])
    assert abs(writers.mean() - 0.5) < 3 * 0.5 / len(writers) ** 0.5  # share of draws, not of tokens


def test_the_users_model_is_left_as_it_was(tmp_path):
    model = tiny_model("qwen3")
    reference = copy.deepcopy(model)
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    engine = fc.Engine({"m": model}, kv_memory=MIB)
    engine.generate(prompts(3), sampling=fc.SamplingParams(max_new_tokens=4))
    keywords = dict(attention_mask=mask, do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert torch.equal(model.generate(ids, **keywords), reference.generate(ids, **keywords))
    assert torch.equal(model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits)
    assert model.config.to_dict() == reference.config.to_dict()
    type(model)(model.config)(ids)
    model.save_pretrained(tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(type(model).from_pretrained(tmp_path).parameters(), reference.parameters(), strict=True)
    )


def test_changed_weights_are_noticed():
    """The prefix cache of a model dies with its weights, and only its own."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}
    engine = fc.Engine(models, kv_memory=MIB, block_size=4)
    batch = prompts(4, low=12)
    schedule = fc.Word(boundaries=WORDS)
    engine.generate(batch, schedule=schedule, seed=1)
    engine.reset_stats()
    again = engine.generate(batch, schedule=schedule, seed=1)
    assert engine.stats()["senior"]["cached"] > 0 and engine.stats()["junior"]["cached"] > 0
    with torch.no_grad():
        for p in models["senior"].parameters():
            p.mul_(1.1)
    engine.reset_stats()
    changed = engine.generate(batch, schedule=schedule, seed=1)
    fresh = fc.Engine(models, kv_memory=MIB, block_size=4).generate(batch, schedule=schedule, seed=1)
    for a, b in zip(changed, fresh, strict=True):
        same(a, b)
    assert [r.ids for r in changed] != [r.ids for r in again]


def test_every_eos_of_every_writer_ends_a_row():
    """P8 and spec row 8."""
    models = {"senior": tiny_model("qwen3"), "junior": tiny_model("qwen3", seed=1)}
    models["senior"].generation_config.eos_token_id = [2, 20]
    models["junior"].generation_config.eos_token_id = 31
    engine = fc.Engine(models, kv_memory=MIB)
    hot = fc.SamplingParams(temperature=3.0, max_new_tokens=200 - 100)
    rollouts = engine.generate(prompts(16, high=8), n=8, schedule=fc.Word(boundaries=WORDS), sampling=hot)
    ended = [r for r in rollouts if r.finish == "eos"]
    assert {r.ids[-1] for r in ended} == {2, 20, 31}
    assert all(not {2, 20, 31} & set(r.ids[:-1]) for r in rollouts)
    assert {r.finish_author for r in ended} == {"senior", "junior"}


def test_truncated_laws_record_the_kept_mass():
    """P13: log-probs stay those of the untruncated law, the kept mass is stored beside them."""
    model = tiny_model("qwen3")
    engine = fc.Engine({"m": model}, kv_memory=MIB)
    rollouts = engine.generate(prompts(4), n=4, sampling=fc.SamplingParams(top_k=3, max_new_tokens=12))
    for r in rollouts:
        np.testing.assert_allclose(r.logprob, plain_logprobs(model, r), atol=1e-5, rtol=0)
        assert (
            len(r.kept_mass) == len(r.ids)
            and (r.kept_mass < 1).all()
            and (np.exp(r.logprob) <= r.kept_mass + 1e-6).all()
        )
    assert engine.generate(prompts(1))[0].kept_mass is None


def test_a_failed_forward_leaves_a_usable_engine():
    model = tiny_model("qwen3")
    engine = fc.Engine({"m": model}, kv_memory=MIB)
    want = engine.generate(prompts(2), seed=1)
    weight = model.lm_head.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"rollout \d/0.*'m'.*position 0"):
        engine.generate(prompts(2), seed=1)
    weight.copy_(kept)
    assert [r.ids for r in engine.generate(prompts(2), seed=1)] == [r.ids for r in want]
    assert engine.scheduler.free_blocks(0) == engine.num_blocks[0]


def test_bad_input_is_one_sentence_with_both_values():
    """Item 8."""
    model = tiny_model("qwen3")
    other = tiny_model("qwen3", vocab_size=70)
    engine = fc.Engine({"senior": model}, kv_memory=MIB)
    tight = fc.Engine({"senior": model}, kv_memory="16KiB", block_size=4)
    cases = [
        (lambda: engine.generate([[]]), r"prompt 0: got \[\], need text, messages or ids"),
        (lambda: engine.generate([[5], [6] * 128]), r"prompt 1: got '128 tokens', need < 128, the limit of 'senior'"),
        (lambda: engine.generate([[5, 4000]]), r"prompt 0: got \[4000\], need ids in 0..60"),
        (lambda: engine.generate("text"), r"prompts: got 'text', need a list of prompts"),
        (lambda: engine.generate([]), r"prompts: got \[\], need at least one"),
        (lambda: engine.generate(["text"]), r"prompt 0: got text and no tokenizer, need tokenizer="),
        (lambda: engine.generate([[5]], n=0), r"n: got 0, need >= 1"),
        (
            lambda: engine.generate([[5]], schedule=fc.Word(boundaries=[5])),
            r"writers: got \['junior'\], need names among",
        ),
        (
            lambda: engine.generate([[5]], schedule=fc.Word(writers=("senior",), p=(1.0,))),
            r"boundaries: got None and no tokenizer",
        ),
        (lambda: engine.generate([[5]], schedule=7), r"schedule: got 7, need a schedule object or a callable"),
        (lambda: engine.generate([[5]], uids=[1, 2]), r"uids: got 2, need 1"),
        (
            lambda: tight.generate([[5] * 9], sampling=fc.SamplingParams(max_new_tokens=60)),
            r"kv_memory: got '\d+ blocks', need 17 blocks of 4 tokens a model, for prompt 0 of 9 \+ 60",
        ),
        (lambda: fc.Engine({"a": model, "b": other}), r"models: got \{'a': 61, 'b': 70\}, need one vocabulary size"),
        (lambda: fc.Engine({"a": model}, kv_memory="a lot"), r"kv_memory: got 'a lot', need a positive size"),
        (lambda: fc.Engine({}), r"models: got \{\}, need a dict"),
        (lambda: fc.SamplingParams(max_new_tokens=0), r"max_new_tokens: got 0, need >= 1"),
        (lambda: fc.GRPOConfig(num_generations=1), r"num_generations: got 1, need >= 2"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert len(engine.generate([[5]])) == 1  # nothing was lost


def test_another_adapter_is_another_model():
    """The KV of one LoRA adapter is not the other's, though no weight was written."""
    peft = pytest.importorskip("peft", reason="the extra 'peft' is not installed")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), lora)
    model.add_adapter("second", lora)
    engine = fc.Engine({"m": model}, kv_memory=MIB, block_size=4)
    sampling = fc.SamplingParams(temperature=0, max_new_tokens=12)
    batch = prompts(2, low=12)
    first = engine.generate(batch, sampling=sampling)
    model.set_adapter("second")
    second = engine.generate(batch, sampling=sampling)
    fresh = fc.Engine({"m": model}, kv_memory=MIB, block_size=4).generate(batch, sampling=sampling)
    for a, b in zip(second, fresh, strict=True):
        same(a, b)
    assert [r.ids for r in first] != [r.ids for r in second]
