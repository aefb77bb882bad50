"""Models that people have, unmodified, in train mode with dropout on.

Captured and equal to eager, or refused with a letter.
"""

from __future__ import annotations

import random

import pytest

from autopar.graph.graph import Graph, info
from autopar.letters import NotCaptured
from tests.shares import one_in
from tests.zoo.families import any_hf, any_inputs, has_extras
from tests.zoo.replay import check
from tests.zoo.tables import COLOSSAL, DRAWN, DRAWN_REFUSED, ZOO, Entry

SAMPLE = random.Random(4).sample(sorted(COLOSSAL), 4)  # of what runs nightly as a whole


def capture(name: str, entry: Entry) -> Graph | None:
    if entry.extras and not has_extras():
        pytest.skip("torchvision and timm are not installed beside the tests: make test does")
    if entry.refused:
        with pytest.raises(NotCaptured, match=entry.refused) as letter:
            check(entry.build, entry.inputs, entry.assume, name)
        assert ".py:" in letter.value.at
        return None
    return check(entry.build, entry.inputs, entry.assume, name)


# nightly; of kinds of layers that other networks have
LARGE = ("tv_vgg11_bn", "tv_densenet121", "timm_efficientnet_b0", "hf_mixtral_batched_mm", "hf_mixtral_eager")
# nightly too: written out as that of Gemma, GPT-J and BLOOM, where the fused attention of the same model runs by day
SAID_UNASKED = (  # of what nobody declared
    "not kept",
    "not made",
    "whatever is drawn",
    "no input",
    "tensors of queries by keys",
    "rows that a mask chooses",
)
EAGER = ("hf_gpt2_eager", "hf_llama_eager", "hf_bert_eager", "hf_bart_eager", "hf_vit_eager")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in LARGE + EAGER else []) for name in ZOO]
)
def test_the_zoo(name):
    graph = capture(name, ZOO[name])
    if graph is not None:
        again = Graph.from_json(graph.to_json())
        assert str(again) == str(graph) and [info(n) for n in again.nodes] == [info(n) for n in graph.nodes]
        assert (again.input_spec, again.output_spec, again.output_leaves) == (
            graph.input_spec,
            graph.output_spec,
            graph.output_leaves,
        )
        assert bool(graph.assumptions) <= bool(ZOO[name].assume) or all(
            any(words in a for words in SAID_UNASKED) for a in graph.assumptions
        )


def test_the_zoo_has_sixty_one_of_sixty_three():
    assert len(ZOO) == 63 and sum(not e.refused for e in ZOO.values()) >= 61


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_lists_of_colossal_auto(name):
    capture(name, COLOSSAL[name])


@pytest.mark.parametrize(
    "name", one_in(3, ["hf_gpt2", "hf_bert", "hf_t5", "hf_resnet", "hf_clip", "tv_resnet18", "plain_user"])
)
def test_in_eval_mode_nothing_is_drawn_and_no_statistics_change(name):
    if ZOO[name].extras and not has_extras():
        pytest.skip("torchvision and timm are not installed beside the tests: make test does")
    graph = check(ZOO[name].build, ZOO[name].inputs, ZOO[name].assume, name, training=False)
    assert not graph.training and not graph.is_random and not [n for _, n in graph.updates if "running" in n]


@pytest.mark.nightly
@pytest.mark.parametrize("name", COLOSSAL)
def test_the_lists_of_colossal_auto(name):
    capture(name, COLOSSAL[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAWN)
def test_classes_drawn_by_lot(name):
    capture(name, Entry(any_hf(name), any_inputs(name), refused=DRAWN_REFUSED.get(name, "")))
