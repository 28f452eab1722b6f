"""The random numbers of deployments: a fresh secret from the operating system, and cryptographic streams below it.

Nothing of it depends on seeds, run ids or rounds, and nothing of it is kept: what has to repeat is the answer, which is
stored. Each stream is ChaCha20 with a 256-bit key of its own, HMAC-SHA-256 of the stream's address under the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gradveil.core.draws import Words
from gradveil.core.errors import GradveilError, fail
from gradveil.core.noise import Law

_FRESH = "make a new SecretKey() for every answer"


class SecretKey:
    """An address of a cryptographic stream below a 256-bit secret that `SecretKey()` draws from the operating system.

    Make one for an answer, and throw it away after it. It has `child` and `draw` as `gradveil.core.noise.Key` has them,
    but no generator of torch's. It cannot be copied, written down or used in another process than the one that made
    it: a forked child would draw the same numbers.
    """

    __slots__ = ("_path", "_process", "_root")

    def __init__(self) -> None:
        """Draw a secret."""
        self._root = os.urandom(32)
        self._path: tuple[str | int, ...] = ()
        self._process = os.getpid()

    def child(self, *parts: str | int) -> SecretKey:
        """Address a stream below this one."""
        below = object.__new__(SecretKey)
        below._root, below._path, below._process = self._root, (*self._path, *parts), self._process
        return below

    def draw(self, law: Law, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Draw a tensor from the stream of this address, on the CPU.

        A law that wants a generator of torch's is refused, and so is one that takes its numbers from elsewhere: who
        knows that source could subtract them. `public` laws draw what everybody knows.
        """
        stream = self.stream()
        try:
            drawn = law.sample(shape, dtype, stream)
        except TypeError as error:
            raise self._refused(
                law, f"cannot draw from a cryptographic stream ({str(error).splitlines()[0]})"
            ) from error
        if not stream.count and drawn.numel() and not getattr(law, "public", False):
            raise self._refused(law, "draws nothing from the stream it is given, so its numbers come from elsewhere")
        return drawn

    def stream(self) -> CipherStream:
        """Open the stream of this address, from its beginning."""
        if os.getpid() != self._process:
            raise fail("secret key", "was made in another process, which may draw the same numbers", _FRESH)
        return CipherStream(hmac.digest(self._root, json.dumps(self._path).encode(), hashlib.sha256))

    def _refused(self, law: Law, what: str) -> GradveilError:
        where = ".".join(("noise", *map(str, self._path[-1:])))
        remedy = "let it draw by the functions of gradveil.core.draws (uniform, normal, integers, ...)"
        return fail(where, f"its law {type(law).__name__} {what}", remedy)

    def __repr__(self) -> str:
        """Show the address alone."""
        return f"SecretKey(path={self._path})"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise fail("secret key", "cannot be copied or stored: the same noise would be drawn twice", _FRESH)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse it of every protocol."""
        self.__reduce__()


class CipherStream:
    """Uniform words from ChaCha20 under one key."""

    def __init__(self, key: bytes) -> None:
        """Begin at the first word."""
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ModuleNotFoundError as error:
            what = "needs the package cryptography, which is not installed"
            raise fail("secret key", what, "pip install 'gradveil[flower]'") from error
        # One key has one stream, so the nonce may be the same for all.
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self.count = 0
        """Words that were drawn."""

    def words(self, count: int) -> Words:
        """Return the next words: up to 2^35 of them, 256 GiB."""
        self.count += count
        drawn = bytearray(8 * count)
        self._cipher.update_into(drawn, drawn)
        return np.frombuffer(drawn, "<u8").astype(np.uint64, copy=False)
