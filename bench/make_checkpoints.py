# SPDX-License-Identifier: Apache-2.0
"""Writes the checkpoints that the load benchmark reads.

    make_checkpoints.py [--dir DIR] [--quick] [dense] [moe] [small]

    dense   10 layers, hidden 4096, BF16, 93 tensors in 9 files, 4.57 GB: few large tensors
    moe     12 layers of 64 experts, hidden 2048, BF16, 2,391 tensors in 15 files, 7.92 GB: many of 3 MB
    small   100,000 tensors of 8 to 16 KiB in 8 files, 1.2 GB: what a tensor costs beside its bytes

--quick writes the same kinds at about 300, 170 and 60 MB, beside the full ones. Names are those of real models, with
config.json and an index. A checkpoint that is there already, written by this version of this file, is left alone.

Contents: one random block of 1 MiB, for each tensor and each MiB of it combined by XOR with a number of its own. Any byte that
lands in the wrong tensor or at the wrong place gives another checksum, and writing goes at the disk's speed.
"""

import argparse
import hashlib
import json
import os
import struct
import sys

import numpy

VERSION = 1
BLOCK_BYTES = 1 << 20
GOLDEN = 0x9E3779B97F4A7C15


def attention(prefix, hidden):
    """The parts of a layer that dense and MoE models share."""
    matrices = [(f"{prefix}.self_attn.{part}_proj.weight", [hidden, hidden]) for part in "qkvo"]
    norms = [(f"{prefix}.{part}_layernorm.weight", [hidden]) for part in ("input", "post_attention")]
    return matrices + norms


def ends(vocab, hidden):
    """What stands before and after the layers."""
    return [("model.embed_tokens.weight", [vocab, hidden])], [
        ("model.norm.weight", [hidden]), ("lm_head.weight", [vocab, hidden])]


def dense(layers, hidden, inner, vocab):
    """A llama-like model."""
    first, last = ends(vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        first += attention(prefix, hidden)
        first += [(f"{prefix}.mlp.{part}_proj.weight", [inner, hidden]) for part in ("gate", "up")]
        first.append((f"{prefix}.mlp.down_proj.weight", [hidden, inner]))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
              "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "torch_dtype": "bfloat16"}
    return first + last, config


def moe(layers, experts, hidden, inner, vocab):
    """Routed experts in every layer."""
    first, last = ends(vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        first += attention(prefix, hidden)
        first.append((f"{prefix}.mlp.gate.weight", [experts, hidden]))
        for expert in range(experts):
            name = f"{prefix}.mlp.experts.{expert}"
            first += [(f"{name}.w1.weight", [inner, hidden]), (f"{name}.w2.weight", [hidden, inner]),
                      (f"{name}.w3.weight", [inner, hidden])]
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": layers,
              "num_local_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner,
              "vocab_size": vocab, "torch_dtype": "bfloat16"}
    return first + last, config


def small(count, experts):
    """Quantised experts leave many such: `count` tensors of [64 to 128 by 4, 64] values of 2 bytes."""
    tensors = []
    for number in range(count):
        expert, part = divmod(number, 4)
        layer, expert = divmod(expert, experts)
        name = f"model.layers.{layer}.mlp.experts.{expert}.w{part + 1}.weight"
        tensors.append((name, [64 + 4 * (number * 7 % 17), 64]))
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts,
              "num_hidden_layers": -(-count // (4 * experts)), "hidden_size": 64, "torch_dtype": "bfloat16"}
    return tensors, config


FULL = {"dense": (dense, (10, 4096, 11008, 32000), 9), "moe": (moe, (12, 64, 2048, 768, 32000), 15),
        "small": (small, (100000, 256), 8)}
QUICK = {"dense": (dense, (4, 2048, 5504, 8192), 3), "moe": (moe, (3, 16, 1024, 512, 8192), 3),
         "small": (small, (5000, 64), 2)}


def tensor_bytes(shape):
    """Bytes of a BF16 tensor."""
    return 2 * int(numpy.prod(shape, dtype=numpy.int64))


def shards(tensors, count):
    """Consecutive shares of about the same number of bytes, as tools that write checkpoints cut them."""
    total, done = sum(tensor_bytes(shape) for _, shape in tensors), 0
    shares = [[] for _ in range(count)]
    for name, shape in tensors:
        shares[min(count - 1, done * count // total)].append((name, shape))
        done += tensor_bytes(shape)
    return [share for share in shares if share]


def header(share):
    """Length and JSON header of a file, padded with spaces to 8 bytes as the `safetensors` package does."""
    entries, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in share:
        end = offset + tensor_bytes(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def contents(block, name, count):
    """The bytes of a tensor, in blocks."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    for number in range(-(-count // BLOCK_BYTES)):
        mask = numpy.uint64((key + number * GOLDEN) % (1 << 64))
        length = min(BLOCK_BYTES, count - number * BLOCK_BYTES)
        yield memoryview(block ^ mask if length == BLOCK_BYTES else block[:-(-length // 8)] ^ mask).cast("B")[:length]


def write(folder, tensors, config, shard_count):
    """One checkpoint, synced to the disk."""
    block = numpy.random.Generator(numpy.random.PCG64(7)).integers(0, 1 << 64, BLOCK_BYTES // 8, numpy.uint64)
    os.makedirs(folder, exist_ok=True)
    weight_map, parts = {}, shards(tensors, shard_count)
    for number, share in enumerate(parts, 1):
        shown = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with open(os.path.join(folder, shown), "wb", buffering=4 * BLOCK_BYTES) as file:
            file.write(header(share))
            for name, shape in share:
                weight_map[name] = shown
                for piece in contents(block, name, tensor_bytes(shape)):
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    total = sum(tensor_bytes(shape) for _, shape in tensors)
    for shown, document in (("model.safetensors.index.json",
                             {"metadata": {"total_size": total}, "weight_map": weight_map}), ("config.json", config)):
        with open(os.path.join(folder, shown), "w") as file:
            json.dump(document, file)
    return total


def make(root, kind, quick):
    """The folder of a checkpoint, written if it is not there. Safe to interrupt: the stamp is written last."""
    shape, arguments, shard_count = (QUICK if quick else FULL)[kind]
    folder = os.path.join(root, kind + ("-quick" if quick else ""))
    stamp = os.path.join(folder, "written-by")
    wanted = f"{VERSION} {arguments} {shard_count}\n"
    if os.path.exists(stamp) and open(stamp).read() == wanted:
        return folder
    tensors, config = shape(*arguments)
    print(f"writing {folder}: {len(tensors)} tensors", file=sys.stderr)
    total = write(folder, tensors, config, shard_count)
    with open(stamp, "w") as file:
        file.write(wanted)
    print(f"wrote {total / 1e9:.2f} GB", file=sys.stderr)
    return folder


def make_warm_up(root):
    """A small file that Python loaders read before their clock starts, to have everything imported and started."""
    path = os.path.join(root, "warm-up", "model.safetensors")
    if not os.path.exists(path):
        tensors, config = dense(1, 256, 512, 1024)
        write(os.path.dirname(path), tensors, config, 1)
        os.rename(os.path.join(os.path.dirname(path), "model-00001-of-00001.safetensors"), path)
    return path


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description="Writes the checkpoints of the load benchmark.")
    parser.add_argument("--dir", default=os.environ.get("TUNDISH_BENCH_DIR", "build-bench/checkpoints"))
    parser.add_argument("--quick", action="store_true", help="scaled down, about 600 MB in all")
    parser.add_argument("kinds", nargs="*", metavar="dense|moe|small")
    options = parser.parse_args()
    unknown = [kind for kind in options.kinds if kind not in FULL]
    if unknown:
        parser.error(f"expected dense, moe or small, found {unknown[0]!r}")
    for kind in options.kinds or FULL:
        print(make(options.dir, kind, options.quick))


if __name__ == "__main__":
    main()
