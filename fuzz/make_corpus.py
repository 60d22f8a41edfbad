#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpora: corpus/header (4 bytes of data length, then a header), corpus/index (index.json, config.json).

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


here = os.path.dirname(os.path.abspath(__file__))
for seed, data_bytes, text in headers():
    write(os.path.join(here, "corpus/header"), seed, struct.pack("<I", data_bytes) + text.encode("utf-8", "surrogatepass"))
write(os.path.join(here, "corpus/header"), "name-broken-utf8", struct.pack("<I", 1) + b'{"\xc0\x80":' + entry().encode() + b"}")
for seed, text in indexes():
    write(os.path.join(here, "corpus/index"), seed, text.encode())
