"""Scripts written for torch.distributed, on numpy arrays."""

import numpy as np
import pytest
from torch_scripts import SCRIPTS, run_script


def test_ddp_by_hand():
    alone, together = run_script("ddp_by_hand", 1), run_script("ddp_by_hand", 4)
    for key, value in alone.items():
        np.testing.assert_allclose(together[key], value, rtol=1e-9)
    assert together["loss"] < 1


@pytest.mark.parametrize("ranks", [2, 5])
def test_ring_all_reduce(ranks):
    result = run_script("ring_all_reduce", ranks)
    assert result["last"] == 100_002 * ranks * (ranks + 1) / 2


def test_parameter_server():
    assert len(run_script("parameter_server", 4)["parameters"]) == 8


def test_there_are_no_others():
    assert SCRIPTS == ["ddp_by_hand", "parameter_server", "ring_all_reduce"]
