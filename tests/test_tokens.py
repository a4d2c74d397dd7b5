"""Prompts, boundaries, stop strings: ids never pass through text and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import fastcollab as fc
from fastcollab import tiny
from fastcollab.tokens import StopStrings, check_same_vocabulary, containing, encode_prompt, word_boundaries
from fastcollab.types import Rollout

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}


def word_level(words, **special):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])), **special
    )


def test_boundaries_of_byte_level_sentencepiece_and_plain_vocabularies():
    tokenizer = AutoTokenizer.from_pretrained(tiny.senior())
    mask = word_boundaries(tokenizer, len(tokenizer))
    opens = {tokenizer.convert_ids_to_tokens(int(i)) for i in np.flatnonzero(mask)}
    assert {"Ġ+", "Ġanswer", "Ġ7"} <= opens and not {"Ċ", "7", "add"} & opens
    assert word_boundaries(word_level(["<unk>", "▁a", "b", " c", "▁"]), 5).tolist() == [0, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="vocabulary of 3 without a leading space, need boundaries="):
        word_boundaries(word_level(["<unk>", "a", "b"]), 3)


def test_paragraph_separator_is_looked_for_in_decoded_text():
    tokenizer = AutoTokenizer.from_pretrained(tiny.senior())
    assert tokenizer.convert_ids_to_tokens(np.flatnonzero(containing(tokenizer, len(tokenizer), "\n")).tolist()) == [
        "Ċ"
    ]
    with pytest.raises(ValueError, match="separator: got '\\\\n\\\\n', which no token"):
        containing(tokenizer, len(tokenizer), "\n\n")


def test_c24_stop_strings_across_tokens():
    """The token that completes the stop string is kept, so that ids and log-probs stay whole; its text is cut."""
    case = CASES["C24"]
    pieces, want = case["input"]["pieces"], case["expected"]
    stops = StopStrings([case["input"]["stop"]], lambda ids: "".join(pieces[i] for i in ids))
    ids = list(range(len(pieces)))
    one_by_one = next(n for t in ids if (n := stops.first_hit(ids[: t + 1], t)))
    assert one_by_one == stops.first_hit(ids) == want["last_token_needed"] + 1
    assert stops.cut("".join(pieces)) == want["text_without_stop"] and "abc" not in stops.cut(
        "".join(pieces[:one_by_one])
    )
    assert stops.first_hit(ids[:3]) is None  # the prefix "<" alone is no stop


def test_stop_string_ends_a_row_of_the_engine():
    tokenizer = AutoTokenizer.from_pretrained(tiny.senior())
    engine = fc.Engine({"senior": tiny.senior()}, kv_memory="8MiB")
    prompts = [p["prompt"] for p in tiny.problems(4, seed=1)]
    free = engine.generate(prompts, sampling=fc.SamplingParams(temperature=0, max_new_tokens=50))
    stopped = engine.generate(prompts, sampling=fc.SamplingParams(temperature=0, max_new_tokens=50, stop="answer"))
    for a, b in zip(free, stopped, strict=True):
        assert b.finish == "stop" and b.ids == a.ids[: len(b.ids)] and tokenizer.decode(b.ids).endswith("answer")
        assert b.text == a.text[: a.text.index("answer")]
    assert engine.scheduler.free_blocks(0) == engine.num_blocks[0]


def test_c26_sampled_ids_are_never_re_encoded():
    """P1: a non-canonical id sequence stays what it is, in the record and in the context of whoever writes next."""
    case = CASES["C26"]["input"]
    bpe = Tokenizer(models.BPE(vocab=case["vocab"], merges=[tuple(m.split()) for m in case["merges"]]))
    bpe.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    want = CASES["C26"]["expected"]
    assert tokenizer.encode(want["text"]) == want["reencode_of_abc"]
    model = tiny_model("qwen3", vocab_size=6, eos_token_id=None, pad_token_id=None, bos_token_id=None)
    contexts = []

    def watch(prompt, ids, author):
        contexts.append((prompt.tolist(), ids.tolist()))
        return len(ids) % 2

    engine = fc.Engine({"a": model, "b": tiny_model("qwen3", 1, vocab_size=6)}, tokenizer, kv_memory="1MiB")
    prompt = case["sampled_ids"]
    r = engine.generate([prompt], schedule=watch, sampling=fc.SamplingParams(max_new_tokens=12, ignore_eos=True))[0]
    assert r.prompt_ids == prompt and [p for p, _ in contexts] == [prompt] * 12
    assert [ids for _, ids in contexts] == [
        r.ids[:t] for t in range(12)
    ]  # each context has the earlier one as a prefix
    rollouts = engine.generate([prompt], n=8, sampling=fc.SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert all(tokenizer.decode(r.ids) == r.text for r in rollouts)
    assert any(tokenizer.encode(r.text) != r.ids for r in rollouts)  # re-encoding would have changed them


def test_c30_masks_go_by_position_not_by_value():
    """P9: pad == eos; the EOS that ended a row is trained, an equal id inside the prompt is context."""
    case = CASES["C30"]
    for row, mask, length in zip(
        case["input"]["rows"], case["expected"]["masks"], case["expected"]["lengths"], strict=True
    ):
        ids = row[:length]
        author = np.zeros(length, np.uint8)
        r = Rollout(case["input"]["prompt"], ids, author, ("policy",), np.zeros(length, np.float32), "eos")
        assert r.mask("policy").tolist() == [bool(m) for m in mask[:length]] and sum(mask) == length
    tokenizer = word_level(["a", "b", "</s>", "c"], eos_token="</s>", pad_token="</s>")
    model = tiny_model("qwen3", vocab_size=4, eos_token_id=2, pad_token_id=2)
    rollouts = fc.Engine({"m": model}, tokenizer, kv_memory="1MiB").generate([[2, 1, 2, 3]], n=32)
    ended = [r for r in rollouts if r.finish == "eos"]
    assert ended and all(r.ids[-1] == 2 and r.mask("m").all() and 2 not in r.ids[:-1] for r in ended)


def test_c28_at_most_one_bos():
    """P11: a chat template writes its own BOS; nothing is added to it, and nothing at a hand-off."""
    words = ["<unk>", "<s>", "hi", "yo"]
    tokenizer = word_level(words, bos_token="<s>")
    tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer._tokenizer.decoder = decoders.WordPiece()
    tokenizer.chat_template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "hi yo"}], 0)
    assert ids == [1, 2, 3]


def test_unequal_vocabularies_are_refused_by_name():
    """C32: ids never cross between different vocabularies."""
    case = CASES["C32"]["input"]
    a, b = (word_level(case[k], unk_token="<s>") for k in ("vocab_A", "vocab_B"))
    with pytest.raises(ValueError, match="unequal vocabularies \\(a: 6 tokens, b: 8; '</s>' is None in one and 6"):
        check_same_vocabulary({"a": a, "b": b})
    check_same_vocabulary({"a": a, "b": a})


def test_padded_heads_are_sliced():
    """Spec row 7: ids beyond the tokenizer can't be sampled, and log-probs normalise over the rest."""
    tokenizer = word_level(["a", "b", "c", "d"])
    models = {"a": tiny_model("qwen3", vocab_size=9), "b": tiny_model("qwen3", 1, vocab_size=6)}
    engine = fc.Engine(models, tokenizer, kv_memory="1MiB")
    sampling = fc.SamplingParams(temperature=9.0, max_new_tokens=30, ignore_eos=True)
    rollouts = engine.generate([[1, 2]], n=16, schedule=fc.Bernoulli(("a", "b")), sampling=sampling)
    assert {i for r in rollouts for i in r.ids} == {0, 1, 2, 3}
    assert (
        abs(np.mean([lp for r in rollouts for lp in r.logprob]) + np.log(4)) < 0.1
    )  # nearly uniform over 4, not over 9
    with pytest.raises(ValueError, match="models: got \\{'b': 6\\}, need heads of >= 7 ids"):
        fc.Engine({"b": models["b"]}, word_level(list("abcdefg")), kv_memory="1MiB")


def test_a_rendered_prompt_gets_no_second_bos():
    """P11, for text that a chat template rendered before."""
    tokenizer = word_level(["<unk>", "<s>", "hi"], bos_token="<s>")
    tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    assert encode_prompt(tokenizer, "hi", 0) == [1, 2] and encode_prompt(tokenizer, "<s> hi", 0) == [1, 2]


def test_boundaries_by_what_is_written():
    """A space mark that is neither Ġ nor ▁."""
    tokenizer = word_level(["<unk>", "_a", "b"])
    tokenizer._tokenizer.decoder = decoders.Metaspace(replacement="_", prepend_scheme="never")
    assert word_boundaries(tokenizer, 3).tolist() == [0, 1, 0]


def test_another_models_tokenizer_is_refused():
    with pytest.raises(ValueError, match="unequal vocabularies \\(senior: 31 tokens, tokenizer: 3"):
        fc.Engine({"senior": tiny.senior()}, word_level(["a", "b", "c"]), kv_memory="1MiB")


def test_an_eos_that_is_also_a_stop_string_ends_as_eos():
    engine = fc.Engine({"senior": tiny.senior()}, kv_memory="4MiB")
    sampling = fc.SamplingParams(temperature=0, stop="<eos>", max_new_tokens=50)
    r = engine.generate([tiny.problems(1, 0)[0]["prompt"]], sampling=sampling)[0]
    assert r.finish == "eos" and r.ids[-1] == 0
