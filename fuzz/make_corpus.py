#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpora: corpus/header (4 bytes of data length, then a header), corpus/index (index.json, config.json), corpus/segment (steps).

Each seed shows one rule or one spelling, so that a fuzzer starts with all of them in reach. Run in this folder; the files are committed.
"""
import json
import os
import struct

DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}


def entry(dtype="U8", shape="[1]", offsets="[0,1]", extra=""):
    return '{"dtype":"%s",%s"shape":%s,"data_offsets":%s}' % (dtype, extra, shape, offsets)


def one(name="w", **kwargs):
    return '{"%s":%s}' % (name, entry(**kwargs))


def headers():
    yield "empty-object", 0, "{}"
    yield "spaces", 1, ' \t\r\n{ "w" : ' + entry() + " } \n"
    yield "metadata", 1, '{"__metadata__":{"format":"pt","k\\n":"\\u00e9"},"w":' + entry() + "}"
    yield "metadata-null", 0, '{"__metadata__":null}'
    yield "metadata-twice", 0, '{"__metadata__":{},"__metadata__":{}}'
    yield "metadata-number", 0, '{"__metadata__":{"a":1}}'
    for name, bits in DTYPES.items():
        yield "dtype-" + name, bits, one(dtype=name, shape="[2,4]", offsets="[0,%d]" % bits)
    yield "dtype-unknown", 4, one(dtype="F33", shape="[1]", offsets="[0,4]")
    yield "dtype-escaped", 1, one(dtype="\\u00558")
    yield "scalar", 1, one(shape="[]")
    yield "zero-size", 0, one(shape="[2,0,3]", offsets="[0,0]")
    yield "zero-second", 1, '{"a":' + entry() + ',"b":' + entry(shape="[0]", offsets="[0,0]") + "}"
    yield "overflow", 0, one(shape="[4611686018427387904,4,0]", offsets="[0,0]")
    yield "no-overflow", 0, one(shape="[0,4611686018427387904,4]", offsets="[0,0]")
    yield "u64-max", 1, one(shape="[18446744073709551615]", offsets="[0,18446744073709551615]")
    yield "u64-over", 1, one(shape="[18446744073709551616]")
    yield "negative", 1, one(shape="[-1]")
    yield "minus-zero", 0, one(shape="[-0]", offsets="[0,0]")
    yield "real", 1, one(offsets="[0,1.0]")
    yield "exponent", 1, one(offsets="[0,1e0]")
    yield "leading-zero", 1, one(offsets="[0,01]")
    yield "three-offsets", 1, one(offsets="[0,1,2]")
    yield "one-offset", 1, one(offsets="[0]")
    yield "backwards", 1, one(offsets="[1,0]")
    yield "half-byte", 1, one(dtype="F4", shape="[3]")
    yield "extra", 1, one(extra='"x":{"a":[1,-2.5e+3,"s",null,true,{}],"b":false},')
    yield "extra-deep", 1, one(extra='"x":' + "[" * 40 + "]" * 40 + ",")
    yield "field-twice", 1, one(extra='"dtype":"U8",')
    yield "extra-twice", 1, one(extra='"x":1,"x":2,')
    yield "no-shape", 1, '{"w":{"dtype":"U8","data_offsets":[0,1]}}'
    yield "name-empty", 1, one("")
    yield "name-nul", 1, one("a\\u0000b")
    yield "name-pair", 1, one("\\ud83d\\ude00")
    yield "name-lone", 1, one("\\ud83d")
    yield "name-utf8", 1, one("é中😀")
    yield "name-escapes", 1, one('\\"\\\\\\/\\b\\f\\n\\r\\t')
    yield "name-twice", 2, '{"a":' + entry() + ',"a":' + entry(offsets="[1,2]") + "}"
    yield "name-twice-escaped", 2, '{"a":' + entry() + ',"\\u0061":' + entry(offsets="[1,2]") + "}"
    yield "shared-range", 1, '{"a":' + entry() + ',"b":' + entry() + "}"
    yield "hole", 3, '{"a":' + entry() + ',"b":' + entry(offsets="[2,3]") + "}"
    yield "overlap", 3, '{"a":' + entry(shape="[2]", offsets="[0,2]") + ',"b":' + entry(shape="[2]", offsets="[1,3]") + "}"
    yield "trailing", 9, one()
    yield "truncated", 0, one()
    yield "comma", 1, '{"w":' + entry() + ",}"
    yield "nul-padding", 0, "{}\0\0"
    yield "raw-nul", 1, one(shape="[1\0]")
    yield "byte-order-mark", 0, "\ufeff{}"
    yield "array", 0, "[]"
    names = ["model.layers.%d.mlp.experts.%d.w" % (i * 7 % 5, i) for i in range(20)]
    yield "many", 20, "{" + ",".join('"%s":%s' % (n, entry(offsets="[%d,%d]" % (i, i + 1))) for i, n in enumerate(names)) + "}"


def indexes():
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "sub/model-1.safetensors"}
    yield "index", json.dumps({"metadata": {"total_size": 3}, "weight_map": files})
    for name, file in (("absolute", "/x"), ("up", "../x"), ("middle", "a/../x"), ("last", "a/.."), ("dots", "a..b/..c"), ("none", "")):
        yield "index-" + name, json.dumps({"weight_map": {"a": file}})
    yield "index-number", '{"weight_map":{"a":1}}'
    yield "index-empty", '{"weight_map":{}}'
    yield "index-twice", '{"weight_map":{"a":"x","a":"x"}}'
    yield "config", json.dumps({"n_routed_experts": 256, "dspark_n_routed_experts": 4, "num_attention_heads": 8, "hidden_size": 64})
    yield "config-text", json.dumps({"text_config": {"moe_num_experts": [8, 8], "num_key_value_heads": 2}, "mtp_config": {"num_experts": 2}})
    yield "config-llm", json.dumps({"llm_config": {"num_local_experts": 8}, "language_config": {"mtp_num_experts": 3}})
    yield "config-odd", '{"num_experts":null,"n_routed_experts":-1,"num_local_experts":1.5,"moe_num_experts":[]}'


def write(folder, name, data):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def record(op, a=0, b=0, value=0):
    return struct.pack("<BBHQ", op, a, b, value % (1 << 64))


def segments():
    """A mode, then records: see segment_fuzz.c."""
    yield "attach", 0, []
    for name, offset in (("place-count", 12), ("max-bytes", 32), ("max-objects", 40), ("slots", 48), ("arena-offset", 64), ("arena-bytes", 72),
                         ("segment-bytes", 80), ("id", 16), ("on-dead", 108)):
        yield "attach-" + name, 0, [record(0, 7, offset, -64)]
        yield "attach-" + name + "-one", 0, [record(0, 3, offset, 1)]
    yield "attach-version", 0, [record(0, 3, 8, 2)]
    yield "attach-control-version", 0, [record(1, 3, 8, 2)]
    yield "attach-control-bytes", 0, [record(1, 7, 32, 1 << 40)]
    yield "attach-short", 0, [record(2, value=4096)]
    yield "attach-odd", 0, [record(2, value=12289)]
    yield "attach-control-short", 0, [record(3, value=4096)]
    yield "attach-unsealed", 0, [record(4, value=0x10)]
    yield "attach-control-sealed", 0, [record(5, value=0x8)]
    yield "attach-larger", 0, [record(0, 7, 72, 8192), record(0, 7, 80, 16384), record(2, value=16384)]
    talk = [record(0, value=100), record(1, value=4096), record(2), record(3), record(0, value=20000), record(3), record(4), record(4)]
    yield "reader", 1, talk
    yield "writer", 2, talk
    for field, value in ((0, 7), (2, -1), (2, 4097), (3, 4096), (3, -64), (3, 63), (3, 1 << 12 | 1), (3, 9 << 12 | 63 << 6 | 1), (3, 1 << 12 | 3)):
        yield "reader-field-%d-%x" % (field, value % (1 << 64)), 1, [record(0, value=10), record(5, field, 0, value), record(2), record(3)]
    yield "reader-slab-long", 1, [record(0, value=20000), record(5, 2, 0, 65535), record(3), record(4)]
    yield "reader-slab-longer", 1, [record(0, value=20000), record(5, 2, 0, 1 << 40), record(3), record(2)]
    yield "reader-published", 1, [record(0), record(6, 0, 0, -1)] + [record(3)] * 6 + [record(2)] * 3
    yield "reader-closed", 1, [record(0, value=1), record(6, 0, 1, 1), record(2), record(2)]
    yield "reader-seat", 1, [record(0, value=1), record(3), record(7, 0, 32, 5), record(4), record(2)]
    for name, value in (("ahead", 9), ("behind", -1), ("far", 1 << 63), ("next", 1)):
        yield "writer-cursor-" + name, 2, [record(0, value=3000), record(5, 0, 0, value), record(0, value=3000), record(2), record(0, value=50)]
    yield "writer-other-place", 2, [record(5, 0, 1, 77), record(0, value=4000), record(2), record(0, value=4000)]
    yield "writer-words", 2, [record(6, 0, word, -1) for word in range(32)] + talk
    yield "writer-left", 2, [record(0, value=5000), record(7, 0, 49, 1), record(0, value=5000), record(2)]
    yield "writer-leases", 2, [record(0, value=20000), record(2), record(7, 0, 2096, 1), record(0, value=20000), record(2), record(0, value=60000)]


here = os.path.dirname(os.path.abspath(__file__))
for seed, data_bytes, text in headers():
    write(os.path.join(here, "corpus/header"), seed, struct.pack("<I", data_bytes) + text.encode("utf-8", "surrogatepass"))
write(os.path.join(here, "corpus/header"), "name-broken-utf8", struct.pack("<I", 1) + b'{"\xc0\x80":' + entry().encode() + b"}")
for seed, text in indexes():
    write(os.path.join(here, "corpus/index"), seed, text.encode())
for seed, mode, steps in segments():
    write(os.path.join(here, "corpus/segment"), seed, bytes([mode]) + b"".join(steps))
