"""Published errors of long sequences: keys that go round a ring, rows that are dealt, masks of a cut sequence."""

from __future__ import annotations

from tests.gauntlet import ring_plants
from tests.gauntlet.bug import MISSING, ORDER, STALE, UNEVEN, Bug
from tests.gauntlet.plants import gradient_not_summed

RINGS = [
    Bug(
        "own keys in every step of a backward",
        ("huggingface/diffusers#14265",),
        "Forward sent keys round; each step of backward read those that a rank had saved, which were its own.",
        STALE,
        ring_plants.stale_keys,
        "ring",
    ),
    Bug(
        "gradients of keys on other ranks",
        ("NVIDIA/TransformerEngine#2484",),
        "Sums of the gradients of keys have to travel with the keys, and were suspected to miss a passage.",
        MISSING,
        ring_plants.gradients_stay,
        "ring",
    ),
    Bug(
        "gradients of a ring",
        ("NVIDIA/Megatron-LM#1464", "NVIDIA/TransformerEngine#1557"),
        "Gradients of queries, keys and values were not those of one device where keys went round.",
        ORDER,
        ring_plants.the_wrong_way,
        "ring",
        is_nightly=True,
    ),
    Bug(
        "the last step of a ring's backward",
        ("zhuzilin/ring-flash-attention#10",),
        "The backward of a ring had to be mended after its forward was right.",
        MISSING,
        ring_plants.last_step_left_out,
        "ring",
        is_nightly=True,
    ),
    Bug(
        "rows that see nothing",
        ("axolotl-ai-cloud/axolotl#3026", "pytorch/pytorch#109517"),
        "A part of a sequence was padding alone, no row of it saw any key, and the loss was not a number.",
        UNEVEN,
        ring_plants.divided_by_nothing,
        "padded",
    ),
    Bug(
        "sinks that take no share",
        ("NVIDIA/TransformerEngine#3551", "NVIDIA/TransformerEngine#2541"),
        "Where keys go round, kernels fell back to a softmax without sinks, and the result was that of none.",
        MISSING,
        ring_plants.sinks_are_dropped,
        "window",
    ),
    Bug(
        "sinks that learn nothing",
        ("NVIDIA/TransformerEngine#3551",),
        "The gradient of sinks came back as exactly zero where keys went round.",
        MISSING,
        ring_plants.sinks_learn_nothing,
        "window",
        is_nightly=True,
    ),
    Bug(
        "sinks of one rank's rows",
        ("PaddlePaddle/Paddle#59057",),
        "Gradients of what all ranks have were summed over axes that cut the batch, and not over one that cuts rows.",
        MISSING,
        gradient_not_summed("sinks"),
        "window",
    ),
    Bug(
        "windows that are left out",
        ("huggingface/accelerate#4177", "PrimeIntellect-ai/prime-rl#2828"),
        "Under context parallelism layers with a window were full causal attention, and nothing said so.",
        ORDER,
        ring_plants.windows_are_dropped,
        "window",
    ),
    Bug(
        "documents that see each other",
        ("huggingface/trl#6843", "NVIDIA/TransformerEngine#1930"),
        "Context parallelism took every mask for a causal one, so that packed documents saw those before them.",
        ORDER,
        ring_plants.documents_are_dropped,
        "documents",
    ),
    Bug(
        "rows in another order than their places",
        ("alibaba/rtp-llm#1186",),
        "Rows were cut and put in another order, and what says where they stand was not.",
        ORDER,
        ring_plants.places_of_plain_rows,
        "ring",
        is_nightly=True,
    ),
    Bug(
        "results in the order of the deal",
        ("alibaba/rtp-llm#1186", "modelscope/ms-swift#10035"),
        "What one part of a model had put in another order met what the rest had as it was.",
        ORDER,
        ring_plants.never_dealt_back,
        "ring",
    ),
]
