# SPDX-License-Identifier: Apache-2.0
"""`fastsafetensors` without GPU direct storage, on the CPU. A file at a time, as engines use it to bound its memory
(--variant all: all files at once, as its own example does)."""

from fastsafetensors import fastsafe_open
from worker import serve


def load(options, consumer):
    """Each file is read whole, its tensors are views."""
    groups = [options.files] if options.variant == "all" else [[path] for path in options.files]
    for group in groups:
        with fastsafe_open(group, nogds=True, device="cpu") as file:
            for name in file.keys():
                consumer.take(name, consumer.narrow(file.get_tensor(name)))


serve(load)
