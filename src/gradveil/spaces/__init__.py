"""Kinds of examples: how a client's data are normalised, shown and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.core.space import Space
    from gradveil.spaces.image_space import ImageSpace
    from gradveil.spaces.table_space import TableColumn, TableSpace
    from gradveil.spaces.text_space import TextSpace
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ImageSpace": "gradveil.spaces.image_space",
            "Space": "gradveil.core.space",
            "TableColumn": "gradveil.spaces.table_space",
            "TableSpace": "gradveil.spaces.table_space",
            "TextSpace": "gradveil.spaces.text_space",
        },
    )

__all__ = ["ImageSpace", "Space", "TableColumn", "TableSpace", "TextSpace"]
