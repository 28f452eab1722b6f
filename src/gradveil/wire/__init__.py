"""Updates as bytes: header, packing and codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.wire.codec import decode, encode, encoded_size, fits, inspect
    from gradveil.wire.header import Described, Header, Layout, WireError
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Described": "gradveil.wire.header",
            "Header": "gradveil.wire.header",
            "Layout": "gradveil.wire.header",
            "WireError": "gradveil.wire.header",
            "decode": "gradveil.wire.codec",
            "encode": "gradveil.wire.codec",
            "encoded_size": "gradveil.wire.codec",
            "fits": "gradveil.wire.codec",
            "inspect": "gradveil.wire.codec",
        },
    )

__all__ = [
    "Described",
    "Header",
    "Layout",
    "WireError",
    "decode",
    "encode",
    "encoded_size",
    "fits",
    "inspect",
]
