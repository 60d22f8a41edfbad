# SPDX-License-Identifier: Apache-2.0
"""Small safetensors files and checkpoints for tests, standard library only.

Contents are deterministic: the bytes of a tensor come from its name (SHAKE-128), so that any two files with the
same tensor hold the same bytes and a test can compute what it expects without keeping the file.

    write_file(path, tensors, metadata=None)     one file; `tensors`: list of (name, dtype, shape[, data])
    header_only(path, tensors, metadata=None)    the same with a hole in place of the data (ftruncate)
    raw_file(path, header, data=b"", length=None)  any bytes as a header, for files that must be refused
    dense_checkpoint(folder, ...)                attention and MLP, index and config.json
    moe_checkpoint(folder, ...)                  routed experts, scales, a draft stack, index and config.json
    hostile_files(folder)                        {name of the kind: path}, one for each thing that is refused
    tensor_bytes(name, count)                    the bytes that write_file gives to a tensor
"""

import hashlib
import json
import os
import struct

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}


def size_of(dtype, shape):
    """Bytes of a tensor."""
    count = 1
    for dim in shape:
        count *= dim
    return count * BITS[dtype] // 8


def tensor_bytes(name, count):
    """`count` bytes that depend on the name alone; a 64 KiB block, numbered and repeated, to be fast on large ones."""
    if count <= 65536:
        return hashlib.shake_128(name.encode()).digest(count)
    block = bytearray(hashlib.shake_128(name.encode()).digest(65536))
    parts = []
    for number in range((count + 65535) // 65536):
        block[:8] = struct.pack("<Q", number)
        parts.append(bytes(block))
    return b"".join(parts)[:count]


def layout(tensors):
    """Header entries and the length of the data for tensors stored one after the other in list order."""
    entries, offset = {}, 0
    for name, dtype, shape, *_ in tensors:
        end = offset + size_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return entries, offset


def header_bytes(entries, metadata=None, align=8):
    """Length and JSON, padded with spaces so that the data begins at a multiple of `align`."""
    document = dict(entries) if metadata is None else {"__metadata__": metadata, **entries}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text


def write_file(path, tensors, metadata=None, align=8):
    """Writes one file. A tensor may bring its own data as a fourth element. Returns its size."""
    entries, _ = layout(tensors)
    with open(path, "wb") as file:
        file.write(header_bytes(entries, metadata, align))
        for name, dtype, shape, *data in tensors:
            file.write(data[0] if data else tensor_bytes(name, size_of(dtype, shape)))
        return file.tell()


def header_only(path, tensors, metadata=None, align=8):
    """A valid file whose data is a hole: any nominal size at no cost. Returns its size."""
    entries, length = layout(tensors)
    header = header_bytes(entries, metadata, align)
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + length)
    return len(header) + length


def raw_file(path, header, data=b"", length=None):
    """A file with `header` (bytes or text) as it is, and `length` in its first 8 bytes (default: the true one)."""
    header = header.encode() if isinstance(header, str) else header
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def write_checkpoint(folder, shards, config=None, index=True, sparse=False):
    """A folder from a list of tensor lists: model-0000N-of-0000M.safetensors, the index, config.json."""
    os.makedirs(folder, exist_ok=True)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (header_only if sparse else write_file)(os.path.join(folder, name), tensors, {"format": "pt"})
        for tensor in tensors:
            weight_map[tensor[0]] = name
            total += size_of(tensor[1], tensor[2])
    if index:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    if config is not None:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
    return folder


def deal(tensors, shard_count):
    """Tensors in `shard_count` consecutive shares of about the same number."""
    share = -(-len(tensors) // shard_count)
    return [tensors[first:first + share] for first in range(0, len(tensors), share)]


def dense_tensors(prefix="model.", layers=2, hidden=64, heads=8, kv_heads=4, inner=128, vocab=1000, dtype="BF16"):
    """A llama-like list of tensors."""
    dim = hidden // heads
    tensors = [(f"{prefix}embed_tokens.weight", dtype, [vocab, hidden])]
    for layer in range(layers):
        at = f"{prefix}layers.{layer}."
        tensors += [
            (at + "input_layernorm.weight", dtype, [hidden]),
            (at + "self_attn.q_proj.weight", dtype, [heads * dim, hidden]),
            (at + "self_attn.k_proj.weight", dtype, [kv_heads * dim, hidden]),
            (at + "self_attn.v_proj.weight", dtype, [kv_heads * dim, hidden]),
            (at + "self_attn.o_proj.weight", dtype, [hidden, heads * dim]),
            (at + "post_attention_layernorm.weight", dtype, [hidden]),
            (at + "mlp.gate_proj.weight", dtype, [inner, hidden]),
            (at + "mlp.up_proj.weight", dtype, [inner, hidden]),
            (at + "mlp.down_proj.weight", dtype, [hidden, inner]),
        ]
    return tensors + [(f"{prefix}norm.weight", dtype, [hidden]), ("lm_head.weight", dtype, [vocab, hidden])]


def dense_checkpoint(folder, shards=2, sparse=False, index=True, **shape):
    """A dense checkpoint; `shape` as dense_tensors takes it. Returns the folder."""
    tensors = dense_tensors(**shape)
    hidden, heads = shape.get("hidden", 64), shape.get("heads", 8)
    config = {
        "num_attention_heads": heads, "num_key_value_heads": shape.get("kv_heads", 4), "hidden_size": hidden,
        "head_dim": hidden // heads, "vocab_size": shape.get("vocab", 1000),
        "intermediate_size": shape.get("inner", 128),
    }
    return write_checkpoint(folder, deal(tensors, shards), config, index, sparse)


def expert_tensors(at, number, inner, hidden):
    """One MXFP4 expert: packed weights I8 (two values a byte) and a scale for each 32 values."""
    at = f"{at}experts.{number}."
    return [
        (at + "w1.weight", "I8", [inner, hidden // 2]), (at + "w1.scale", "F8_E8M0", [inner, hidden // 32]),
        (at + "w2.weight", "I8", [hidden, inner // 2]), (at + "w2.scale", "F8_E8M0", [hidden, inner // 32]),
        (at + "w3.weight", "I8", [inner, hidden // 2]), (at + "w3.scale", "F8_E8M0", [inner, hidden // 32]),
    ]


def moe_checkpoint(folder, layers=1, experts=4, draft_experts=2, inner=128, hidden=256, vocab=512, shards=3,
                   sparse=False, index=True, config=True):
    """Routed experts under layers.N.ffn, per-tensor scales, a draft stack `mtp.0`; inner=2304, hidden=5120 are the shapes
    of a large model's. Returns the folder."""
    tensors = [("embed.weight", "BF16", [vocab, hidden])]
    stacks = [(f"layers.{layer}.", experts) for layer in range(layers)] + [("mtp.0.", draft_experts)]
    for at, count in stacks:
        tensors += [
            (at + "attn.wq_a.weight", "BF16", [hidden, hidden]), (at + "attn.q_norm.weight", "BF16", [hidden]),
            (at + "ffn.gate.weight", "BF16", [max(count, 1), hidden]), (at + "ffn.empty", "F32", [0]),
            (at + "ffn.mask", "U8", [3]), (at + "ffn_norm.weight", "F32", [hidden]),
        ]
        for number in range(count):
            tensors += expert_tensors(at + "ffn.", number, inner, hidden)
            tensors.append((f"{at}ffn.experts.{number}.w1.input_scale", "F32", []))
    tensors += [("norm.weight", "F32", [hidden]), ("head.weight", "BF16", [vocab, hidden])]
    facts = {
        "n_routed_experts": experts, "dspark_n_routed_experts": draft_experts, "hidden_size": hidden,
        "moe_intermediate_size": inner, "vocab_size": vocab,
    }
    return write_checkpoint(folder, deal(tensors, shards), facts if config else None, index, sparse)


def hostile_files(folder):
    """Files that must be refused, by kind."""
    os.makedirs(folder, exist_ok=True)
    entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    kinds = {
        "empty_object_too_long": (b"{}", b"", 132095296),
        "zero_length": (b"", b"\0" * 1016, 0),
        "beyond_file": (b"{}", b"", 4096),
        "not_json": (b"hello world", b"", None),
        "truncated": ('{"w":%s}' % entry, b"\0" * 5, None),
        "trailing": ('{"w":%s}' % entry, b"\0" * 16, None),
        "duplicate": ('{"w":%s,"w":%s}' % (entry, entry), b"\0" * 8, None),
        "shared_range": ('{"a":%s,"b":%s}' % (entry, entry), b"\0" * 8, None),
        "hole": ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', b"\0" * 12, None),
        "shape": ('{"w":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}', b"\0" * 4, None),
        "dtype": ('{"w":{"dtype":"Q4_K","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8, None),
        "negative": ('{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', b"\0" * 8, None),
        "float_offset": ('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8.0]}}', b"\0" * 8, None),
        "metadata_number": ('{"__metadata__":{"a":1},"w":%s}' % entry, b"\0" * 8, None),
    }
    paths = {}
    for kind, (header, data, length) in kinds.items():
        paths[kind] = raw_file(os.path.join(folder, kind + ".safetensors"), header, data, length)
    plain = {
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n",
        "html": b"<!DOCTYPE html><html><body>404</body></html>",
        "zip": b"PK\x03\x04" + b"\0" * 64,
        "zeros": b"\0" * 1024,
        "short": b"abc",
    }
    for kind, contents in plain.items():
        paths[kind] = os.path.join(folder, kind + ".safetensors")
        with open(paths[kind], "wb") as file:
            file.write(contents)
    return paths
