"""Page-locks host memory for CUDA in the background, so that the engine starts at once.

Owns: registering memory with the driver piece by piece, and undoing it.
Must not know: what the memory holds. Copies from memory that is not pinned yet are only slower.
"""

from __future__ import annotations

import logging
import threading

import torch

from nano_oasis.config import format_bytes

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device and thread


class Pinner:
    """Pins `pieces`, (address, bytes) each, in order, on its own thread.

    A refusal by the driver (often the lock limit, `ulimit -l`) ends the work with one warning; what is
    pinned stays pinned. close() must come before the memory goes away.
    """

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self.pinned_bytes = 0
        self._pieces, self._done = pieces, list[int]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pin-host-kv", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for address, size in self._pieces:
                if self._stop.is_set():
                    return
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
                self._done.append(address)
                self.pinned_bytes += size
        except RuntimeError as error:
            total = format_bytes(sum(size for _, size in self._pieces))
            log.warning(
                "host KV: %s of %s pinned, then the driver refused (%s). The rest works, with slower "
                "copies; raise the lock limit (ulimit -l) or lower --host-kv-memory",
                format_bytes(self.pinned_bytes), total, error,
            )  # fmt: skip

    def wait(self) -> None:
        """Returns when everything that can be pinned is."""
        self._thread.join()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for address in self._done:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._done.clear()
        self.pinned_bytes = 0
