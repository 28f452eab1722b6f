"""How often a cell of a row follows from its other cells: what an attribute's recovery has to be compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradveil.spaces.table_space import TableSpace

ROWS = 4000
"""Public rows that are used at most: half to fit, half to test."""
_RIDGE = 1e-3


def with_inference(space: TableSpace, inputs: Tensor) -> TableSpace:
    """Set `inferred` of each column: the share of public rows [N, inputs] whose cell a linear model guesses right.

    The model is a ridge regression on the inputs of all other columns, fitted to every second row and tested on the
    others; of a category it takes the level with the largest output.
    """
    rows = inputs[:ROWS].double()
    if len(rows) < 4:
        return space
    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    fit, test = rows[::2], rows[1::2]
    gram = fit.T @ fit + _RIDGE * len(fit) * torch.eye(rows.shape[1], dtype=rows.dtype)
    precision = torch.linalg.inv(gram)
    start, columns = 0, []
    for column in space.columns:
        own = slice(start, start + column.width)
        # The weights of a regression on all other inputs, from one inverse for all columns.
        weights = -precision[:, own] @ torch.linalg.inv(precision[own, own])
        weights[own] = 0
        guesses, truths = test @ weights, test[:, own]
        close = (guesses - truths).abs()[:, 0] <= column.tolerance
        hits = guesses.argmax(1) == truths.argmax(1) if column.levels else close
        columns.append(replace(column, inferred=float(hits.double().mean())))
        start += column.width
    return TableSpace(tuple(columns))
