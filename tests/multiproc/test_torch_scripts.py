"""Scripts written for torch.distributed, on numpy arrays."""

import numpy as np
from torch_scripts import SCRIPTS, run_script


def test_ddp_by_hand():
    alone, together = run_script("ddp_by_hand", 1), run_script("ddp_by_hand", 4)
    for key, value in alone.items():
        np.testing.assert_allclose(together[key], value, rtol=1e-9)
    assert together["loss"] < 1


def test_parameter_server():
    assert len(run_script("parameter_server", 4)["parameters"]) == 8


def test_there_are_no_others():
    assert SCRIPTS == ["ddp_by_hand", "parameter_server"]
