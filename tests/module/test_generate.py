"""`generate` of a parallel model: the tokens of transformers on one device, with caches that stay where they are."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.letters import BadInput, NotServed
from autopar.testing import on_processes

ROWS, PROMPT, NEW = 4, 6, 6
_SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_HEADS}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, **_HEADS, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SIZES, **_HEADS, "head_dim": 8, **_SLIDING}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}),
}
PLANS = ("megatron", "zero3", "free")
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
PADDED = torch.ones(ROWS, PROMPT, dtype=torch.long)
PADDED[0, :3] = 0
PADDED[2, :1] = 0


def model_of(family: str):
    cls, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def batch_of(rows: int = ROWS, length: int = PROMPT) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 96, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def parallel_of(model, mesh, plan, **how):
    preset = {} if plan == "free" else {"parallel": plan}
    return autopar.autoparallelize(model.train(), batch_of(), mesh=mesh, **preset, **how).eval()


class Whole(TorchDispatchMode):
    """Counts tensors that hold all rows and heads of a cache."""

    def __init__(self, cache) -> None:
        super().__init__()
        self.shapes = {layer.keys.shape for layer in cache.layers}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        is_local = isinstance(made, torch.Tensor) and not isinstance(made, DTensor) and not made.is_meta
        self.count += is_local and made.shape in self.shapes
        return made


def body(rank, models, mesh, plan, calls):
    """The tokens of each call, the programs that it has made, and what the last cache is on this rank."""
    parallel = parallel_of(models[rank], mesh, plan)
    ids = batch_of()["input_ids"]
    found = []
    for how in calls:
        before = parallel._own.made
        found.append((parallel.generate(ids, **how), parallel._own.made - before))
    last = parallel.generate(ids, **{**GREEDY, "return_dict_in_generate": True})
    cache = getattr(last.cache, "self_attention_cache", last.cache)
    with Whole(cache) as whole:
        parallel.generate(ids, **GREEDY)
    return found, cache, whole.count, parallel._own.programs[-1].lowered


def check(family, mesh, plan, calls, threads):
    """The tokens of all calls are those of one device; returns what rank 0 found."""
    model = model_of(family)
    right = [model.generate(batch_of()["input_ids"], **how) for how in calls]
    count = math.prod(mesh)
    ranks = threads(count, body, [copy.deepcopy(model) for _ in range(count)], mesh, plan, calls, timeout_s=120)
    for found, *_ in ranks:
        for (tokens, _), tokens_of_one, how in zip(found, right, calls, strict=True):
            assert torch.equal(tokens, tokens_of_one), how
    return ranks[0]


def test_greedy_tokens_take_two_programs_and_no_whole_cache(threads):
    found, cache, whole, decode = check("llama", (2, 2), "megatron", [GREEDY, GREEDY], threads)
    assert [made for _, made in found] == [2, 0]
    assert whole == 0
    for layer in cache.layers:
        assert layer.keys.numel() == 4 * layer.keys.to_local().numel()
    memory = decode.plan.memory
    assert memory["gradients"] == memory["optimizer states"] == memory["saved activations"] == 0
    text = str(decode.joint.forward)
    assert text.count("aten.index_copy_.default") == 4 and "aten.index_copy.default" not in text


@pytest.mark.nightly
def test_an_encoder_runs_in_the_first_call(threads):
    beams = {**GREEDY, "num_beams": 3}
    found, *_ = check("t5", (2,), "free", [beams], threads)
    assert found[0][1] == 2


@pytest.mark.nightly
def test_windows_slide_and_beams_bring_rows_into_order_that_are_padded_in_front(threads):
    check("gemma3", (2,), "zero3", [{**GREEDY, "attention_mask": PADDED, "num_beams": 2}], threads)


@pytest.mark.nightly
@pytest.mark.parametrize("family, plan, mesh", [*itertools.product(FAMILIES, PLANS, [(4,), (2, 2)])])
def test_tokens_of_each_family_under_each_plan(family, plan, mesh, threads):
    calls = [GREEDY, {**GREEDY, "attention_mask": PADDED, "num_beams": 2}]
    assert check(family, mesh, plan, calls, threads)[0][0][1] == 2


def trained(model, steps: int = 1):
    """Local parts of the parameters after a step of training."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(**batch_of()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().to_local().clone() for p in model.parameters()]


SAMPLED = ({"do_sample": True, "max_new_tokens": NEW}, {"do_sample": True, "num_beams": 2, "max_new_tokens": NEW})
LENGTHS = (6, 5, 7)


def draw(rank, family, plan):
    """Sampled tokens of ranks with different generators, programs of several lengths, and training afterwards."""
    parallel = parallel_of(model_of(family), (2,), plan, pad_to=8)
    beside = copy.deepcopy(parallel)
    assert beside.random_state is not parallel.random_state  # from here on it counts its own draws of dropout
    found = []
    for how in SAMPLED:
        torch.manual_seed(7 + rank)
        found.append((parallel.generate(batch_of()["input_ids"], **how), torch.rand(1)))
    before = parallel._own.made
    ids = batch_of(length=max(LENGTHS))["input_ids"]
    greedy = [parallel.generate(ids[:, :n], **GREEDY) for n in LENGTHS]
    made = parallel._own.made - before
    pairs = zip(trained(parallel), trained(beside), strict=True)
    return found, greedy, made, all(torch.equal(one, other) for one, other in pairs)


def check_drawn(family, plan):
    model = model_of(family)
    right = []
    for how in SAMPLED:
        torch.manual_seed(7)
        right.append((model.generate(batch_of()["input_ids"], **how), torch.rand(1)))
    ids = batch_of(length=max(LENGTHS))["input_ids"]
    greedy = [model.generate(ids[:, :n], **GREEDY) for n in LENGTHS]
    for rank, (found, of_lengths, made, is_same) in enumerate(on_processes(2, draw, family, plan, timeout_s=150)):
        for (tokens, after), (due, after_one) in zip(found, right, strict=True):
            assert torch.equal(tokens, due)
            assert torch.equal(after, after_one) == (rank == 0)  # other ranks go on with their own generator
        assert all(map(torch.equal, of_lengths, greedy))
        assert made <= 1 and is_same


def test_ranks_draw_as_rank_0_and_a_step_afterwards_is_as_without():
    check_drawn("llama", "megatron")


@pytest.mark.nightly
@pytest.mark.parametrize("family, plan", [*itertools.product(FAMILIES, PLANS)])
def test_drawn_tokens_of_each_family_under_each_plan(family, plan):
    if family != "t5":  # its lengths are not padded
        check_drawn(family, plan)


def test_other_caches_and_calls_with_gradients_are_letters():
    parallel = parallel_of(model_of("llama"), (1,), "free")
    ids = batch_of()["input_ids"]
    config = parallel.config
    for cache in (transformers.DynamicCache(config=config), transformers.StaticCache(config=config, max_cache_len=16)):
        with torch.no_grad(), pytest.raises(BadInput, match=r"model\.new_cache\(length\)"):
            parallel(input_ids=ids, cache=cache)
        with pytest.raises(BadInput, match=r"model\.generate, whose caches are sharded"):
            parallel.generate(ids, cache=cache, max_new_tokens=2)
    local = parallel_of(model_of("llama"), (1,), "free", inputs="local")
    with pytest.raises(NotServed, match='inputs="local"'):
        local.generate(ids, max_new_tokens=2)
    own = parallel.new_cache(16)
    with pytest.raises(NotServed, match=r"torch\.no_grad\(\) around the calls"):
        parallel(input_ids=ids, cache=own)
    with torch.no_grad():
        first = parallel(input_ids=ids, cache=own).logits
        again = parallel(input_ids=ids[:, :2], cache=own).logits
        whole = autopar.gather(parallel)(torch.cat([ids, ids[:, :2]], 1)).logits
    assert own.get_seq_length() == PROMPT + 2
    torch.testing.assert_close(torch.cat([first, again], 1), whole)


@pytest.mark.nightly
def test_a_plan_that_gathers_a_cache_does_not_write_in_place(threads, monkeypatch):
    """As one may that counts gradients: its new values are parts of the copy to which the op writes."""
    monkeypatch.setattr("autopar.api.without_gradients", lambda graph: graph)
    *_, decode = check("llama", (2, 2), "megatron", [GREEDY], threads)
    assert "convert(cache_0_keys, 'all_gather" in decode.code and not decode.program.written
