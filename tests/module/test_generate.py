"""`generate` of a parallel model: the tokens of transformers on one device, with caches that stay where they are."""

from __future__ import annotations

import copy
import itertools
import math
import weakref

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.letters import BadInput, NotServed
from autopar.testing import on_processes

ROWS, PROMPT, NEW = 4, 6, 6
_SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "conv_kernel": 4}
_FALCON = {f"mamba_{name}": n for name, n in zip(("d_ssm", "n_heads", "d_head"), (32, 4, 8), strict=True)}
_FALCON |= {"mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_LINEAR = {f"linear_{what}_head_dim": 8 for what in ("key", "value")}
_LINEAR |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MOE |= {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_NEO = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 6}
_NEO["attention_types"] = [[["global", "local"], 1]]
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_HEADS}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, **_HEADS, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SIZES, **_HEADS, "head_dim": 8, **_SLIDING}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SIZES, **_HEADS, "sliding_window": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}),
}
TRIED = {  # their classes do not say that a cache may be longer than its tokens
    "gptneo": ("GPTNeoForCausalLM", "GPTNeoConfig", _NEO),
    "roberta": ("RobertaForCausalLM", "RobertaConfig", {**_SIZES, "num_attention_heads": 4, "is_decoder": True}),
}
WITH_STATES = {
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_SMALL, "state_size": 4, "conv_kernel": 4}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {**_SMALL, "state_size": 8, **_MAMBA2}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**_SIZES, **_HEADS, "head_dim": 8, **_FALCON}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_SIZES, **_HEADS, "head_dim": 8, **_LINEAR, **_MOE}),
}
PLANS = ("megatron", "zero3", "free")
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
PADDED = torch.ones(ROWS, PROMPT, dtype=torch.long)
PADDED[0, :3] = 0
PADDED[2, :1] = 0


def model_of(family: str):
    cls, config, sizes = {**FAMILIES, **TRIED, **WITH_STATES}[family]
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


LONG = 4096  # tokens of a cache next to which everything else is small


class Storages(TorchDispatchMode):
    """Bytes of the storages that ops on this rank make: of the largest, and of those that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for x in pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self._add((x.to_local() if isinstance(x, DTensor) else x).untyped_storage())
        return made

    def _add(self, storage) -> None:
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, storage._cdata, None)
            self.largest = max(self.largest, storage.nbytes())
            self.peak = max(self.peak, sum(self.alive.values()))


def body(rank, models, mesh, plan, calls, tokens):
    """Of each call the tokens, and the programs that it has made; then the bytes of caches, and the last program."""
    parallel = parallel_of(models[rank], mesh, plan)
    parallel.new_cache(tokens)
    found = []
    for ids, how in calls:
        before = parallel._own.made
        found.append((parallel.generate(ids, **how), parallel._own.made - before))
    last = parallel.generate(batch_of()["input_ids"], **GREEDY, return_dict_in_generate=True)
    held = [x for x in pytree.tree_leaves(last.cache) if isinstance(x, DTensor)]
    whole = [x.numel() * x.element_size() for x in held]
    del last, held
    with Storages() as storages:
        parallel.generate(batch_of()["input_ids"], **GREEDY)
    return found, (whole, storages), parallel._own.programs[-1].lowered


def check(family, mesh, plan, calls, threads, tokens=1):
    """The tokens of all calls are those of one device; returns what rank 0 found."""
    model = model_of(family)
    calls = [how if isinstance(how, tuple) else (batch_of()["input_ids"], how) for how in calls]
    right = [model.generate(ids, **how) for ids, how in calls]
    count = math.prod(mesh)
    ranks = threads(count, body, [copy.deepcopy(model) for _ in range(count)], mesh, plan, calls, tokens, timeout_s=200)
    for found, *_ in ranks:
        for (made, _), due, (_, how) in zip(found, right, calls, strict=True):
            assert torch.equal(made, due), how
    return ranks[0]


def test_greedy_tokens_take_two_programs_and_no_rank_ever_has_a_whole_cache(threads):
    found, (whole, storages), decode = check("llama", (2, 2), "megatron", [GREEDY, GREEDY], threads, tokens=LONG)
    assert [made for _, made in found] == [2, 0]
    assert len(whole) == 4 and storages.largest == whole[0] / 4  # of two rows and one of two heads
    assert storages.peak < sum(whole) / 2
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
@pytest.mark.parametrize("family, tokens", [("gemma3", [4, 11]), ("mistral", [4, 4])])
def test_layers_hold_as_many_tokens_as_they_see(family, tokens, threads):
    """Of prompts that are shorter and longer than the window; beams bring rows, padded in front, into order."""
    short = batch_of(length=3)["input_ids"]
    beams = {**GREEDY, "attention_mask": PADDED, "num_beams": 2}
    calls = [GREEDY, beams, (short, GREEDY), (short, {**beams, "attention_mask": PADDED[:, 1:4]})]
    found, (whole, _), _ = check(family, (2,), "zero3", calls, threads)
    assert [made for _, made in found] == [2, 2, 1, 1]  # one for a further token, whatever the prompt's length
    assert whole == [ROWS * 2 * count * 8 * 4 for count in tokens for _ in ("keys", "values")]


def test_calls_of_several_tokens_see_all_of_a_window():
    parallel = parallel_of(model_of("mistral"), (1,), "free")
    cache = parallel.new_cache(16, windows=True)
    ids = batch_of(length=12)["input_ids"]
    with torch.no_grad():
        parts = [parallel(input_ids=part, cache=cache).logits for part in ids.split([3, 8, 1], 1)]
        whole = autopar.gather(parallel)(ids).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert cache.layers[0].keys.shape[2] == 4
    with pytest.raises(NotServed, match="tokens that have left a window"):
        cache.crop(1)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "falcon_h1"])
def test_states_are_carried(family, mesh, threads):
    calls = [GREEDY, {**GREEDY, "attention_mask": PADDED, "num_beams": 2}]
    found, *_ = check(family, mesh, "free", calls, threads)
    tried = family == "falcon_h1"  # its class does not say that its cache may be longer than its tokens
    assert [made for _, made in found] == [2 + tried, 2]


def test_states_are_carried_on_one_device(threads):
    check("mamba", (1,), "free", [{**GREEDY, "attention_mask": PADDED}], threads)


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
    check_drawn(family, plan)


class Scales(transformers.StoppingCriteria):
    """Code of one's own between two tokens, which changes what forward reads."""

    def __init__(self, model) -> None:
        self.model = model

    def __call__(self, input_ids, scores, **kwargs):
        self.model.model.layers[0].self_attn.scaling = 9.0
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_what_changes_between_tokens_is_seen():
    how = {"max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    ids = batch_of()["input_ids"]
    scores = []
    for model in (model_of("llama"), parallel_of(model_of("llama"), (1,), "free")):
        model.generate(ids, **how)  # its programs are there
        scores.append(torch.stack(model.generate(ids, stopping_criteria=[Scales(model)], **how).scores))
    torch.testing.assert_close(scores[1], scores[0])


def test_other_caches_and_calls_with_gradients_are_letters(monkeypatch):
    parallel = parallel_of(model_of("llama"), (1,), "free")
    ids = batch_of()["input_ids"]
    config = parallel.config
    for cache in (transformers.DynamicCache(config=config), transformers.StaticCache(config=config, max_cache_len=16)):
        with torch.no_grad(), pytest.raises(BadInput, match=r"model\.new_cache\(length\)"):
            parallel(input_ids=ids, cache=cache)
        with pytest.raises(BadInput, match=r"model\.generate, whose caches are sharded"):
            parallel.generate(ids, cache=cache, max_new_tokens=2)
    with monkeypatch.context() as patched, pytest.raises(NotServed, match="in a cache of its own"):
        patched.setattr(type(parallel), "_supports_default_dynamic_cache", lambda model: False)  # as MiniMax has it
        parallel.generate(ids, max_new_tokens=2)
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


@pytest.mark.parametrize("family", ["gptneo", pytest.param("roberta", marks=pytest.mark.nightly)])
def test_a_cache_that_is_longer_than_its_tokens_is_tried_where_no_class_says_that_it_may_be(family):
    """GPT-Neo reads the number of tokens off its cache; RoBERTa does not."""
    parallel, right = parallel_of(model_of(family), (1,), "free"), model_of(family)
    ids = batch_of()["input_ids"]
    expected = right.generate(ids, **GREEDY)
    if family == "roberta":
        assert torch.equal(parallel.generate(ids, **GREEDY), expected)
        assert not parallel._own.caches.trial.is_open
    else:
        with pytest.raises(NotServed, match="its logits are others than without a cache"):
            parallel.generate(ids, **GREEDY)


@pytest.mark.nightly
def test_a_plan_that_gathers_a_cache_does_not_write_in_place(threads, monkeypatch):
    """As one may that counts gradients: its new values are parts of the copy to which the op writes."""
    monkeypatch.setattr("autopar.api.without_gradients", lambda graph: graph)
    *_, decode = check("llama", (2, 2), "megatron", [GREEDY], threads)
    assert "convert(cache_0_keys, 'all_gather" in decode.code and not decode.program.written
