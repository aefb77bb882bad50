"""`from_pretrained` trains as autoparallelize of transformers' own `from_pretrained` does, and holds parts alone."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import autopar
from autopar.letters import BadWeights, NotServed
from autopar.testing import on_processes
from tests.models import eager_links
from tests.shares import one_in

SIZES = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)


def llama():
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True)
    return hf.LlamaForCausalLM(config)


def gpt2():  # with names that lack or have the prefix of its base model, and products of turned weights
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32))


def t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    )


CASES = {
    "gpt2": (gpt2, torch.float32),
    "tied, in bfloat16": (llama, torch.bfloat16),
    "t5, parts of which stay float32": (t5, torch.float16),
}


def batch():
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def steps(model):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _still(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def save(name, folder):
    """A model in a folder, in several files; returns its class, dtype, and a config without dropout."""
    build, dtype = CASES[name]
    torch.manual_seed(0)
    saved = build().to(dtype)
    saved.generation_config.update(do_sample=True, temperature=0.25)
    saved.save_pretrained(folder, max_shard_size="40kB")
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"), 0.0)
    given = {n: p for n, p in drops.items() if hasattr(saved.config, n)}
    return type(saved), dtype, hf.AutoConfig.from_pretrained(folder, **given)


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_it_trains_as_transformers_own_made_parallel(name, tmp_path):
    kind, dtype, config = save(name, tmp_path)
    theirs = kind.from_pretrained(tmp_path, config=config).train()
    mine = autopar.from_pretrained(tmp_path, batch(), config=config, mesh=1)
    assert (
        mine.training
        and isinstance(mine, kind)
        and mine.generation_config.to_dict() == theirs.generation_config.to_dict()
    )
    assert {n: p.dtype for n, p in mine.named_parameters()} == {n: p.dtype for n, p in theirs.named_parameters()}
    buffers = dict(theirs.named_buffers())
    assert {n: b.tolist() for n, b in mine.named_buffers()} == {n: b.tolist() for n, b in buffers.items()}
    ties = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (mine, theirs)]
    assert ties[0] == ties[1] == config.tie_word_embeddings
    alone = autopar.autoparallelize(theirs, batch(), mesh=1)
    found = steps(mine)
    assert found == steps(alone) and found[0] != found[1]
    mine.save_pretrained(tmp_path / "again")
    again = kind.from_pretrained(tmp_path / "again")
    assert again.generation_config.temperature == 0.25 and again.dtype == dtype
    for name, p in again.named_parameters():
        torch.testing.assert_close(p, mine.get_parameter(name).full_tensor())


def on_two(rank, folder):
    how = {"mesh": 2, "parallel": "zero3", "cluster": eager_links()}
    mine = autopar.from_pretrained(folder, batch(), **how)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder).train()
    held = sum(p.to_local().numel() for p in mine.parameters()), sum(p.numel() for p in theirs.parameters())
    return steps(mine), steps(autopar.autoparallelize(theirs, batch(), **how)), held


def test_two_ranks_hold_parts_alone(tmp_path):
    save("tied, in bfloat16", tmp_path)
    for mine, theirs, held in on_processes(2, on_two, str(tmp_path)):
        assert mine == theirs and 2 * held[0] == held[1]


def test_what_it_cannot_read_is_a_letter(tmp_path):
    with pytest.raises(BadWeights, match="is not a directory with a config"):
        autopar.from_pretrained("meta-llama/Llama-3-8B", batch())
    saved = llama()
    saved.model.save_pretrained(tmp_path)
    with pytest.raises(NotServed, match="weights= beside"):
        autopar.from_pretrained(tmp_path, batch(), weights="x")
    with pytest.raises(NotServed, match="names no class"):
        autopar.from_pretrained(tmp_path, batch(), config=hf.LlamaConfig(architectures=["Nobody"]))
    with pytest.raises(BadWeights, match=r"lacks score\.weight"):
        autopar.from_pretrained(
            tmp_path,
            {"input_ids": batch()["input_ids"], "labels": torch.zeros(4, dtype=torch.long)},
            cls=hf.AutoModelForSequenceClassification,
            config=hf.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, num_labels=3),
            mesh=1,
            assume=autopar.Assume(no_padding=True),
        )
