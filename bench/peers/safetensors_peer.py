# SPDX-License-Identifier: Apache-2.0
"""The `safetensors` package: safe_open per file, its default mapping or its `pread` backend (--variant pread).

A rank's part: get_slice for the mapping (--variant slice, the default with --tp), or the whole tensor narrowed (--variant narrow, pread).
"""

from safetensors import safe_open
from worker import serve, share


def load(options, consumer):
    """File by file, names in the order of the file, as engines iterate."""
    backend = {"backend": "pread"} if options.variant == "pread" else {}
    sliced = options.tp > 1 and options.variant in ("", "slice")
    for path in options.files:
        with safe_open(path, framework="pt", device="cpu", **backend) as file:
            for name in file.offset_keys():
                if sliced:
                    part = file.get_slice(name)
                    begin, end = share(part.get_shape(), options)
                    tensor = part[begin:end]
                else:
                    tensor = consumer.narrow(file.get_tensor(name))
                consumer.take(name, tensor, mapped=not backend,
                              own=bool(backend) and options.tp == 1)


serve(load)
