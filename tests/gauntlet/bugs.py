"""Errors that were published of parallel training, each with how it is planted here and what notices it.

The reports and fixes are those of other projects; the sentences say what went wrong there, in short. An error is
planted by a function of `plants.py`, or by an entry of the tables in `tests/mutants.py`, in the form that it can take
here, and a suite of `suites.py` notices it.
What cannot be planted, because nothing here could be broken that way, names a test that shows this.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from autopar.sharding.notation import parse
from tests.gauntlet import plants
from tests.gauntlet.plants import (
    Plant,
    gradient_not_summed,
    gradient_summed_twice,
    gradient_taken_as_it_is,
    passes_sums,
    rule,
    value_not_summed,
)
from tests.mutants import GPT2_MUTANTS, MUTANTS


class Place(enum.Enum):
    """Where an error is planted."""

    HERE = "the plan is sound, and what is made of it is broken"
    PLANNING = "rules or states are wrong, and plans come of them"
    RANKS = "in the processes of the ranks"


@dataclass(frozen=True)
class Bug:
    """One published error."""

    name: str
    sources: tuple[str, ...]  # "owner/project#number, item n", "owner/project" or "arXiv:number"
    what: str
    kind: str
    plant: Plant | None = None
    suite: str = ""  # a function of suites.py, or "rule of <op>"
    place: Place = Place.HERE
    is_nightly: bool = False
    shown_by: str = ""  # of what cannot be planted: file::test
    why: str = ""

    @property
    def links(self) -> list[tuple[str, str]]:
        """A label and an address of each source."""
        return [_link(source) for source in self.sources]


def _link(source: str) -> tuple[str, str]:
    if source.startswith("arXiv:"):
        return source.replace(":", " "), f"https://arxiv.org/abs/{source.removeprefix('arXiv:')}"
    repository, _, number = source.partition("#")
    project, address = repository.split("/")[1], f"https://github.com/{repository}"
    return (f"{project} #{number}", f"{address}/issues/{number.partition(',')[0]}") if number else (project, address)


def _inner_for_outer(rule_):
    """The inner factor of joined dims where the outer one is cut."""
    text = re.sub(r"\((\S+):(\d+) (\S+):(\d+)(\+?)\)", r"(\3:\4 \1:\2\5)", rule_.text)
    return parse(text, rule_.linear)


MISSING = "missing sum"
DOUBLED = "doubled sum or wrong scale"
COUNT = "count of a mean, auxiliary loss"
ORDER = "wrong part, place or order"
STALE = "stale or differing copy"
OPTIMIZER = "optimizer"
UNEVEN = "uneven parts, padding"
RACE = "schedule, overlap"
SAVED = "checkpoint"
GROUP = "wrong group"
AGAIN = "recompute"
DTYPE = "dtype of a sum"
RANDOM = "random numbers"

BUGS = [
    Bug(
        "norms of a cut sequence",
        ("NVIDIA/Megatron-LM#1446", "EleutherAI/gpt-neox#1257", "NVIDIA/TransformerEngine#435"),
        "Under sequence parallelism each rank's norm sees its own tokens, and nobody summed the norm's gradient.",
        MISSING,
        gradient_not_summed("*norm*"),
        "sequence",
    ),
    Bug(
        "norms of cut heads",
        ("NVIDIA/Megatron-LM#7452, item 11",),
        "A norm within heads sees the heads of its rank alone; its weight is whole, and the gradient stayed local.",
        MISSING,
        gradient_not_summed("*q_norm*"),
        "grouped_heads",
    ),
    Bug(
        "a pending sum lost at an unwrap",
        ("pytorch/torchtitan#2532", "pytorch/torchtitan#2217"),
        "A layer took the local tensor out of a distributed one, and the sum that its gradient needs was forgotten.",
        MISSING,
        gradient_taken_as_it_is("*k_norm.weight"),
        "grouped_heads",
    ),
    Bug(
        "keys and values that all query heads share",
        ("bigcode-project/Megatron-LM#35", "bigcode-project/Megatron-LM#37"),
        "With one head of keys and values every tensor rank has its copy, whose gradients were not summed over ranks.",
        MISSING,
        gradient_not_summed("*[kv]_proj.weight"),
        "grouped_heads",
    ),
    Bug(
        "the router under tensor parallelism",
        ("pytorch/torchtitan#2388", "pytorch/torchtitan#2387", "pytorch/torchtitan#2416"),
        "What arrives at a router from cut experts is a part of its gradient; the parts were never added up.",
        MISSING,
        gradient_not_summed("/scatter*"),
        "experts",
    ),
    Bug(
        "what goes into cut experts",
        ("pytorch/torchtitan#1805", "pytorch/torchtitan#1878", "pytorch/torchtitan#4054"),
        "Each rank's parts of the experts give a part of the input's gradient; all layers below trained on one part.",
        MISSING,
        gradient_not_summed("/tanh*", axis="tp"),
        "experts",
    ),
    Bug(
        "a head in chunks",
        ("pytorch/torchtitan#3412",),
        "A loss that takes rows in chunks added up gradients of the head, and called these parts the whole.",
        MISSING,
        gradient_not_summed("head.weight"),
        "head_in_chunks",
    ),
    Bug(
        "the placement of a value taken for its gradient's",
        ("meta-pytorch/autoparallel#515",),
        "What all ranks hold had a gradient that was said to be held by all too, where each has a part of a sum.",
        MISSING,
        plants.gradient_lies_as_the_value,
        "mlp",
        Place.PLANNING,
    ),
    Bug(
        "two readers of one log-softmax",
        ("pytorch/pytorch#190746",),
        "The backward of a log-softmax over cut classes served one loss alone; a second reader's gradient was wrong.",
        MISSING,
        plants.gradient_of_the_loss_alone,
        "vocabulary",
    ),
    Bug(
        "hidden states below a cut vocabulary",
        ("apple/ml-cross-entropy#42",),
        "Each rank's words give a part of the gradient of the hidden states; the kernel left the sum to nobody.",
        MISSING,
        gradient_not_summed("hidden/linear*"),
        "vocabulary",
    ),
    Bug(
        "a collective that autograd does not see",
        ("modelscope/ms-swift#9947",),
        "A sum over ranks within forward had no derivative, so that gradients lacked what other ranks add.",
        MISSING,
        plants.statistics_without_a_gradient,
        "pictures",
    ),
    Bug(
        "the whole factor of an adapter",
        ("modelscope/mcore-bridge#173", "OpenPipe/ART#619"),
        "One factor of LoRA is whole on all ranks and sees cut tokens; its gradient stayed local.",
        MISSING,
        gradient_not_summed("*.a"),
        "adapters",
    ),
    Bug(
        "one sum left out",
        ("arXiv:2508.09505",),
        "Of all sums of a model one was missing: after one layer, or under one setting.",
        MISSING,
        value_not_summed("blocks.1.down*"),
        "mlp",
    ),
    Bug(
        "data-parallel hooks lost",
        ("pytorch/pytorch#104336", "arXiv:2506.14813"),
        "Hooks went lost when the model was moved, and every rank trained by itself.",
        MISSING,
        gradient_not_summed("*", axis="dp"),
        "mlp_by_rows",
    ),
    Bug(
        "the maximum of a pending sum",
        ("pytorch/pytorch#159856",),
        "A maximum was taken of each rank's part of a sum, and those were put together.",
        MISSING,
        passes_sums("amax"),
        "rule of amax",
        Place.PLANNING,
    ),
    Bug(
        "the norm of a pending sum",
        ("pytorch/pytorch#165962",),
        "A norm was taken of each rank's part of a sum, and those were put together.",
        MISSING,
        passes_sums("vector_norm"),
        "rule of vector_norm",
        Place.PLANNING,
    ),
    Bug(
        "a loss that is one rank's part",
        ("pytorch/pytorch#167213", "pytorch/pytorch#152406"),
        "A number was read out of a tensor that still waited for its sum: it was one rank's part.",
        MISSING,
        value_not_summed("*", "out.*"),
        "sequence",
    ),
    Bug(
        "a sum that reads strided memory",
        ("NVIDIA/Megatron-LM#5337", "NovaSky-AI/SkyRL#1886"),
        "A value out of memory order was summed in a copy, and came back as it was.",
        MISSING,
        plants.strided_are_copied,
        "strided",
    ),
    Bug(
        "the last micro-batch left local",
        ("modelscope/FunASR#3472",),
        "Synchronisation came one micro-batch too early, and the last one's gradients stayed on their rank.",
        MISSING,
        plants.settles_before_the_last,
        "waiting_by_rows",
    ),
    Bug(
        "half a step without its sum",
        ("NVIDIA-NeMo/RL#3716",),
        "Forward was split in two calls, and one of them went on with parts of what tensor parallelism sums.",
        MISSING,
        plants.saves_before_the_sum,
        "contracted",
    ),
    Bug(
        "a constant added to every part",
        ("pytorch/pytorch#163193",),
        "A number was added to each rank's part of a sum, and so arrived once for each rank.",
        DOUBLED,
        rule("add", "..., ... -> ...", "x, y"),
        "rule of add",
        Place.PLANNING,
    ),
    Bug(
        "a data axis of one rank",
        ("NVIDIA/Megatron-LM#6660",),
        "With nobody to reduce with, a part and its buffer were one memory, and micro-batches were added twice.",
        DOUBLED,
        plants.added_twice,
        "waiting",
    ),
    Bug(
        "a sum in the memory of its operand",
        ("NVIDIA/Megatron-LM#7452, item 10", "NVIDIA/Megatron-LM#7481"),
        "A count was summed in place, and what still read the local count had that of all ranks.",
        DOUBLED,
        plants.sums_in_place,
        "strided",
    ),
    Bug(
        "a bias on every rank",
        ("pytorch/torchtitan#2106",),
        "A layer cut along what it contracts added its whole bias on each rank, before the sum.",
        DOUBLED,
        rule("linear", "... k, n k, n -> ... n", "x, y"),
        "rule of linear",
        Place.PLANNING,
    ),
    Bug(
        "the gradient of a bias, once a rank",
        ("pytorch/torchtitan#4245",),
        "The gradient of a bias that is added once was summed over ranks that all had it.",
        DOUBLED,
        gradient_summed_twice("*.down.bias"),
        "mlp",
    ),
    Bug(
        "gradients of experts scaled by the wrong group",
        ("NVIDIA/Megatron-LM#7160", "pytorch/pytorch#160285"),
        "Experts' gradients were scaled by the size of a group that they do not belong to.",
        DOUBLED,
        gradient_summed_twice("up"),
        "experts",
    ),
    Bug(
        "a sum whose gradient is summed again",
        ("pytorch/pytorch#58005", "pytorch/xla#2989", "JohnGiorgi/DeCLUTR#212"),
        "A differentiable collective summed gradients that were whole already: they grew by the number of ranks.",
        DOUBLED,
        MUTANTS["a reduction's gradient is reduced again"],
        "mlp",
    ),
    Bug(
        "gradients through an exchange of heads",
        ("deepspeedai/DeepSpeed#5555", "deepspeedai/DeepSpeed#5248"),
        "Gradients were averaged over sequence ranks too, and were too small by their number.",
        DOUBLED,
        plants.exchange_divides,
        "exchanged_heads",
    ),
    Bug(
        "a mean where a sum was meant",
        ("pytorch/torchtitan#2318",),
        "One wrapper averages gradients over ranks where the other adds them up: their norms differ by that number.",
        DOUBLED,
        plants.sums_are_means,
        "mlp",
    ),
    Bug(
        "the running sum scaled at each turn",
        ("pytorch/torchtitan#1733", "pytorch/torchtitan#1732", "pytorch/torchtitan#2972", "pytorch/torchtitan#4194"),
        "The scale of one micro-batch was applied to all that had been added up before it.",
        DOUBLED,
        plants.turns_scale_what_there_is,
        "turns",
    ),
    Bug(
        "micro-batches added where their mean was meant",
        ("deepspeedai/DeepSpeed#7773",),
        "With accumulation gradients were larger by the number of micro-batches.",
        DOUBLED,
        plants.turns_not_averaged,
        "turns",
    ),
    Bug(
        "whole logits in a loss of parts",
        ("NVIDIA/Megatron-LM#7452, item 2",),
        "A loss that sums exponentials over ranks was given logits that had been gathered.",
        DOUBLED,
        plants.exponentials_summed_again,
        "vocabulary",
    ),
    Bug(
        "to parts of a sum and back",
        ("pytorch/pytorch#172932",),
        "A value was turned into parts of a sum and back, as though that were nothing, also for its gradient.",
        DOUBLED,
        plants.round_trip_is_nothing,
        "made_again",
    ),
    Bug(
        "the mean of means of micro-batches",
        ("huggingface/transformers#34191", "huggingface/transformers#35203"),
        "Each micro-batch divided by its own number of tokens; with unequal numbers that is not the mean of the batch.",
        COUNT,
        plants.turns_count_their_own,
        "turns",
    ),
    Bug(
        "the mean of each device's tokens",
        (
            "huggingface/transformers#34242",
            "huggingface/transformers#37474",
            "huggingface/transformers#39392",
            "verl-project/verl#5983",
        ),
        "Every rank divided its loss by the tokens that it had itself.",
        COUNT,
        value_not_summed("*sum*", "*div*"),
        "counted_by_rows",
    ),
    Bug(
        "the masked mean of a cut sequence",
        ("NVIDIA/Megatron-LM#7452, item 9", "NVIDIA/Megatron-LM#7513", "NVIDIA/Megatron-LM#673"),
        "The sum over a cut sequence was divided by the count of each part.",
        COUNT,
        value_not_summed("/sum.1*", "/div"),
        "two_counts",
    ),
    Bug(
        "the count of a second loss",
        ("NVIDIA/Megatron-LM#7452, item 3", "NVIDIA/Megatron-LM#7498"),
        "A head that predicts one token further has fewer targets, and counted those of its own rank.",
        COUNT,
        value_not_summed("/sum.3*", "/div.1"),
        "two_counts",
    ),
    Bug(
        "a product of two means",
        ("NVIDIA/Megatron-LM#3768", "NVIDIA/Megatron-LM#3672", "NVIDIA/Megatron-LM#3959"),
        "A loss that balances experts depended on how many ranks share the tokens.",
        COUNT,
        value_not_summed("/sum.*", "/div.2"),
        "experts",
    ),
    Bug(
        "a product of two pending sums",
        ("NVIDIA/Megatron-LM#3672",),
        "A product taken on each rank before the sums is not the product of the sums.",
        COUNT,
        rule("mul", "..., ... -> ...", "x+y"),
        "rule of mul",
        Place.PLANNING,
    ),
    Bug(
        "a counter that moves again in backward",
        ("pytorch/torchtitan#1593",),
        "Recomputing forward also repeated the update of a count, which balancing then read doubled.",
        COUNT,
        plants.counts_move_twice,
        "pictures_made_again",
    ),
    Bug(
        "smoothing by the words of one rank",
        (
            "NVIDIA/Megatron-LM#7452, item 1",
            "NVIDIA/Megatron-LM#737",
            "NVIDIA/Megatron-LM#7464",
            "NVIDIA/Megatron-LM#7466",
        ),
        "Label smoothing needs the number of all words and the mean over them; both were one rank's.",
        COUNT,
        plants.smooths_by_own_classes,
        "vocabulary",
    ),
    Bug(
        "norms count what all ranks hold",
        ("NVIDIA-NeMo/RL#3788",),
        "The norm of all gradients had those that every rank holds once for each rank.",
        OPTIMIZER,
        plants.whole_called_cut,
        "clipped",
    ),
    Bug(
        "norms leave out what is cut",
        ("NVIDIA/Megatron-LM#7452, item 8", "NVIDIA/Megatron-LM#7530", "NVIDIA/Megatron-LM#5916"),
        "A parameter of one number a head, which is cut, was taken for whole: other ranks' heads were not in the norm.",
        OPTIMIZER,
        plants.heads_called_whole,
        "clipped",
    ),
    Bug(
        "what is gathered again, over another group",
        ("NVIDIA/Megatron-LM#7452, item 4", "NVIDIA/Megatron-LM#6760"),
        "Recomputing a layer gathered its input over the ranks of another layer.",
        GROUP,
        plants.regathers_over_the_other_axis,
        "made_again",
    ),
    Bug(
        "gradients in the bucket of another group",
        ("NVIDIA/Megatron-LM#5916",),
        "Gradients of some parameters were reduced over the group of the others.",
        GROUP,
        plants.bucket_over_the_other_axis,
        "mlp",
    ),
    Bug(
        "groups of an expanded mesh",
        ("microsoft/nnscaler#44",),
        "Collectives ran over the processes of another axis.",
        GROUP,
        plants.groups_are_swapped,
        "mlp",
    ),
    Bug(
        "two cuts of one dim, in the other order",
        ("pytorch/pytorch#129229", "pytorch/pytorch#129206"),
        "Parts that two axes cut were put together in the wrong order: whole tensors came back permuted.",
        ORDER,
        plants.axes_reversed,
        "mlp_sharded",
    ),
    Bug(
        "a view of a cut dim",
        ("pytorch/pytorch#179502",),
        "A view moved the cut dim to another place and was called cut there, without an exchange.",
        ORDER,
        plants.rule_changed("view", _inner_for_outer),
        "rule of view",
        Place.PLANNING,
    ),
    Bug(
        "a fused weight stored straight through",
        ("deepspeedai/DeepSpeed#3844", "ndif-team/nnsight#719"),
        "Queries, keys and values in one weight were cut as if they were one: a rank had rows of queries only.",
        ORDER,
        plants.blocks_ignored,
        "fused",
    ),
    Bug(
        "a fused weight cut straight through",
        ("NVIDIA/Megatron-LM#4841",),
        "The same on the way from one cut to another.",
        ORDER,
        GPT2_MUTANTS["a fused weight is cut straight through"],
        "fused",
    ),
    Bug(
        "rotary positions of a cut sequence",
        ("NVIDIA/Megatron-LM#3405",),
        "Positions were counted from the beginning of each rank's part.",
        ORDER,
        plants.positions_from_zero,
        "positions",
    ),
    Bug(
        "backward of attention by parts",
        ("NVIDIA/Megatron-LM#1464", "arXiv:2506.09280"),
        "Gradients of attention over a cut sequence were wrong, for parts went by their own sums.",
        ORDER,
        plants.backward_of_own_sums,
        "positions",
        is_nightly=True,
    ),
    Bug(
        "the rows that a mask is for",
        ("NVIDIA/Megatron-LM#5191",),
        "The mask of a part of the queries was that of other rows.",
        ORDER,
        plants.queries_from_zero,
        "positions",
        is_nightly=True,
    ),
    Bug(
        "an uneven part that lies strided",
        ("pytorch/pytorch#168134",),
        "Where a dim does not share evenly, parts were put together at wrong places.",
        UNEVEN,
        plants.padding_is_counted,
        "positions",
        is_nightly=True,
    ),
    Bug(
        "the mean of uneven parts",
        ("pytorch/pytorch#162692",),
        "The mean of each part's mean was taken for the mean of all.",
        UNEVEN,
        MUTANTS["a mean is divided by the local count"],
        "mlp",
    ),
    Bug(
        "statistics of unequal batches",
        ("pytorch/pytorch#22192", "pytorch/pytorch#36688", "pytorch/pytorch#36382"),
        "Synchronised batch norm weighed ranks alike, though they had unequal numbers of pictures.",
        UNEVEN,
        plants.statistics_of_own_count,
        "pictures",
    ),
    Bug(
        "a vocabulary that ranks do not share evenly",
        ("NVIDIA/Megatron-LM#1754",),
        "With a number of words that the ranks do not divide, losses were off by more than half.",
        UNEVEN,
        plants.starts_round_down,
        "vocabulary",
    ),
    Bug(
        "a sum in eight bits where float32 was promised",
        ("pytorch/pytorch#190626", "pytorch/pytorch#190627"),
        "The dtype of reductions held for one of two sums; the other ran in the dtype of compute.",
        DTYPE,
        plants.cast_after_the_sum,
        "reduced_in_float32",
    ),
    Bug(
        "micro-batches added up in the dtype that travels",
        ("pytorch/pytorch#194628",),
        "Parts of micro-batches were rounded to the dtype of messages and added up in it.",
        DTYPE,
        plants.waits_in_its_own_dtype,
        "waits_in_float32",
    ),
    Bug(
        "one copy clipped, the others not",
        ("deepspeedai/DeepSpeed#1801",),
        "Norms that all tensor ranks hold were clipped on the first rank alone; copies drifted apart for weeks.",
        STALE,
        plants.one_copy_is_scaled,
        "mlp",
    ),
    Bug(
        "replicas from different seeds",
        ("allenai/OLMo-core#319", "pytorch/pytorch#178569"),
        "Copies of a model started from other numbers, and nobody sent the first rank's.",
        STALE,
        plants.own_starting_values,
        "other_starts",
    ),
    Bug(
        "one weight at both ends",
        ("uw-syfi/piper#13",),
        "Table and head are one weight on several ranks, and their gradients were not brought together.",
        STALE,
        gradient_not_summed("table.weight*"),
        "tied_by_rows",
    ),
    Bug(
        "the last micro-batch alone",
        ("allenai/open-instruct#1498", "NVIDIA-NeMo/Automodel#3530"),
        "Gradients were overwritten, or forgotten, between micro-batches.",
        STALE,
        plants.last_micro_batch_alone,
        "waiting",
    ),
    Bug(
        "one rank leaves a step out",
        ("NVIDIA-NeMo/Megatron-Bridge#5591",),
        "Ranks kept loss scales of their own, and after an overflow some of them stepped and others did not.",
        STALE,
        plants.each_skips_alone,
        "overflow",
        Place.RANKS,
        is_nightly=True,
    ),
    Bug(
        "read before the sum has ended",
        ("pytorch/pytorch#115710",),
        "A flag was copied while its asynchronous sum was still under way.",
        RACE,
        plants.nobody_waits,
        "under_way",
        Place.RANKS,
    ),
    Bug(
        "a bucket written while it travels",
        (
            "deepspeedai/DeepSpeed#7805",
            "deepspeedai/DeepSpeed#7804",
            "deepspeedai/DeepSpeed#7371",
            "deepspeedai/DeepSpeed#6993",
        ),
        "Two buffers take turns; a wrong number let a bucket overwrite the one that was still needed.",
        RACE,
        plants.one_buffer_for_all,
        "mlp",
    ),
    Bug(
        "one of two streams is waited for",
        ("deepspeedai/DeepSpeed#8061", "deepspeedai/DeepSpeed#5545", "deepspeedai/DeepSpeed#7965"),
        "Work ran on several streams, and the reader waited for one of them.",
        RACE,
        plants.every_other_is_waited_for,
        "under_way",
        Place.RANKS,
        is_nightly=True,
    ),
    Bug(
        "weights of the step before",
        ("NVIDIA/Megatron-LM#950",),
        "With gathers that overlap, layers that ran in another order had the weights of the last step.",
        RACE,
        plants.gathers_are_remembered,
        "mlp_sharded",
    ),
    Bug(
        "gathered into the gradients' memory",
        ("NVIDIA/Megatron-LM#4609",),
        "Parameters were received in the buffer of gradients, which then began at what lay there.",
        RACE,
        MUTANTS["a gradient buffer is handed out twice"],
        "tables",
    ),
    Bug(
        "every rank draws the same part",
        ("pytorch/torchtitan#3106",),
        "Ranks drew equal initial numbers for different parts of a tensor.",
        RANDOM,
        plants.all_draw_the_first_part,
        "drawn_in_place",
    ),
    Bug(
        "one dropout mask for all parts",
        ("tenstorrent/tt-metal#16823", "tenstorrent/tt-metal#55947", "PaddlePaddle/PaddleFleetX#1005"),
        "Parts of one value had equal masks on all devices.",
        RANDOM,
        GPT2_MUTANTS["draws go by the place in the part"],
        "drops",
    ),
    Bug(
        "recompute draws another mask",
        ("allenai/OLMo-core#828",),
        "Forward ran again from another random state, and gradients were those of another network.",
        AGAIN,
        plants.redraws,
        "drops",
    ),
    Bug(
        "old pieces after a restart",
        ("NVIDIA/Megatron-LM#6920",),
        "Ranks that went on from a checkpoint held pieces that were not those of the model.",
        SAVED,
        plants.pieces_change_places,
        "resumed",
        Place.RANKS,
        is_nightly=True,
    ),
    Bug(
        "moments dropped on restart",
        ("KempnerInstitute/KempnerForge#115",),
        "A fresh optimizer had no place for saved moments: they were dropped, and only a step would tell.",
        SAVED,
        plants.moments_are_dropped,
        "resumed",
        is_nightly=True,
    ),
    Bug(
        "a number read out of a part",
        ("pytorch/pytorch#167213",),
        "Inside a model, `.item()` of a value that waits for its sum read one rank's part.",
        MISSING,
        shown_by="tests/module/test_whole_tensors.py::test_lines_of_a_loop_do_what_they_do_on_one_device",
        why="a model that reads a number out of a tensor is refused while it is traced; a loop reads that of the whole",
    ),
    Bug(
        "a model that was not wrapped",
        ("OrderLab/TrainCheck",),
        "Under one option a script trained the bare model on every rank, and nothing failed.",
        MISSING,
        shown_by="tests/module/test_parallel_model.py::test_an_optimizer_from_before_is_refused",
        why="an optimizer of the parameters from before autoparallelize is refused when it steps",
    ),
    Bug(
        "a write into a slice is lost",
        ("pytorch/pytorch#139735",),
        "Assigning to a slice of a distributed tensor changed a copy.",
        STALE,
        shown_by="tests/module/test_whole_tensors.py::test_lines_of_a_loop_do_what_they_do_on_one_device",
        why="no write is left after tracing, each is spelled as a new value; what a loop writes to a slice reaches it",
    ),
    Bug(
        "evaluation leaves stale weights",
        ("NVIDIA/Megatron-LM#4563",),
        "Evaluation gathered weights without converting them, and training went on with old columns.",
        STALE,
        shown_by="tests/module/test_situations.py::test_train_eval_lengths_and_no_labels",
        why="nothing is kept of a gathered weight: each call gathers and casts the parameter itself",
    ),
    Bug(
        "a matrix optimizer on parts",
        ("deepspeedai/DeepSpeed#8437",),
        "An optimizer that needs the whole matrix made its step of each rank's part.",
        OPTIMIZER,
        shown_by="tests/module/test_optimizers.py::test_it_makes_the_step_of_one_device_or_is_a_letter",
        why="every optimizer of torch steps as on one device, or is refused by a letter",
    ),
    Bug(
        "a random op that is repeated by choice",
        ("pytorch/pytorch#190758", "pytorch/pytorch#190717"),
        "To save memory a dropout was computed again in backward, and each time drew anew.",
        AGAIN,
        shown_by=(
            "tests/codegen/test_recompute.py::"
            "test_gradients_and_buffers_are_bit_for_bit_those_of_the_plan_that_saves_all"
        ),
        why="draws are functions of a key and a place, so that repeating them changes nothing",
    ),
]


def named_test(shown_by: str) -> tuple[str, str]:
    """The module and the function of a test that is named as file::test."""
    path, name = shown_by.split("::")
    return path.removesuffix(".py").replace("/", "."), name
