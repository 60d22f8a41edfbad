# SPDX-License-Identifier: Apache-2.0
"""The rules (docs/design/plan.md) for who gets which slice of which tensor, written down once more and apart from the library.

Works on whole tensors (name, shape) and Python integers; knows nothing of reads, slabs or plans. A slice is (dim, [(first, last)...]);
None is the whole tensor.
"""
import fnmatch
import math
import re

EXPERT = re.compile(r"^(.*)\.experts\.(\d+)\.(.*)$")
SCALE_BLOCK = 128


class Layout:
    """`tp` ranks, EP over `ep` of them, one data-parallel replica."""

    def __init__(self, tp, ep, rank):
        self.tp, self.rank = tp, rank
        self.ep = ep
        self.moe_tp = tp // ep
        self.ep_rank = rank // self.moe_tp
        self.moe_tp_rank = rank % self.moe_tp

    def owns(self, number, count):
        """Contiguous blocks, the remainder to the lowest ranks."""
        share, rest = divmod(count, self.ep)
        first = self.ep_rank * share + min(self.ep_rank, rest)
        return first <= number < first + share + (1 if self.ep_rank < rest else 0)


def in_phase(name, phase):
    if phase == "all":
        return True
    draft = name.startswith("mtp.")
    if phase == "draft":
        return draft
    return not draft and not fnmatch.fnmatchcase(name, "*.engram.embed.*")


def per_tensor_scale(name, shape):
    return name.endswith("input_scale") or (name.endswith("scale") and math.prod(shape) == 1 and len(shape) < 2)


def even(size, ranks, rank):
    """One of `ranks` equal shares, or None where it does not divide."""
    if ranks == 1 or size % ranks:
        return None
    return [(size // ranks * rank, size // ranks * (rank + 1))]


def expert_slice(rest, shape, layout):
    part = rest.split(".")[0]
    if len(shape) != 2 or layout.moe_tp == 1:
        return None
    dim = {"w1": 0, "w3": 0, "gate_proj": 0, "up_proj": 0, "w2": 1, "down_proj": 1}.get(part)
    if dim is None:
        return None
    ranges = even(shape[dim], layout.moe_tp, layout.moe_tp_rank)
    return (dim, ranges) if ranges else None


def heads(count, head_dim, layout):
    """Rows of this rank's heads; fewer heads than ranks are replicated."""
    if count >= layout.tp:
        return even(count * head_dim, layout.tp, layout.rank)
    head = layout.rank // (layout.tp // count)
    return [(head * head_dim, (head + 1) * head_dim)]


def shifted(ranges, by):
    return [(first + by, last + by) for first, last in ranges]


def dense_slice(name, shape, layout, config):
    """The table for dense tensors."""
    tp, rank = layout.tp, layout.rank
    words = name.split(".")
    part, kind = words[-2], words[-1]
    column = {"gate_proj", "up_proj", "w1", "w3", "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj",
              "qkv_proj", "gate_up_proj"}
    row = {"o_proj", "down_proj", "w2"}
    nq, nkv, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    if tp == 1:
        return None
    if part in ("embed_tokens", "lm_head"):
        padded = -(-shape[0] // math.lcm(64, tp)) * math.lcm(64, tp)
        share = padded // tp
        return 0, [(min(rank * share, shape[0]), min((rank + 1) * share, shape[0]))]
    if kind == "bias":
        return (0, even(shape[0], tp, rank)) if part in column else None
    if kind == "weight_scale_inv":
        dim = 0 if part in column else 1
        size = config["scaled"][part][dim]
        first, last = even(size, tp, rank)[0]
        return dim, [(first // SCALE_BLOCK, -(-last // SCALE_BLOCK))]
    if part in ("k_proj", "v_proj"):
        return 0, heads(nkv, head, layout)
    if part == "qkv_proj":
        kv = heads(nkv, head, layout)
        return 0, (heads(nq, head, layout) + shifted(kv, nq * head) + shifted(kv, (nq + nkv) * head))
    if part == "gate_up_proj":
        half = even(shape[0] // 2, tp, rank)
        return 0, half + shifted(half, shape[0] // 2)
    if part in column:
        ranges = even(shape[0], tp, rank)
        return (0, ranges) if ranges else None
    if part in row:
        ranges = even(shape[1], tp, rank)
        return (1, ranges) if ranges else None
    return None


def wanted(name, shape, layout, phase, policy, config):
    """False (not this rank's), None (whole) or a slice."""
    if not in_phase(name, phase):
        return False
    if policy == "auto":
        policy = "experts" if layout.ep == 1 and layout.moe_tp > 1 else "none"
    expert = EXPERT.match(name)
    if expert:
        owned = phase == "draft" or layout.ep == 1 or layout.owns(int(expert.group(2)), config["n_routed_experts"])
        if not owned and not per_tensor_scale(name, shape):
            return False
        if policy == "none" or per_tensor_scale(name, shape):
            return None
        return expert_slice(expert.group(3), shape, layout)
    return dense_slice(name, shape, layout, config) if policy == "all" else None
