"""Models driven through one attention function equal the untouched model, and leave it untouched."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from tiny_models import EXTRA, FAMILIES, IDS, VOCAB, Pages, one_thread, plain, tiny_config, tiny_model  # noqa: F401
from transformers import AutoModelForCausalLM

from fastcollab import ops
from fastcollab.attention import NAME, PagedContext, UnsupportedModelError, using
from fastcollab.model import LayerSpec, Model
from fastcollab.pools import Pools
from fastcollab.reference.packed import Segments

ALL = [*FAMILIES, *EXTRA]
i32 = dict(dtype=torch.int32)


# Generation


@pytest.mark.parametrize("family", ALL)
def test_paged_chunks_equal_the_plain_forward(family):
    module = tiny_model(family)
    untouched = copy.deepcopy(module)
    pages = Pages(Model(family, module), rows=3)
    rows = [IDS[:21], IDS[30:42], IDS[50:80]]
    got: list[list[torch.Tensor]] = [[], [], []]
    plan = [{0: 6}, {1: 5, 2: 17}, {0: 1, 1: 1, 2: 1}, {2: 9, 0: 10}, *[{0: 1, 1: 1, 2: 1}] * 3, {0: 1, 1: 3}]
    done = [0, 0, 0]
    for step in plan:
        for r, logprob in zip(
            step, pages.feed({r: rows[r][done[r] : done[r] + n] for r, n in step.items()}), strict=True
        ):
            got[r].append(logprob)
            done[r] += step[r]
    assert done == [21, 12, 30]
    for ids, logprob in zip(rows, got, strict=True):
        torch.testing.assert_close(torch.cat(logprob), plain(untouched, ids), rtol=0, atol=1e-5)


def test_rollback_in_sliding_and_full_layers_equals_a_fresh_prefill():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = Model("m", tiny_model("gemma3_text", sliding_window=4, layer_types=types))
    assert [layer.window for layer in model.layers] == [4, 0, 4]
    pages = Pages(model, rows=1)
    pages.feed({0: IDS[:10]})
    pages.kv_len[0] = 7
    after = pages.feed({0: IDS[40:45]})[0]
    fresh = Pages(model, rows=1).feed({0: torch.cat([IDS[:7], IDS[40:45]])})[0]
    torch.testing.assert_close(after, fresh[7:], rtol=0, atol=1e-5)


CASES = Path(__file__).with_name("cases.json")


@pytest.mark.skipif(not CASES.exists(), reason="tests/cases.json is absent")
def test_case_c34_rollback_in_a_sliding_window_layer():
    case = next(c for c in json.loads(CASES.read_text()) if c["id"] == "C34")
    given, expected = case["input"], case["expected"]
    pools = Pools([LayerSpec(1, 1, 1, 0)], 4, 4, torch.float32)

    def attend(first: int, last: int, window: int) -> float:
        p = torch.arange(first, last, dtype=torch.float32).view(-1, 1, 1)
        slots = torch.arange(first, last, **i32)
        table, indptr = torch.arange(4, **i32)[None], torch.tensor([0, last - first], **i32)
        out = ops.paged_attention(
            torch.ones_like(p),
            p / 10,
            p**2,
            pools.k[0],
            pools.v[0],
            slots,
            table,
            indptr,
            torch.tensor([last], **i32),
            1.0,
            window,
            0.0,
            None,
        )
        return out[-1].item()

    for window, name in ((given["window"], "output"), (0, "full_attention_layer_output")):
        attend(0, given["tokens"], window)
        assert given["next_position"] == given["rollback_to"]
        got = attend(given["rollback_to"], given["next_position"] + 1, window)
        assert got == pytest.approx(expected[name], abs=case["tolerance"], rel=1e-5)


def test_decode_returns_only_the_asked_rows_and_then_trains():
    model = Model("m", tiny_model("qwen3"))
    pages = Pages(model, rows=1)
    context = PagedContext(
        pages.pools,
        torch.arange(5, **i32),
        torch.arange(2, **i32)[None],
        torch.tensor([0, 5], **i32),
        torch.tensor([5], **i32),
    )
    logits = model.decode(IDS[:5], torch.arange(5), context, torch.tensor([4, 1]))
    torch.testing.assert_close(logits.log_softmax(-1), plain(model.module, IDS[:5])[[4, 1]], rtol=0, atol=1e-5)
    assert model.decode(IDS[:5], torch.arange(5), context, torch.tensor([], dtype=torch.int64)).shape == (0, VOCAB)
    model.hidden(IDS[:5], torch.arange(5), Segments(torch.tensor([0]), torch.tensor([5]))).sum().backward()
    assert all(p.grad is not None for n, p in model.module.named_parameters() if "lm_head" not in n)


# Training


def logprobs(model: Model, batch: list[torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    weight, bias, softcap = model.head()
    z = torch.nn.functional.linear(h, weight, bias)
    return (softcap * torch.tanh(z / softcap) if softcap else z).log_softmax(-1)


MODES = {"plain": None, "checkpoint": False, "reentrant": True}  # use_reentrant


@pytest.mark.parametrize(
    "family, mode",
    [
        *((f, "plain") for f in ALL),
        *((f, "checkpoint") for f in FAMILIES),
        ("qwen3", "reentrant"),
        ("gpt2", "reentrant"),
    ],
)
def test_packed_logprobs_and_gradients_equal_an_unpacked_forward(family, mode):
    dropout = {
        name: 0.5
        for name in (
            "attention_dropout",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "hidden_dropout",
            "residual_dropout",
        )
    }
    module = tiny_model(family, **{k: v for k, v in dropout.items() if hasattr(tiny_config(family), k)})
    untouched = copy.deepcopy(module)
    module.train()
    if MODES[mode] is not None:
        module.gradient_checkpointing_enable({"use_reentrant": MODES[mode]})
        module.enable_input_require_grads()
    model = Model(family, module)

    prompt, answers, other = IDS[:9], (IDS[20:32], IDS[40:44]), IDS[60:71]
    ids = torch.cat([prompt, *answers, other])
    positions = torch.cat([torch.arange(9), torch.arange(9, 21), torch.arange(9, 13), torch.arange(11)])
    segments = Segments(*torch.tensor([[0, 9, 21, 25], [9, 12, 4, 11], [0, 0, 0, 0], [0, 9, 9, 0]]))
    got = logprobs(model, ids, model.hidden(ids, positions, segments))
    got.gather(1, ids[:, None]).mul(torch.arange(36)[:, None]).sum().backward()
    assert all(m.training for m in module.modules()) and "forward" not in vars(module.base_model)

    need = []
    for answer in answers:
        need.append(untouched(input_ids=torch.cat([prompt, answer])[None]).logits[0].log_softmax(-1)[9:])
    need = torch.cat(
        [
            untouched(input_ids=prompt[None]).logits[0].log_softmax(-1),
            *need,
            untouched(input_ids=other[None]).logits[0].log_softmax(-1),
        ]
    )
    need.gather(1, ids[:, None]).mul(torch.arange(36)[:, None]).sum().backward()
    torch.testing.assert_close(got, need, rtol=0, atol=1e-5)
    for (name, p), q in zip(module.named_parameters(), untouched.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max().clamp(min=1), name


def test_checkpointing_really_replays_layers(monkeypatch):
    module = tiny_model("qwen3").train()
    module.gradient_checkpointing_enable()
    model, calls, original = Model("m", module), [], ops.packed_attention
    monkeypatch.setattr(ops, "packed_attention", lambda *a: calls.append(1) or original(*a))
    model.hidden(IDS[:5], torch.arange(5), Segments(torch.tensor([0]), torch.tensor([5]))).sum().backward()
    assert len(calls) == 2 * len(model.layers)
    module.zero_grad()
    with torch.no_grad():
        model.hidden(IDS[:5], torch.arange(5), Segments(torch.tensor([0]), torch.tensor([5])))
    assert len(calls) == 3 * len(model.layers)


def test_a_hook_on_a_layers_forward_survives_checkpointing():
    module = tiny_model("qwen3")
    module.gradient_checkpointing_enable()
    layer, calls = module.model.layers[0], []
    original = layer.forward
    layer.forward = hooked = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    model = Model("m", module)
    calls.clear()
    model.hidden(IDS[:5], torch.arange(5), Segments(torch.tensor([0]), torch.tensor([5]))).sum().backward()
    assert len(calls) == 2 and layer.forward is hooked


# The user's model afterwards


@pytest.mark.parametrize(
    "family, implementation", [("qwen3", "sdpa"), ("gemma3_text", "sdpa"), ("gpt2", "eager"), ("qwen3_moe", "eager")]
)
def test_the_users_model_is_left_as_it_was(family, implementation, tmp_path):
    config = tiny_config(family, attn_implementation=implementation)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).train()
    module.base_model.eval()  # a mixed state must come back too
    second = AutoModelForCausalLM.from_config(config).eval()
    assert second.config is module.config
    modes = [m.training for m in module.modules()]
    padded = torch.stack([IDS[:8], torch.cat([torch.zeros(3, dtype=torch.int64), IDS[20:25]])])
    mask = (padded != 0).long()

    def behaviour():
        with torch.no_grad():
            logits = [m(input_ids=padded, attention_mask=mask).logits for m in (module, second)]
        tokens = [m.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False) for m in (module, second)]
        return [*logits, *tokens]

    before, state, settings = behaviour(), torch.random.get_rng_state(), copy.deepcopy(vars(config))
    model = Model("m", module)
    Pages(model, rows=1).feed({0: IDS[:9]})
    model.hidden(IDS[:9], torch.arange(9), Segments(torch.tensor([0]), torch.tensor([9]))).sum().backward()
    assert torch.equal(state, torch.random.get_rng_state())
    assert vars(config) == settings and [m.training for m in module.modules()] == modes
    for x, y in zip(before, behaviour(), strict=True):
        assert torch.equal(x, y)
    module.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, x), y in zip(module.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_an_error_inside_a_forward_restores_everything():
    module = tiny_model("qwen3").train()
    model = Model("m", module)
    with pytest.raises(ValueError, match="segments"):
        model.hidden(IDS[:5], torch.arange(5), Segments(torch.tensor([0]), torch.tensor([9])))
    assert (
        module.config._attn_implementation == "sdpa" and using.depth == 0 and all(m.training for m in module.modules())
    )


def test_attention_without_the_keyword_is_sdpa_outside_and_an_error_inside():
    module = tiny_model("mistral")
    need = plain(module, IDS[:7])
    module.set_attn_implementation(NAME)
    assert torch.equal(plain(module, IDS[:7]), need)
    with using(module), pytest.raises(UnsupportedModelError, match="keyword fastcollab"):
        plain(module, IDS[:7])
    with using(module), pytest.raises(ValueError, match="batch of 2"):
        module(input_ids=IDS[:8].view(2, 4), fastcollab=object())


# What a Model says of itself


def test_attributes(tmp_path):
    module = tiny_model("deepseek_v3")
    assert Model("m", module).layers == [LayerSpec(4, 16, 12, 0)] * 3
    module = tiny_model("qwen3", tie_word_embeddings=True)
    model = Model("m", module)
    assert (model.vocab_size, model.max_length, model.eos_ids) == (VOCAB, 128, (2,))
    assert model.weight_bytes == 4 * sum(p.numel() for p in module.parameters())
    module.generation_config.eos_token_id = [5, 7]
    assert Model("m", module).eos_ids == (5, 7)
    module.save_pretrained(tmp_path)
    loaded = Model("m", tmp_path, init_kwargs={"dtype": torch.float32})
    assert (
        loaded.eos_ids == (5, 7) and loaded.tokenizer is None and torch.equal(loaded.head().weight, model.head().weight)
    )
    module.generation_config.eos_token_id = module.config.eos_token_id = None
    assert Model("m", module).eos_ids == ()
    assert Model("m", module, tokenizer=type("T", (), {"eos_token_id": 3})()).eos_ids == (3,)
    with pytest.raises(ValueError, match="adapter: got 'maybe'"):
        Model("m", module, adapter="maybe")


@pytest.mark.parametrize("kind", ["foreach", "fused", "single"])
def test_version_changes_with_an_optimiser_step(kind):
    model = Model("m", tiny_model("qwen2"))
    options = {"single": {"foreach": False}}.get(kind, {kind: True})
    optimiser = torch.optim.AdamW(model.module.parameters(), lr=1e-3, **options)
    start = model.version
    model.hidden(IDS[:5], torch.arange(5), Segments(torch.tensor([0]), torch.tensor([5]))).sum().backward()
    Pages(model, rows=1).feed({0: IDS[:9]})
    assert model.version == start
    optimiser.step()
    stepped = model.version
    model.bump()
    assert start < stepped < model.version


# LoRA


def lora(**options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.5, **{"target_modules": ["q_proj", "v_proj", "down_proj"], **options}, task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(tiny_model("qwen3"), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2, generator=generator)
    return wrapped


def test_lora_senior_and_its_base_share_one_module():
    wrapped = lora()
    base = tiny_model("qwen3")
    senior, junior = Model("senior", wrapped), Model("junior", wrapped, adapter="off")
    assert senior.module is junior.module and senior.peft is wrapped
    again = Model("junior", senior.module, adapter="off")  # without the wrapper at hand
    assert 0 < junior.weight_bytes < senior.weight_bytes and junior.weight_bytes == sum(
        p.nbytes for p in base.parameters()
    )
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    modes = [m.training for m in wrapped.modules()]
    ids = IDS[:11]
    adapted = plain(copy.deepcopy(wrapped).eval(), ids)
    assert (adapted - plain(base, ids)).abs().max() > 0.1
    for model, need in ((senior, adapted), (junior, plain(base, ids)), (again, plain(base, ids)), (senior, adapted)):
        torch.testing.assert_close(Pages(model, rows=1).feed({0: ids})[0], need, rtol=0, atol=1e-5)
    assert trained == {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert modes == [m.training for m in wrapped.modules()]

    versions = senior.version, junior.version
    optimiser = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    senior.hidden(ids, torch.arange(11), Segments(torch.tensor([0]), torch.tensor([11]))).sum().backward()
    optimiser.step()
    assert senior.version > versions[0] and junior.version == versions[1]
    torch.testing.assert_close(Pages(junior, rows=1).feed({0: ids})[0], plain(base, ids), rtol=0, atol=1e-5)


def test_an_adapter_that_cannot_be_switched_off_is_refused():
    with pytest.raises(ValueError, match="adapter: got 'off', need a model with an adapter"):
        Model("m", tiny_model("qwen3"), adapter="off")
    wrapped = lora()
    wrapped.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        Model("m", wrapped, adapter="off")
    peft = pytest.importorskip("peft")
    prompts = peft.get_peft_model(
        tiny_model("qwen3"), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING"):
        Model("m", prompts)


@pytest.mark.parametrize("options", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_on_the_head_is_refused(options):
    with pytest.raises(UnsupportedModelError, match="adapter on its head"):
        Model("m", lora(**options))
