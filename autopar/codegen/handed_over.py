"""Let backward hand final gradients over to the optimizer, where nothing reads their parameters any more.

The host steps these parameters while backward goes on (`runtime/backward_steps.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.fx as fx

from autopar.codegen.buffers import buffer_of
from autopar.codegen.halves import Joint
from autopar.codegen.offloaded import called, with_its_parts
from autopar.runtime.backward_steps import hand_over
from autopar.runtime.host import end_from_host


def hand_over_gradients(joint: Joint, primals: Mapping[str, str], names: Collection[str]) -> None:
    """Let backward hand over the gradients of these parameters; it alone has final ones.

    `primals` are the names of the placeholders of parameters, by the names of these.

    before    def backward(w, x, g):    e = all_reduce(mm(g, x));  d = mm(g, w);  r = relu(d);  return r, e
    after     def backward(w, x, g):    e = all_reduce(mm(g, x));  d = mm(g, w);  e_final = hand_over(e, "w");
                                        r = relu(d);  return r, e_final
    """
    given = {primal: name for name, primal in primals.items() if name in names}
    if not given:
        return
    backward = joint.backward
    end = backward.output_node()
    results = list(end.args[0])
    readers = _readers_of_parameters(joint)
    order = [node.name for node in joint.forward.find_nodes(op="placeholder")]
    for place, i in enumerate(joint.gradients):
        made = results[place]
        if made is None or order[i] not in given:
            continue
        others = [user for user in made.users if user is not end]
        last = max([made, *others, *readers.get(order[i], ())])
        with backward.inserting_after(with_its_parts(last)):
            final = called(backward, hand_over, (made, given[order[i]]), f"{made.name}_final")
        final.meta["val"] = made.meta["val"]
        results[place] = final
    end.args = (tuple(results),)
    backward.lint()


def _readers_of_parameters(joint: Joint) -> dict[str, list[fx.Node]]:
    """The nodes of backward that read each parameter's memory, by the name of its placeholder in forward."""
    saved = joint.forward.output_node().args[0][joint.outputs :]
    given = joint.backward.find_nodes(op="placeholder")
    parameter_of = {node: buffer_of(kept) for node, kept in zip(given, saved, strict=False)}
    found: dict[str, list[fx.Node]] = {}
    for node in joint.backward.nodes:
        owner = parameter_of.get(buffer_of(node))
        if owner is not None and owner.op == "placeholder":
            found.setdefault(owner.name, []).extend(user for user in node.users if user.op != "output")
    for name, readers in found.items():
        found[name] = [*readers, *(end for begun in readers for end in begun.users if _ends(end))]
    return found


def _ends(node: fx.Node) -> bool:
    """Whether a node ends the copy of a parameter that lies on the host."""
    return node.target is end_from_host
