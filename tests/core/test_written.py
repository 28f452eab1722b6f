"""What a computation writes."""

import torch

from gradveil.gradients.fused import written_bytes


def test_written_bytes_counts_results_and_not_views() -> None:
    x = torch.zeros(8, 4)
    assert written_bytes(lambda: (x + 1).view(-1)) == 8 * 4 * 4
