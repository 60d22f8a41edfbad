# SPDX-License-Identifier: Apache-2.0
"""`runai-model-streamer` with its defaults. Each rank gets every tensor and narrows it."""

from runai_model_streamer import SafetensorsStreamer
from worker import serve


def load(options, consumer):
    """All files in one stream; a tensor is valid until the next one is asked for."""
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(options.files)
        for name, tensor in streamer.get_tensors():
            consumer.take(name, consumer.narrow(tensor))


serve(load)
